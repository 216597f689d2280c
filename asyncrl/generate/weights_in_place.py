"""New weights into a running model, in place: checked before anything is touched, lent bytes verified on the way in.

Tied parameters (one storage, several names) may come under any of their names, or under several that agree. Where only adapters
are trained, new weights are the adapters, and the rest stays as it was opened.
Called by generate/slot_model.py between two forwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from asyncrl.errors import GenerationError
from asyncrl.models.copying import copy_tensor, copy_tensors
from asyncrl.models.mapped import MappedTensors

_SHOWN = 5


class WeightsInPlace:
    """What of one model is replaced, by name: its parameters, or the trainable ones alone; of its buffers, those that come."""

    def __init__(self, model: torch.nn.Module, *, trainable_only: bool = False) -> None:
        # The model's own tensors, not views of them: sleeping gives their memory back and takes other memory later.
        own = model.state_dict(keep_vars=True)
        self._tensors = {name: tensor for name, tensor in own.items() if tensor.requires_grad or not trainable_only}
        self._tied = _by_storage(self._tensors)
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
            BroadcastError: The bytes are damaged or were overwritten; the model may hold anything.
        """
        if isinstance(tensors, MappedTensors):
            self.refuse_misfit({entry.name: entry.shape for entry in tensors.manifest.entries})
            self._refuse_disagreement(tensors)
            tensors.copy_into(self._tensors)
            return
        self.refuse_misfit({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        self._refuse_disagreement(tensors)
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
        """Check names and shapes of new weights.

        Raises:
            GenerationError: A name is unknown or missing, or a shape differs.
        """
        unknown = [name for name in shapes if name not in self._tensors]
        if unknown:
            raise GenerationError(
                f"new weights have {len(unknown)} tensors this model does not have: {_some(unknown)}; "
                f"it has {len(self._tensors)}, among them {_some(list(self._tensors))}"
            )
        missing = [names[0] for names in self._tied if not any(name in shapes or name in self._buffers for name in names)]
        if missing:
            raise GenerationError(
                f"new weights lack {len(missing)} of the model's {len(self._tied)} tensors: {_some(missing)}; send all of them"
            )
        for name, shape in shapes.items():
            if shape != tuple(self._tensors[name].shape):
                raise GenerationError(f"new weights: {name} has shape {shape}, the model's is {tuple(self._tensors[name].shape)}")

    def _refuse_disagreement(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for names in self._tied:
            given = [name for name in names if name in tensors]
            for first, other in pairwise(given):
                if not torch.equal(tensors[first], tensors[other]):
                    raise GenerationError(f"new weights: {first} and {other} are one tensor in this model but differ")


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    """Return the names, those of one storage together."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault((tensor.data_ptr(), tensor.numel()), []).append(name)
    return tuple(tuple(names) for names in found.values())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
