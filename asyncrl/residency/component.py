"""Components: what can be moved between device, host memory and disk, and tensors that move and stay the same Python objects.

Invariants of every component (tests/contract/test_component.py runs over all of them):
- `residence` says where its bytes are. On `disk` and `absent` it holds neither device nor host memory, on `host` no device
  memory.
- A move keeps every bit, and the Python objects: a module's parameters stay the very parameters that an optimizer knows.
- A move that fails (no room, disk full) leaves the component whole where it was. Whatever a move needs is taken and filled before
  anything is let go, and the swap in between cannot fail.

A tensor component groups its tensors by storage, so that tied ones stay tied. Of a tensor that is divided over ranks the part of
this rank is moved, together with the tensor that it is a view of, which would keep the memory. Off the device each object is an
empty placeholder of its dtype and device, so using it by mistake is an error of shapes. The bytes meanwhile are in host memory,
in a file, or (frozen models) only in the model's own folder. Used on one thread at a time.

The file is safetensors: the bytes of each storage (`U8`) under the first name that lives on it. It is written beside its name and
renamed, a tensor at a time, so that it never needs the component's size twice in host memory (safetensors' own `save_file` does).
It is read back through the page cache. It is swap: not synced, and gone with the run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from asyncrl.errors import ResidencyError
from asyncrl.residency.device import Device
from asyncrl.schema.control import Residence

HEADER_ALIGNMENT = 8
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Component(Protocol):
    """Something with bytes that a phase may need on the device."""

    @property
    def name(self) -> str:
        """Return its name, as `ComponentMove` has it."""
        ...

    @property
    def residence(self) -> Residence:
        """Return where it is."""
        ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes it takes on the device when it is there."""
        ...

    @property
    def places(self) -> frozenset[Residence]:
        """Return where it may be.

        `absent` destroys it: only what can be made anew (an engine's weights, a KV cache, a frozen model) has that.
        """
        ...

    def look(self) -> None:
        """See how large it is now: an optimizer's state grows out of its first step."""
        ...

    def move(self, to: Residence) -> None:
        """Bring it there and return once it is; blocking.

        Raises:
            ResidencyError: There is no room, or it cannot go there; it is where it was.
        """
        ...


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

    names: tuple[str, ...]
    views: tuple[View, ...]
    num_bytes: int

    @property
    def raw(self) -> torch.Tensor:
        """Return the whole storage as bytes, while the objects see them."""
        storage = self.views[0].tensor.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def show(self, raw: torch.Tensor) -> None:
        """Let every object see these bytes."""
        for view in self.views:
            values = raw.view(view.dtype)
            view.tensor.data = values.as_strided(view.size, view.stride, int(values.storage_offset()) + view.offset)

    def hide(self, device: torch.device) -> None:
        """Let no object see any."""
        for view in self.views:
            view.tensor.data = torch.empty(0, dtype=view.dtype, device=device)


class TensorComponent:
    """Named tensors on a device that can leave it."""

    def __init__(self, name: str, device: Device, collect: Callable[[], NamedTensors], folder: Path | None = None) -> None:
        """Take over tensors.

        Args:
            name: As `ComponentMove` has it.
            device: Where they are.
            collect: Names them while they are on the device; asked again before each departure, because an optimizer's state
                comes into being with its first step. Tensors that are elsewhere are left alone.
            folder: Where it may be written to; None: it never goes to disk.
        """
        self.name = name
        self.residence: Residence = "device"
        self._device = device
        self._collect = collect
        self._path = None if folder is None else folder / f"{name.replace(' ', '_')}.safetensors"
        self._blocks: tuple[Block, ...] = ()
        self._host: list[torch.Tensor] = []
        self.look()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its storages."""
        return sum(block.num_bytes for block in self._blocks)

    @property
    def places(self) -> frozenset[Residence]:
        """Return where it may be."""
        return frozenset({"device", "host"} if self._path is None else {"device", "host", "disk"})

    def look(self) -> None:
        """See what tensors there are now, and count them; only on the device can there be new ones."""
        if self.residence == "device":
            self._blocks = blocks_of(self._collect(), self._device.kind)
            self._device.hold(block.views[0].tensor for block in self._blocks)

    def move(self, to: Residence) -> None:
        """See `Component`."""
        if to not in self.places:
            raise ResidencyError(f"{self.name} cannot go to {to!r}; it may be in {', '.join(sorted(self.places))}")
        if to == self.residence:
            return
        self.look()
        before, host = self.residence, list[torch.Tensor]()
        match to:
            case "device":
                for block, raw in zip(self._blocks, self._filled(self._device.take), strict=True):
                    block.show(raw)
            case "host":
                host = self._filled(self._device.take_host)
            case "disk":
                assert self._path is not None
                sizes = {block.names[0]: block.num_bytes for block in self._blocks}
                write_spill(self._path, sizes, (raw.cpu() for raw in self._contents()))
            case "absent":
                self._prepare_absence()
        if before == "device":
            self._hide()
        self._host, self.residence = host, to
        if before == "device" or to in {"disk", "absent"}:
            self._device.give_back()
        if before == "disk" and self._path is not None:
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
                yield from (block.raw for block in self._blocks)
            case "host":
                yield from self._host
            case "disk":
                assert self._path is not None
                spilled = read_spill(self._path) if self._blocks else {}
                yield from (spilled[block.names[0]] for block in self._blocks)
            case "absent":
                yield from self._made_anew()

    def _prepare_absence(self) -> None:
        """Note what `_made_anew` needs, before the bytes are destroyed; frozen models do."""

    def _made_anew(self) -> Iterator[torch.Tensor]:
        """Yield each block's bytes though they are nowhere; frozen models can."""
        raise AssertionError(f"{self.name} was destroyed and cannot be made anew")

    def _filled(self, take: Callable[[Sequence[int]], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return new memory that holds the bytes; where it cannot be had, nothing has changed."""
        try:
            taken = take([block.num_bytes for block in self._blocks])
        except (torch.OutOfMemoryError, MemoryError, OSError) as error:
            raise ResidencyError(f"no room for {self.name} ({self.num_bytes / 2**30:.3f} GiB): {error}") from error
        pairs = zip(self._contents(), taken, strict=True)
        if self.residence in {"device", "host"}:
            self._device.copy(list(pairs))
        else:  # one at a time: contents from files need not be in memory together
            for pair in pairs:
                self._device.copy([pair])
        return taken

    def _hide(self) -> None:
        for block in self._blocks:
            block.hide(self._device.kind)


def blocks_of(named: NamedTensors, device: torch.device) -> tuple[Block, ...]:
    """Return the distinct objects that lie on a device, those of one storage together, without those that have none."""
    names: dict[int, list[str]] = {}
    objects: dict[int, list[torch.Tensor]] = {}
    for name, tensor in ((name, own) for name, whole in named for own in _owners(whole)):
        if tensor.device != device or not tensor.untyped_storage().nbytes():
            continue
        address = tensor.untyped_storage().data_ptr()
        names.setdefault(address, []).append(name)
        known = objects.setdefault(address, [])
        if all(tensor is not other for other in known):
            known.append(tensor)
    blocks = []
    for address, known in objects.items():
        views = [View(one, one.dtype, one.size(), one.stride(), int(one.storage_offset())) for one in known]
        blocks.append(Block(tuple(names[address]), tuple(views), known[0].untyped_storage().nbytes()))
    return tuple(blocks)


def _owners(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the objects by which a tensor holds memory: itself, or its part here, and what that is a view of."""
    # Not `to_local`, which makes a new object of a parameter's part.
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    yield own
    if own._base is not None:  # noqa: SLF001 - the documented mark of a view
        yield own._base  # noqa: SLF001


def write_spill(path: Path, sizes: Mapping[str, int], contents: Iterable[torch.Tensor]) -> None:
    """Write a file whole or not at all.

    Args:
        path: Its name; a file already there is replaced.
        sizes: Bytes of each tensor by name.
        contents: The tensors in the same order, uint8, on the CPU; asked for one at a time.

    Raises:
        ResidencyError: The disk would not take it; nothing is left behind.
    """
    entries, start = {}, 0
    for name, size in sizes.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor in contents:
                file.write(tensor.numpy().data)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ResidencyError(
            f"cannot write {sum(sizes.values()) / 2**30:.2f} GiB to {path}: {error.strerror or error}; make room there, or keep "
            'what is offloaded in host memory (placement.offload_to = "host")'
        ) from error


def read_spill(path: Path) -> dict[str, torch.Tensor]:
    """Return what `write_spill` wrote, memory-mapped: pages come from disk as they are read, none is copied."""
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the library's own reader is no dict
    except OSError as error:
        raise ResidencyError(
            f"cannot read {path} back: {error}; it belongs to the run that wrote it, so leave it there"
        ) from error
