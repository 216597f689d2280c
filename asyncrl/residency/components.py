"""Components: what can be moved between device, host memory and disk, and tensors that move and stay the same Python objects.

Kinds: a module's weights, an optimizer's state, a frozen model, and what something else moves. Invariants of all
(tests/contract/test_component.py):
- `residence` says where its bytes are. On `disk` and `absent` it holds neither device nor host memory, on `host` no device
  memory.
- A move keeps every bit, and the Python objects: a module's parameters stay the very parameters that an optimizer knows.
- A move that fails (no room, disk full) leaves the component whole where it was. Whatever a move needs is taken and filled before
  anything is let go, and the swap in between cannot fail.

A tensor component groups its tensors by storage, so that tied ones stay tied. Of a tensor that is divided over ranks the part of
this rank is moved, together with the tensor that it is a view of, which would keep the memory. Off the device each object is an
empty placeholder of its dtype and device, so using it by mistake is an error of shapes. The bytes meanwhile are in host memory,
in a file, or (frozen models) only in the model's own folder. Used on one thread at a time.

The file is the bytes of one storage after the other, each at a multiple of 64 bytes. It is written beside its name and renamed, a
tensor at a time, and read back through the page cache. It is swap: not synced, and gone with the run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from asyncrl.errors import ModelChangedError, ResidencyError
from asyncrl.models.layout import ALIGNMENT_BYTES
from asyncrl.residency.device import Device
from asyncrl.schema.control import Residence

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
HELD_TOO = "asyncrl_held_too"
"""Attribute of a divided module: yields the other tensors that lie on its parameters' memory (learner/ranks/fsdp.py)."""
_STAYS = (
    "the folder it was opened from has to stay as it is for the run. Put the old files back and resume the run, or start another "
    "run with the new ones"
)
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
        self._path = None if folder is None else folder / f"{name.replace(' ', '_')}.bin"
        self._blocks: tuple[Block, ...] = ()
        self._host: list[torch.Tensor] = []
        self.look()

    @property
    def num_bytes(self) -> int:
        """Return the bytes it takes on the device when it is there."""
        return sum(block.num_bytes for block in self._blocks)

    @property
    def places(self) -> frozenset[Residence]:
        """Return where it may be.

        `absent` destroys it: only what can be made anew (an engine's weights, a KV cache, a frozen model) has that.
        """
        return frozenset({"device", "host"} if self._path is None else {"device", "host", "disk"})

    def look(self) -> None:
        """See what tensors there are now, and count them; only on the device can there be new ones."""
        if self.residence == "device":
            self._blocks = blocks_of(self._collect(), self._device.kind)
            self._device.hold(block.views[0].tensor for block in self._blocks)

    def move(self, to: Residence) -> None:
        """Bring it there and return once it is; blocking.

        Raises:
            ResidencyError: There is no room, or it cannot go there; it is where it was.
        """
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
                write_spill(self._path, (raw.cpu() for raw in self._contents()))
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
                if self._blocks:  # memory-mapped: pages come from disk as they are read
                    spilled = torch.from_file(os.fspath(self._path), size=self._path.stat().st_size, dtype=torch.uint8)
                    start = 0
                    for block in self._blocks:
                        yield spilled[start : start + block.num_bytes]
                        start += block.num_bytes + -block.num_bytes % ALIGNMENT_BYTES
            case "absent":
                yield from self._made_anew()

    def _prepare_absence(self) -> None:
        """Note what `_made_anew` needs, before the bytes are destroyed; frozen models do."""

    def _made_anew(self) -> Iterable[torch.Tensor]:
        """Return each block's bytes though they are nowhere; frozen models can."""
        return ()

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


def write_spill(path: Path, contents: Iterable[torch.Tensor]) -> None:
    """Write a file whole or not at all.

    Args:
        path: Its name; a file already there is replaced.
        contents: uint8, on the CPU; asked for one at a time.

    Raises:
        ResidencyError: The disk would not take it; nothing is left behind.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for tensor in contents:
                file.write(tensor.numpy().data)
                file.write(bytes(-tensor.nbytes % ALIGNMENT_BYTES))
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ResidencyError(
            f"cannot write to {path}: {error.strerror or error}; make room there, or keep what is offloaded in host memory "
            '(placement.offload_to = "host")'
        ) from error


def weights_of(module: torch.nn.Module) -> NamedTensors:
    """Return a module's parameters and persistent buffers; rotary tables and the like are small, and nothing would bring them."""
    held_too: Callable[[], NamedTensors] = getattr(module, HELD_TOO, tuple)
    return [*module.state_dict(keep_vars=True).items(), *held_too()]


class ModuleComponent(TensorComponent):
    """The weights of a module that is trained.

    Example:
        >>> from asyncrl.residency.device import SimulatedDevice
        >>> layer = torch.nn.Linear(4, 4)
        >>> component = ModuleComponent("policy", layer, SimulatedDevice())
        >>> component.move("host")
        >>> layer.weight.shape, component.residence
        (torch.Size([0]), 'host')
    """

    def __init__(self, name: str, module: torch.nn.Module, device: Device, folder: Path | None = None) -> None:
        """Take over a module on the device; see `TensorComponent`."""
        super().__init__(name, device, lambda: weights_of(module), folder)


class FrozenModelComponent(TensorComponent):
    """A model that never changes and was opened from a folder: it may be destroyed, and is loaded anew when it is needed.

    Its values are hashed before they are destroyed for the first time, and what is read back is held to that: where the files
    bring others, or cannot be read, a move raises `ModelChangedError`.

    Where its tensors are not all in the folder under their own names and shapes, it is moved as any other module is.
    """

    def __init__(
        self, name: str, module: torch.nn.Module, device: Device, model_folder: Path, spill_folder: Path | None = None
    ) -> None:
        """Take over a frozen module; see `TensorComponent`.

        Args:
            name: As `ComponentMove` has it.
            module: On the device, holding what the folder's safetensors files hold (in whatever dtype).
            device: Where it is.
            model_folder: In Hugging Face layout.
            spill_folder: Where it may be written to.
        """
        self._sources: tuple[str, ...] = ()
        self._fingerprints: tuple[int, ...] = ()
        """Of the blocks, once they were given up."""
        super().__init__(name, device, lambda: weights_of(module), spill_folder)
        self._files = _files_by_name(model_folder)
        sources = [self._source_of(block) for block in self._blocks]
        if all(sources) and all(block.views[0].tensor.is_contiguous() for block in self._blocks):
            self._sources = tuple(sources)
            """Under which name the folder has each block; empty where it has not all of them."""

    @property
    def places(self) -> frozenset[Residence]:
        """Return where it may be: `absent` too where the folder has all of it."""
        return super().places | {"absent"} if self._sources else super().places

    def _source_of(self, block: Block) -> str:
        """Return the name under which the folder has a block; empty where it has not."""
        first = block.views[0]
        is_plain = first.offset == 0 and first.size.numel() * first.dtype.itemsize == block.num_bytes
        for name in block.names if is_plain else ():
            if name in self._files:
                with safe_open(str(self._files[name]), framework="pt", device="cpu") as file:
                    if torch.Size(file.get_slice(name).get_shape()) == first.size:
                        return name
        return ""

    def _prepare_absence(self) -> None:
        self._fingerprints = self._fingerprints or tuple(map(_fingerprint, self._contents()))

    def _made_anew(self) -> Iterator[torch.Tensor]:
        for block, name, fingerprint in zip(self._blocks, self._sources, self._fingerprints, strict=True):
            path, dtype = self._files[name], block.views[0].dtype
            try:
                with safe_open(str(path), framework="pt", device="cpu") as file:
                    values: torch.Tensor = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ModelChangedError(f"{self.name} cannot be read back: {path}: {error}; {_STAYS}") from error
            raw = values.to(dtype).contiguous().reshape(-1).view(torch.uint8)
            if raw.nbytes == block.num_bytes:
                yield raw
            # Only now that they are copied: these bytes may be the file's own pages, which change when it is written to.
            if raw.nbytes != block.num_bytes or _fingerprint(raw) != fingerprint:
                raise ModelChangedError(
                    f"{self.name} cannot be read back: {name} in {path} is not what it was when the run opened it; {_STAYS}"
                )


class CallbackComponent:
    """What something else moves when it is told to: an engine's weights or KV cache by its sleep and wake."""

    def __init__(
        self,
        name: str,
        num_bytes: Callable[[], int],
        moves: Mapping[tuple[Residence, Residence], Callable[[], None]],
        residence: Residence = "device",
    ) -> None:
        """Say how it moves.

        Args:
            name: As `ComponentMove` has it.
            num_bytes: What it takes on the device when it is there.
            moves: What to call for (from, to); it returns once it is done, and raises (whatever) where it is as before.
            residence: Where it is now.
        """
        self.name, self.residence = name, residence
        self._num_bytes, self._moves = num_bytes, dict(moves)

    @property
    def num_bytes(self) -> int:
        """Return what it takes on the device."""
        return self._num_bytes()

    @property
    def places(self) -> frozenset[Residence]:
        """Return every end of a move."""
        return frozenset(place for ends in self._moves for place in ends) | {self.residence}

    def look(self) -> None:
        """Do nothing: whoever owns it counts it."""

    def move(self, to: Residence) -> None:
        """See `TensorComponent`."""
        if to == self.residence:
            return
        act = self._moves.get((self.residence, to))
        if act is None:
            known = ", ".join(f"{before} to {after}" for before, after in self._moves)
            raise ResidencyError(f"{self.name} cannot go from {self.residence!r} to {to!r}; it knows {known}")
        try:
            act()
        except Exception as error:  # the boundary: whatever an engine raises
            raise ResidencyError(f"{self.name} did not go from {self.residence!r} to {to!r}: {error}") from error
        self.residence = to


def _fingerprint(raw: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(raw.cpu().numpy().data))


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Return which of a folder's files has which tensor; empty where it has no safetensors."""
    if (folder / INDEX_FILE).is_file():
        index: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        return {name: folder / file for name, file in index.items()}
    if not (folder / SINGLE_FILE).is_file():
        return {}
    with safe_open(str(folder / SINGLE_FILE), framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE_FILE)


Component = TensorComponent | CallbackComponent
"""Something with bytes that a phase may need on the device."""
