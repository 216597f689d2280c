"""The kinds of components: a module's weights, an optimizer's state, a frozen model, and what something else moves.

Invariants: those of residency/component.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from asyncrl.errors import ModelChangedError, ResidencyError
from asyncrl.residency.component import Block, NamedTensors, TensorComponent
from asyncrl.residency.device import Device
from asyncrl.schema.control import Residence

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
HELD_TOO = "asyncrl_held_too"
"""Attribute of a divided module: yields the other tensors that lie on its parameters' memory (learner/ranks/fsdp.py)."""
_STAYS = (
    "the folder it was opened from has to stay as it is for the run. Put the old files back and resume the run, or start another "
    "run with the new ones"
)


def weights_of(module: torch.nn.Module) -> NamedTensors:
    """Return a module's parameters and persistent buffers; rotary tables and the like are small, and nothing would bring them."""
    held_too: Callable[[], NamedTensors] = getattr(module, HELD_TOO, tuple)
    return [*module.state_dict(keep_vars=True).items(), *held_too()]


class HasState(Protocol):
    """An optimizer."""

    def state_tensors(self) -> NamedTensors:
        """Yield what it keeps between steps, the very objects."""
        ...


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


class OptimizerComponent(TensorComponent):
    """Moments, update counts and float32 masters, as far as they are on the device."""

    def __init__(self, name: str, optimizer: HasState, device: Device, folder: Path | None = None) -> None:
        """Take over an optimizer's state; see `TensorComponent`."""
        super().__init__(name, device, optimizer.state_tensors, folder)


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
        self._can_be_made_anew = False
        super().__init__(name, device, lambda: weights_of(module), spill_folder)
        self._files = _files_by_name(model_folder)
        self._sources = tuple(self._source_of(block) for block in self._blocks)
        """Under which name the folder has each block."""
        self._can_be_made_anew = all(self._sources) and all(block.views[0].tensor.is_contiguous() for block in self._blocks)
        self._fingerprints: tuple[int, ...] = ()
        """Of the blocks, once they were given up."""

    @property
    def places(self) -> frozenset[Residence]:
        """Return where it may be: `absent` too where the folder has all of it."""
        return super().places | {"absent"} if self._can_be_made_anew else super().places

    def _source_of(self, block: Block) -> str:
        """Return the name under which the folder has a block; empty where it has not."""
        first = block.views[0]
        is_plain = first.offset == 0 and first.size.numel() * first.dtype.itemsize == block.num_bytes
        for name in block.names if is_plain else ():
            if name in self._files and _shape_in(self._files[name], name) == first.size:
                return name
        return ""

    def _prepare_absence(self) -> None:
        self._fingerprints = self._fingerprints or tuple(map(_fingerprint, self._contents()))

    def _made_anew(self) -> Iterator[torch.Tensor]:
        for block, name, fingerprint in zip(self._blocks, self._sources, self._fingerprints, strict=True):
            path, dtype = self._files[name], block.views[0].dtype
            raw = self._read(path, name).to(dtype).contiguous().reshape(-1).view(torch.uint8)
            if raw.nbytes == block.num_bytes:
                yield raw
            # Only now that they are copied: these bytes may be the file's own pages, which change when it is written to.
            if raw.nbytes != block.num_bytes or _fingerprint(raw) != fingerprint:
                raise ModelChangedError(
                    f"{self.name} cannot be read back: {name} in {path} is not what it was when the run opened it; {_STAYS}"
                )

    def _read(self, path: Path, name: str) -> torch.Tensor:
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                values: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelChangedError(f"{self.name} cannot be read back: {path}: {error}; {_STAYS}") from error
        return values


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
        """See `Component`."""
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


def _shape_in(path: Path, name: str) -> torch.Size:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        return torch.Size(file.get_slice(name).get_shape())
