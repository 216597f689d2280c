"""Updates a model's weights in place, and frees and reallocates them for sleep.

New weights are checked before any change. Tied parameters (one storage, several names) may come under any of their names, or
under several names with equal values. If only adapters are trained, new weights are the adapters, and the rest is unchanged.

Sleep frees the weights that new weights replace. The rest (the base under adapters, buffers) keeps its values: from a device it
moves to pinned host memory, on a CPU it stays. Buffers outside the state dict (rotary tables) never move: they are small, and no
new weights contain them.

Invariants: every name keeps its tensor object, which has no elements while its memory is freed; tied names stay tied. Used from
one thread, between forwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import check_weights
from asyncrl.models.layout import copy_tensor, copy_tensors
from asyncrl.weights.tensors import ArrivingTensors


@dataclass(slots=True)
class _Storage:
    """The tensor objects that share one storage."""

    names: list[str]
    objects: list[torch.Tensor]
    shape: torch.Size
    host: torch.Tensor | None = None
    """The values during sleep."""


class WeightsInPlace:
    """One model's parameters and persistent buffers; updates replace all of them, or only the trainable ones."""

    def __init__(self, model: torch.nn.Module, *, trainable_only: bool = False) -> None:
        # The model's own tensors, not views: sleep frees their memory and allocates other memory later.
        own = model.state_dict(keep_vars=True)
        self._tensors = {name: tensor for name, tensor in own.items() if tensor.requires_grad or not trainable_only}
        self._buffers = frozenset(name for name, tensor in own.items() if not isinstance(tensor, torch.nn.Parameter))
        found: dict[tuple[int, int], _Storage] = {}
        for name, tensor in own.items():
            storage = found.setdefault((tensor.data_ptr(), tensor.numel()), _Storage([], [], tensor.shape))
            storage.names.append(name)
            storage.objects.append(tensor)
        self._storages = tuple(found.values())
        tied = ([name for name in storage.names if name in self._tensors] for storage in self._storages)
        self._tied = [names for names in tied if names]
        """The accepted names of new weights, grouped by tensor."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the model's device now, tied tensors once."""
        return sum(storage.objects[0].nbytes for storage in self._storages)

    def load(self, tensors: Mapping[str, torch.Tensor] | ArrivingTensors) -> None:
        """Copy every tensor in, cast to the model's dtype; tensors that arrived before a BroadcastError stay.

        Args:
            tensors: All replaced tensors by the model's parameter names; one of several tied names is enough.

        Raises:
            GenerationError: A name is unknown or missing, a shape differs, or tied names disagree; nothing was changed.
        """
        if isinstance(tensors, ArrivingTensors):
            self._refuse_misfit({entry.name: entry.shape for entry in tensors.manifest.entries})
            for name, tensor in tensors:
                copy_tensor(tensor, self._tensors[name])
            return
        self._refuse_misfit({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for names in self._tied:
            for first, other in pairwise(name for name in names if name in tensors):
                if not torch.equal(tensors[first], tensors[other]):
                    raise GenerationError(f"new weights: {first} and {other} are one tensor in this model but differ")
        given = [name for names in self._tied for name in [name for name in names if name in tensors][:1]]
        copy_tensors((tensors[name], self._tensors[name]) for name in given)

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the parameters views of these tensors: nothing is copied, and later writes to the tensors change the model.

        Args:
            tensors: As `load`, of the model's own dtypes and device.

        Raises:
            GenerationError: As `load`, or a dtype or device differs; nothing was changed.
        """
        self._refuse_misfit({name: tuple(tensor.shape) for name, tensor in tensors.items()})
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

    def leave(self) -> None:
        """Free the memory."""
        for storage in self._storages:
            own = storage.objects[0]
            if not any(name in self._tensors and name not in self._buffers for name in storage.names):
                if own.device.type == "cpu":
                    continue
                storage.host = torch.empty(own.shape, dtype=own.dtype, pin_memory=True).copy_(own.detach())
            gone = torch.empty(0, dtype=own.dtype, device=own.device)
            for one in storage.objects:
                one.data = gone

    def come_back(self) -> None:
        """Allocate the memory again; freed weights have no values until a load. Raises RuntimeError without enough memory."""
        for storage in self._storages:
            own = storage.objects[0]
            if own.numel() == storage.shape.numel():
                continue
            values = torch.empty(storage.shape, dtype=own.dtype, device=own.device)
            if storage.host is not None:
                values.copy_(storage.host)
            for one in storage.objects:
                one.data = values
            storage.host = None

    def _refuse_misfit(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        needed = [names for names in self._tied if self._buffers.isdisjoint(names)]
        check_weights(shapes, {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}, needed)
