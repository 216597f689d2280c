"""Tensors that change their memory and stay the same objects: what every component of weights or optimizer state is made of.

A component's tensors are grouped by storage, so that tied ones stay tied. Of a tensor that is divided over ranks the part of this
rank is moved, and with every view the tensor that it was cut from, which would keep the memory. Off the device each object is an
empty placeholder of its dtype and device: who uses it by mistake gets an error of shapes. The bytes meanwhile are in host memory,
in a file, or (frozen models) nowhere but in the model's own folder.

Invariants: those of residency/component.py. Whatever a move needs is taken and filled before anything is let go, and the swap
in between cannot fail. Used on one thread at a time. Called by residency/manager.py; made by residency/components.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.errors import ResidencyError
from asyncrl.residency.device import Device
from asyncrl.residency.spill import read_spill, write_spill
from asyncrl.schema.control import Residence

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor object, and what it looks like when its bytes are there."""

    tensor: torch.Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Note what a tensor looks like."""
        return cls(tensor, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def show(self, raw: torch.Tensor) -> None:
        """Let the object see these bytes."""
        values = raw.view(self.dtype)
        self.tensor.data = values.as_strided(self.size, self.stride, int(values.storage_offset()) + self.offset)

    def hide(self, device: torch.device) -> None:
        """Let the object see none."""
        self.tensor.data = torch.empty(0, dtype=self.dtype, device=device)


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
            view.show(raw)

    def hide(self, device: torch.device) -> None:
        """Let no object see any."""
        for view in self.views:
            view.hide(device)


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
        self._name = name
        self._device = device
        self._collect = collect
        self._path = None if folder is None else folder / f"{name.replace(' ', '_')}.safetensors"
        self._residence: Residence = "device"
        self._blocks: tuple[Block, ...] = ()
        self._host: list[torch.Tensor] = []
        self.look()

    @property
    def name(self) -> str:
        """Return its name."""
        return self._name

    @property
    def residence(self) -> Residence:
        """Return where it is."""
        return self._residence

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
        if self._residence == "device":
            self._blocks = blocks_of(self._collect(), self._device.kind)
            self._device.hold(block.views[0].tensor for block in self._blocks)

    def move(self, to: Residence) -> None:
        """See `Component`."""
        if to not in self.places:
            raise ResidencyError(f"{self._name} cannot go to {to!r}; it may be in {', '.join(sorted(self.places))}")
        if to == self._residence:
            return
        self.look()
        match to:
            case "device":
                self._arrive()
            case "host":
                self._leave(self._filled(self._device.take_host))
            case "disk":
                self._spill()
                self._leave([])
            case "absent":
                self._give_up()
        self._clean_up(to)

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Let every object see its bytes where they are, in host memory or in the file: to be read, not changed."""
        if self._residence == "device":
            yield
            return
        for block, raw in zip(self._blocks, self._contents(), strict=True):
            block.show(raw)
        try:
            yield
        finally:
            self._hide()

    # -- where the bytes are ---------------------------------------------------------------------------------------------

    def _contents(self) -> Iterator[torch.Tensor]:
        """Yield each block's bytes from where they are."""
        match self._residence:
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

    def _made_anew(self) -> Iterator[torch.Tensor]:
        """Yield each block's bytes though they are nowhere; frozen models can."""
        raise AssertionError(f"{self._name} was destroyed and cannot be made anew")

    def _filled(self, take: Callable[[Sequence[int]], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return new memory that holds the bytes; where it cannot be had, nothing has changed."""
        try:
            taken = take([block.num_bytes for block in self._blocks])
        except (torch.OutOfMemoryError, MemoryError, OSError) as error:
            raise ResidencyError(f"no room for {self._name} ({self.num_bytes / 2**30:.3f} GiB): {error}") from error
        pairs = zip(self._contents(), taken, strict=True)
        if self._residence in {"device", "host"}:
            self._device.copy(list(pairs))
        else:  # one at a time: contents from files need not be in memory together
            for pair in pairs:
                self._device.copy([pair])
        return taken

    def _arrive(self) -> None:
        for block, raw in zip(self._blocks, self._filled(self._device.take), strict=True):
            block.show(raw)

    def _leave(self, host: list[torch.Tensor]) -> None:
        if self._residence == "device":
            self._hide()
        self._host = host

    def _give_up(self) -> None:
        """Destroy the bytes; `_made_anew` brings them back."""
        self._leave([])

    def _hide(self) -> None:
        for block in self._blocks:
            block.hide(self._device.kind)

    def _spill(self) -> None:
        assert self._path is not None
        sizes = {block.names[0]: block.num_bytes for block in self._blocks}
        write_spill(self._path, sizes, (raw.cpu() for raw in self._contents()))

    def _clean_up(self, to: Residence) -> None:
        """Note where it is now, and let go of where it was."""
        before, self._residence = self._residence, to
        if to == "device":
            self._host = []
        if to in {"disk", "absent"} or before == "device":
            # In host memory it soon takes as much again; elsewhere it goes to make room.
            self._device.give_back(at_once=to != "host")
        if before == "disk" and self._path is not None:
            self._path.unlink(missing_ok=True)


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
    return tuple(
        Block(tuple(names[address]), tuple(map(View.of, known)), known[0].untyped_storage().nbytes())
        for address, known in objects.items()
    )


def _owners(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the objects by which a tensor holds memory: itself, or its part here, and what that is a view of."""
    # Not `to_local`, which makes a new object of a parameter's part.
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    yield own
    if own._base is not None:  # noqa: SLF001 - the documented mark of a view
        yield own._base  # noqa: SLF001
