"""Components: named tensors that move between device, host memory and disk, and stay the same Python objects; and their manager.

A component is a module's weights, an optimizer's state or a frozen model. Invariants (tests/contract/test_component.py):
- `residence` says where its bytes are. On `disk` it holds neither device nor host memory, on `host` no device memory.
- A move keeps every bit, and the Python objects: a module's parameters stay the very parameters that an optimizer knows.
- A move that fails (no room, disk full) leaves the component whole where it was. Whatever a move needs is taken and filled before
  anything is let go, and the swap in between cannot fail.

Tensors are grouped by storage, so that tied ones stay tied. Of a tensor that is divided over ranks the part of this rank is
moved, together with the tensor that it is a view of, which would keep the memory. Off the device each object is an empty
placeholder of its dtype and device, so using it by mistake is an error of shapes. Used on one thread at a time.

The file is the bytes of one storage after the other, each at a multiple of 64 bytes. It is written beside its name and renamed, a
tensor at a time, and read back through the page cache. It is swap: not synced, and gone with the run. That of a frozen model is
written once.

`ResidencyManager` carries plans out, times every move and writes it to a timeline, knows what is where and what the peak of each
phase was. After a move that failed it still knows where everything is, and the next switch plans from there. The phase is noted
only once all its needs are met.
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
"""Attribute of a divided module: yields the other tensors that lie on its parameters' memory (learner/ranks/fsdp.py)."""
OWN_SWITCH = -1
"""The number of a switch that no controller asked for."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor object, and what it looks like when its bytes are there."""

    tensor: torch.Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Block:
    """One storage, with the objects that live on it."""

    views: tuple[View, ...]
    num_bytes: int

    def show(self, raw: torch.Tensor) -> None:
        """Let every object see these bytes."""
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
        """Take over tensors.

        Args:
            name: As `ComponentMove` has it.
            device: Where they are.
            collect: Names them while they are on the device; asked again before each departure, because an optimizer's state
                comes into being with its first step. Tensors that are elsewhere are left alone.
            folder: Where it is written to when it goes to disk.
            is_frozen: The values never change: its file is written once, and stays.
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
        """Take over a module's parameters and persistent buffers; rotary tables and the like are small, and stay."""
        return cls(
            name, device, lambda: [*module.state_dict(keep_vars=True).items(), *getattr(module, HELD_TOO, tuple)()], folder,
            is_frozen=is_frozen,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Return the bytes it takes on the device when it is there."""
        return sum(block.num_bytes for block in self._blocks)

    def look(self) -> None:
        """See what tensors there are now, and count them; only on the device can there be new ones."""
        if self.residence != "device":
            return
        objects: dict[int, list[torch.Tensor]] = {}
        # By the address of their storage: the distinct ones that lie on the device and have memory.
        for _, whole in self._collect():
            # What holds the memory: the part here, not by `to_local`, which makes a new object; and what that is a view of.
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
        """Bring it there and return once it is; blocking.

        Raises:
            ResidencyError: There is no room; it is where it was.
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
        """Let every object see its bytes where they are, in host memory or in the file: to be read, not changed."""
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
        """Return new memory that holds the bytes; where it cannot be had, nothing has changed."""
        try:
            taken = self._device.take([block.num_bytes for block in self._blocks], on_host=on_host)
        except (RuntimeError, MemoryError, OSError) as error:  # torch says a plain RuntimeError where host memory is full
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
    """Write a file whole or not at all.

    Args:
        path: Its name; a file already there is replaced.
        contents: uint8, on the CPU; asked for one at a time.

    Raises:
        ResidencyError: The disk would not take it; nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            for tensor in contents:
                file.write(tensor.numpy().data)
                file.write(bytes(-tensor.nbytes % ALIGNMENT_BYTES))
    except OSError as error:
        raise ResidencyError(
            f"cannot write to {path}: {error.strerror or error}; make room there, or keep what is offloaded in host memory "
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
        """Take over components, each where it is.

        Args:
            placement: How much of host memory offloaded components may take, and where they go first.
            run_folder: `memory/PROCESS.jsonl` in it gets a line of every switch and of every move within a phase.
            process: As it said at hello.
            components: Moved by nobody else from now on.
            phases: What each declares.
            device: Shared with other processes.
            clock: Times moves.
        """
        self._process = process
        self._components: dict[str, TensorComponent] = {component.name: component for component in components}
        self._phases: Mapping[Phase, PhaseNeeds] = {needs.phase: needs for needs in phases}
        self._device, self._clock, self._timeline = device, clock, open_memory(run_folder, process)
        self._host_bytes, self._offload_to = int(placement.host_memory_gib * GIB) or None, placement.offload_to
        self.phase: Phase | None = None
        """That was reached last; None before the first."""
        self._peak_bytes = 0
        """Since the controller was last told, besides what the device measures."""
        device.reset_peak()

    def close(self) -> None:
        """Close the timeline; what is where stays. Safe to repeat."""
        self._timeline.close()

    @property
    def resident(self) -> dict[str, int]:
        """Return component to bytes on the device."""
        return {one.name: one.num_bytes for one in self._components.values() if one.residence == "device"}

    def switch(self, phase: Phase, number: int = OWN_SWITCH) -> PhaseReached:
        """Bring about what a phase needs.

        Args:
            phase: One of those declared.
            number: Of the controller's switch; the process's own switches, within a phase, have none.

        Returns:
            The answer to the controller: the moves of this switch, what is resident, and the peak since its last one.

        Raises:
            ResidencyError: It cannot be done; everything is whole, some of it moved.
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
            if number != OWN_SWITCH and self._phases[phase].gives_back:  # gradients and activations are no components
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
        """Let everything be read where it is, to save it, without a byte on the device."""
        with contextlib.ExitStack() as stack:
            for component in self._components.values():
                stack.enter_context(component.readable())
            yield
