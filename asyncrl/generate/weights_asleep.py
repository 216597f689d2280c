"""A model's weights out of the way and back: what `Engine.sleep` does to them.

Level 1 keeps the values: on a device they go to pinned host memory, on a CPU they stay where they are. Level 2 gives up what new
weights replace anyway; the rest (the base under adapters) is treated as in level 1. Buffers that are not part of the state dict
(rotary tables) never move: they are small and nothing brings them again.

Invariants: every name keeps its tensor object, of no elements while its memory is given back; tied names stay tied. Used from one
thread, between forwards. Called by generate/slot_model.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import SleepLevel


@dataclass(slots=True)
class _Shared:
    """The tensor objects of one storage."""

    objects: tuple[torch.Tensor, ...]
    shape: torch.Size
    is_replaced: bool
    """New weights bring it."""
    host: torch.Tensor | None = None

    @property
    def is_gone(self) -> bool:
        return self.objects[0].numel() < self.shape.numel()

    def put(self, values: torch.Tensor) -> None:
        for one in self.objects:
            one.data = values


class WeightsAsleep:
    """Moves one model's parameters and persistent buffers away and back."""

    def __init__(self, model: torch.nn.Module, replaced: Collection[str]) -> None:
        """Look at the model's tensors.

        Args:
            model: Awake.
            replaced: Names that every set of new weights brings, or one of each tied few.
        """
        self._shared = tuple(
            _Shared(tuple(objects), objects[0].shape, is_replaced=any(name in replaced for name in names))
            for names, objects in _by_storage(model)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes held on the model's device now, tied tensors once."""
        return sum(shared.objects[0].nbytes for shared in self._shared)

    def leave(self, level: SleepLevel) -> None:
        """Give memory back; a second call may go deeper."""
        for shared in self._shared:
            if level == 2 and shared.is_replaced:
                shared.host = None
                shared.put(_nothing_like(shared.objects[0]))
            elif shared.objects[0].device.type != "cpu" and not shared.is_gone:
                shared.host = _pinned_copy(shared.objects[0])
                shared.put(_nothing_like(shared.objects[0]))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Take the memory again; what level 2 gave up holds no values until weights are loaded.

        Raises:
            GenerationError: There is not enough; what has come back stays.
        """
        for shared in self._shared:
            if not shared.is_gone:
                continue
            try:
                values = torch.empty(shared.shape, dtype=shared.objects[0].dtype, device=shared.objects[0].device)
            except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain one on a CPU
                raise GenerationError(f"cannot wake: no room for the weights on {shared.objects[0].device}: {error}") from error
            if shared.host is not None:
                values.copy_(shared.host)
            shared.put(values)
            shared.host = None


def _by_storage(model: torch.nn.Module) -> list[tuple[list[str], list[torch.Tensor]]]:
    """Return names and distinct tensor objects of the state dict, those of one storage together."""
    found: dict[tuple[int, int], tuple[list[str], list[torch.Tensor]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names, objects = found.setdefault((tensor.data_ptr(), tensor.numel()), ([], []))
        names.append(name)
        if all(tensor is not known for known in objects):
            objects.append(tensor)
    return list(found.values())


def _nothing_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach())
