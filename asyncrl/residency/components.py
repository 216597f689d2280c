"""Components: named tensors that move between device, host memory and disk, and stay the same Python objects.

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
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.errors import ResidencyError
from asyncrl.folders import replacing
from asyncrl.models.layout import ALIGNMENT_BYTES
from asyncrl.residency.device import Device
from asyncrl.schema.control import Residence

HELD_TOO = "asyncrl_held_too"
"""Attribute of a divided module: yields the other tensors that lie on its parameters' memory (learner/ranks/fsdp.py)."""
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
