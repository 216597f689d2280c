"""A model's weights in place: new ones copied in, and all of them given back and taken again for sleep.

New weights are checked before anything is touched. Tied parameters (one storage, several names) may come under any of their
names, or under several that agree. Where only adapters are trained, new weights are the adapters, and the rest stays as it was
opened.

Sleep level 1 keeps the values: on a device they go to pinned host memory, on a CPU they stay where they are. Level 2 gives up
what new weights replace anyway; the rest (the base under adapters) is treated as in level 1. Buffers that are not part of the
state dict (rotary tables) never move: they are small and nothing brings them again.

Invariants: every name keeps its tensor object, of no elements while its memory is given back; tied names stay tied. Used from one
thread, between forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import SleepLevel, check_weights
from asyncrl.models.layout import copy_tensor, copy_tensors


class WeightsInPlace:
    """What of one model is replaced, by name: its parameters, or the trainable ones alone; of its buffers, those that come."""

    def __init__(self, model: torch.nn.Module, *, trainable_only: bool = False) -> None:
        # The model's own tensors, not views of them: sleeping gives their memory back and takes other memory later.
        own = model.state_dict(keep_vars=True)
        self._tensors = {name: tensor for name, tensor in own.items() if tensor.requires_grad or not trainable_only}
        self._tied = [names for names, _ in _by_storage(self._tensors)]
        self._buffers = frozenset(name for name, tensor in own.items() if not isinstance(tensor, torch.nn.Parameter))

    @property
    def names(self) -> frozenset[str]:
        """Return the names that all new weights bring, or one of each tied few."""
        return frozenset(self._tensors) - self._buffers

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy every tensor in, cast to the model's dtype.

        Args:
            tensors: Name to tensor, named as the model's parameters: all that is replaced. Of tied names one is enough.

        Raises:
            GenerationError: A name is unknown or missing, a shape differs, or tied names disagree; nothing was changed.
        """
        self.refuse_misfit({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for names in self._tied:
            for first, other in pairwise(name for name in names if name in tensors):
                if not torch.equal(tensors[first], tensors[other]):
                    raise GenerationError(f"new weights: {first} and {other} are one tensor in this model but differ")
        given = [name for names in self._tied for name in [name for name in names if name in tensors][:1]]
        copy_tensors((tensors[name], self._tensors[name]) for name in given)

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become views of these tensors: no byte is copied, and whatever is written to them later is the model's.

        Args:
            tensors: As `load`, of the model's own dtypes and device.

        Raises:
            GenerationError: As `load`, or a dtype or device differs; nothing was changed.
        """
        self.refuse_misfit({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            own = self._tensors[name]
            if (tensor.dtype, tensor.device) != (own.dtype, own.device):
                raise GenerationError(
                    f"shared weights: {name} is {tensor.dtype} on {tensor.device} with the learner, {own.dtype} on {own.device} "
                    "with the engine; both read the same bytes: set generate.engine.dtype and device to the learner's"
                )
        for names in self._tied:
            for given in [name for name in names if name in tensors][:1]:
                for name in names:
                    self._tensors[name].data = tensors[given]

    def load_arriving(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy in what comes, one by one; what came before an error stays. Names and shapes as `refuse_misfit` let pass."""
        for name, tensor in tensors:
            copy_tensor(tensor, self._tensors[name])

    def refuse_misfit(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check names and shapes of new weights; see `check_weights`."""
        needed = [names for names in self._tied if self._buffers.isdisjoint(names)]
        check_weights(shapes, {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}, needed)


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
            for names, objects in _by_storage(model.state_dict(keep_vars=True))
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
                own = shared.objects[0]
                shared.host = torch.empty(own.shape, dtype=own.dtype, pin_memory=True).copy_(own.detach())
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


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> list[tuple[list[str], list[torch.Tensor]]]:
    """Return names and distinct tensor objects, those of one storage together."""
    found: dict[tuple[int, int], tuple[list[str], list[torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        names, objects = found.setdefault((tensor.data_ptr(), tensor.numel()), ([], []))
        names.append(name)
        if all(tensor is not known for known in objects):
            objects.append(tensor)
    return list(found.values())


def _nothing_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
