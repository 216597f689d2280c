"""Components: named tensors that move between device, host memory and disk, and stay the same Python objects; and their manager.

A component is a module's weights, an optimizer's state or a frozen model. Invariants (tests/contract/test_component.py):
- `residence` says where its bytes are. On `disk` it uses neither device nor host memory, on `host` no device memory.
- A move keeps every bit, and the Python objects: a module's parameters stay the same objects that the optimizer refers to.
- A move that fails (out of memory, disk full) leaves the component complete where it was. All memory that a move needs is taken
  and filled before any is released, and the exchange in between cannot fail.

Tensors are grouped by storage, so that tied ones stay tied. For a tensor that is divided over ranks, this rank's part is moved,
together with the tensor of which it is a view, because that would keep the memory. Off the device each object is an empty
placeholder of its dtype and device, so using it by mistake causes a shape error. Used on one thread at a time.

The file contains one storage after the other, each at a multiple of 64 bytes. It is written tensor by tensor to a temporary name,
renamed, and read back through the page cache. It is swap: not synced, and removed with the run. A frozen model's file is
written once.

`ResidencyManager` executes plans, times every move and writes it to a timeline, and tracks where components are and the peak of
each phase. After a failed move it still knows where everything is, and the next switch plans from there. The phase is recorded
only when all its needs are met.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from asyncrl.clock import Clock
from asyncrl.config.run import PlacementConfig
from asyncrl.errors import ResidencyError
from asyncrl.folders import replacing
from asyncrl.models.layout import ALIGNMENT_BYTES
from asyncrl.observe.steps import MemoryLine, open_memory
from asyncrl.residency.device import Device
from asyncrl.residency.plan import GIB, Part, PhaseNeeds, gib, plan_switch
from asyncrl.schema.control import ComponentMove, Phase, PhaseReached, Residence

HELD_TOO = "asyncrl_held_too"
"""Attribute of a divided module: yields other tensors that use its parameters' memory (learner/ranks/fsdp.py)."""
OWN_SWITCH = -1
"""The number of a switch that the controller did not order."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor object, and its dtype and shape when its bytes are present."""

    tensor: torch.Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Block:
    """One storage, with the tensor objects that use it."""

    views: tuple[View, ...]
    num_bytes: int

    def show(self, raw: torch.Tensor) -> None:
        """Make every object a view of these bytes."""
        for view in self.views:
            values = raw.view(view.dtype)
            view.tensor.data = values.as_strided(view.size, view.stride, int(values.storage_offset()) + view.offset)


class TensorComponent:
    """Named tensors on a device that can leave it.

    Example:
        >>> from asyncrl.residency.device import SimulatedDevice
        >>> layer = torch.nn.Linear(4, 4)
        >>> component = TensorComponent.of_module("policy", layer, SimulatedDevice(), Path("swap"))
        >>> component.move("host")
        >>> layer.weight.shape, component.residence
        (torch.Size([0]), 'host')
    """

    def __init__(
        self, name: str, device: Device, collect: Callable[[], NamedTensors], folder: Path, *, is_frozen: bool = False
    ) -> None:
        """Make a component of tensors on a device.

        Args:
            name: Name in `ComponentMove`.
            device: The device of the tensors.
            collect: Returns the named tensors while they are on the device; called again before each move off it, because an
                optimizer's state is created in its first step. Tensors that are elsewhere are ignored.
            folder: Folder of its file when it is on disk.
            is_frozen: Whether the values never change; if so, its file is written once and kept.
        """
        self.name = name
        self.residence: Residence = "device"
        self._device, self._collect = device, collect
        self._is_frozen, self._is_written = is_frozen, False
        self._path = folder / f"{name.replace(' ', '_')}.bin"
        self._blocks: tuple[Block, ...] = ()
        self._host: list[torch.Tensor] = []
        self.look()

    @classmethod
    def of_module(
        cls, name: str, module: torch.nn.Module, device: Device, folder: Path, *, is_frozen: bool = False
    ) -> TensorComponent:
        """Make a component of a module's parameters and persistent buffers; other buffers (rotary tables) are small, and stay."""
        return cls(
            name, device, lambda: [*module.state_dict(keep_vars=True).items(), *getattr(module, HELD_TOO, tuple)()], folder,
            is_frozen=is_frozen,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it uses when it is on the device."""
        return sum(block.num_bytes for block in self._blocks)

    def look(self) -> None:
        """Find the present tensors, and count them; new ones can only exist while it is on the device."""
        if self.residence != "device":
            return
        objects: dict[int, list[torch.Tensor]] = {}
        # By the address of their storage: distinct tensors on the device that have memory.
        for _, whole in self._collect():
            # Owners of the memory: the local part (not by `to_local`, which makes a new object), and the tensor it is a view of.
            own: torch.Tensor = getattr(whole, "_local_tensor", whole)
            for tensor in (own, own._base):  # noqa: SLF001 - the documented mark of a view
                if tensor is None or tensor.device != self._device.kind or not tensor.untyped_storage().nbytes():
                    continue
                known = objects.setdefault(tensor.untyped_storage().data_ptr(), [])
                if all(tensor is not other for other in known):
                    known.append(tensor)
        blocks = []
        for known in objects.values():
            views = [View(one, one.dtype, one.size(), one.stride(), int(one.storage_offset())) for one in known]
            blocks.append(Block(tuple(views), known[0].untyped_storage().nbytes()))
        self._blocks = tuple(blocks)
        self._device.hold(block.views[0].tensor for block in blocks)

    def move(self, to: Residence) -> None:
        """Move the component and return when it has arrived; blocking.

        Raises:
            ResidencyError: There is not enough memory or disk space; the component is where it was.
        """
        if to == self.residence:
            return
        self.look()
        before, host = self.residence, list[torch.Tensor]()
        match to:
            case "device":
                for block, raw in zip(self._blocks, self._filled(on_host=False), strict=True):
                    block.show(raw)
            case "host":
                host = self._filled(on_host=True)
            case "disk":
                if not self._is_written:
                    write_spill(self._path, (raw.cpu() for raw in self._contents()))
                self._is_written = self._is_frozen
        if before == "device":
            self._hide()
        self._host, self.residence = host, to
        if before == "device" or to == "disk":
            self._device.give_back()
        if before == "disk" and not self._is_frozen:
            self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Make every object a view of its bytes in host memory or in the file within the context: to read, not to change."""
        if self.residence == "device":
            yield
            return
        for block, raw in zip(self._blocks, self._contents(), strict=True):
            block.show(raw)
        try:
            yield
        finally:
            self._hide()

    def _contents(self) -> Iterator[torch.Tensor]:
        """Yield each block's bytes from where they are."""
        match self.residence:
            case "device":
                for storage in (block.views[0].tensor.untyped_storage() for block in self._blocks):
                    yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            case "host":
                yield from self._host
            case "disk":
                if self._blocks:  # memory-mapped: pages come from disk as they are read
                    spilled = torch.from_file(os.fspath(self._path), size=self._path.stat().st_size, dtype=torch.uint8)
                    start = 0
                    for block in self._blocks:
                        yield spilled[start : start + block.num_bytes]
                        start += block.num_bytes + -block.num_bytes % ALIGNMENT_BYTES

    def _filled(self, *, on_host: bool) -> list[torch.Tensor]:
        """Return new memory with a copy of the bytes; if there is not enough, nothing has changed."""
        try:
            taken = self._device.take([block.num_bytes for block in self._blocks], on_host=on_host)
        except (RuntimeError, MemoryError, OSError) as error:  # torch raises a plain RuntimeError if host memory is full
            raise ResidencyError(f"no room for {self.name} ({self.num_bytes / 2**30:.3f} GiB): {error}") from error
        pairs = zip(self._contents(), taken, strict=True)
        if self.residence in {"device", "host"}:
            self._device.copy(list(pairs))
        else:  # one at a time: contents from files need not be in memory together
            for pair in pairs:
                self._device.copy([pair])
        return taken

    def _hide(self) -> None:
        for view in (view for block in self._blocks for view in block.views):
            view.tensor.data = torch.empty(0, dtype=view.dtype, device=self._device.kind)


def write_spill(path: Path, contents: Iterable[torch.Tensor]) -> None:
    """Write a file atomically.

    Args:
        path: Path of the file; an existing file is replaced.
        contents: uint8, on the CPU; requested one at a time.

    Raises:
        ResidencyError: The file cannot be written; no incomplete file is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            for tensor in contents:
                file.write(tensor.numpy().data)
                file.write(bytes(-tensor.nbytes % ALIGNMENT_BYTES))
    except OSError as error:
        raise ResidencyError(
            f"cannot write to {path}: {error.strerror or error}; make room there, or keep offloaded components in host memory "
            '(placement.offload_to = "host")'
        ) from error


class ResidencyManager:
    """A process's components on one device.

    Example:
        >>> manager = ResidencyManager(placement, run_folder, "learner", components, phases, device, clock)  # doctest: +SKIP
        >>> [(move.component, move.after) for move in manager.switch("rollout", 0).moves]  # doctest: +SKIP
        [('policy', 'host')]
    """

    def __init__(
        self, placement: PlacementConfig, run_folder: Path, process: str, components: Iterable[TensorComponent],
        phases: Iterable[PhaseNeeds], device: Device, clock: Clock,
    ) -> None:  # fmt: skip
        """Manage components from their present places.

        Args:
            placement: Sets how much host memory offloaded components may use, and where they go first.
            run_folder: `memory/PROCESS.jsonl` in it gets a line for every switch and for every move within a phase.
            process: The process's name, as in its hello message.
            components: From now on only the manager moves them.
            phases: Needs of each phase.
            device: The device, shared with other processes.
            clock: Times moves.
        """
        self._process = process
        self._components: dict[str, TensorComponent] = {component.name: component for component in components}
        self._phases: Mapping[Phase, PhaseNeeds] = {needs.phase: needs for needs in phases}
        self._device, self._clock, self._timeline = device, clock, open_memory(run_folder, process)
        self._host_bytes, self._offload_to = int(placement.host_memory_gib * GIB) or None, placement.offload_to
        self.phase: Phase | None = None
        """The phase that was reached last; None before the first."""
        self._peak_bytes = 0
        """Peak since the last answer to the controller, in addition to what the device measures."""
        device.reset_peak()

    def close(self) -> None:
        """Close the timeline; components stay where they are. Safe to repeat."""
        self._timeline.close()

    @property
    def resident(self) -> dict[str, int]:
        """Return component to bytes on the device."""
        return {one.name: one.num_bytes for one in self._components.values() if one.residence == "device"}

    def switch(self, phase: Phase, number: int = OWN_SWITCH) -> PhaseReached:
        """Move components as a phase needs.

        Args:
            phase: One of the declared phases.
            number: Number of the controller's switch; the process's own switches, within a phase, have none.

        Returns:
            The answer to the controller: the moves of this switch, what is resident, and the peak since its last one.

        Raises:
            ResidencyError: A move failed; all components are complete, but some may have moved.
        """
        for component in self._components.values():
            component.look()
        parts = [Part(one.name, one.num_bytes, one.residence) for one in self._components.values()]
        moves = plan_switch(parts, self._phases[phase], self._device.budget_bytes, self._host_bytes, self._offload_to)
        started_s = self._clock.now()
        done: list[ComponentMove] = []
        peak_bytes = max(self._device.peak_bytes, sum(self.resident.values()))
        try:
            for move in moves:
                began_s = self._clock.now()
                self._components[move.component].move(move.after)
                done.append(msgspec.structs.replace(move, seconds=self._clock.now() - began_s))
            if number != OWN_SWITCH and self._phases[phase].gives_back:  # gradients and activations are not components
                self._device.give_back()
        except ResidencyError as error:
            held = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in self.resident.items())
            raise type(error)(f"phase {phase!r} was not reached: {error}; on the device: {held or 'nothing'}") from error
        finally:
            self._peak_bytes = max(self._peak_bytes, peak_bytes)
            if done or number != OWN_SWITCH:
                switched = phase, number, started_s, self._clock.now(), tuple(done), self.resident, peak_bytes, self.phase or ""
                self._timeline.write(MemoryLine(self._process, *switched))
                self._device.reset_peak()
        self.phase = phase
        reached = PhaseReached(self._process, phase, number, tuple(done), self.resident, self._peak_bytes, self._clock.now())
        if number != OWN_SWITCH:
            self._peak_bytes = 0
        return reached

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Make all components readable in place, to save them without device memory."""
        with contextlib.ExitStack() as stack:
            for component in self._components.values():
                stack.enter_context(component.readable())
            yield
