"""Models and tensors that may be divided over ranks: by whom, whole again to be saved, divided again when loaded.

Invariants: a tensor that is not divided is only detached or moved, so one rank needs no other code; gathering and dividing
change no bit, and what is saved does not know how many ranks there were. Called by learner/start.py, learner/checkpoint.py,
learner/optim.py, learner/critic.py and learner/follower.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

M = TypeVar("M", bound=torch.nn.Module)


class Divider(Protocol):
    """Divides models over ranks, in place, or leaves them whole."""

    def policy(self, model: PreTrainedModel) -> PreTrainedModel:
        """Divide a policy or reference; return it."""
        ...

    def critic(self, critic: M) -> M:
        """Divide a critic; return it."""
        ...


class LeaveWhole:
    """The divider of a single rank."""

    def policy(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the model."""
        return model

    def critic(self, critic: M) -> M:
        """Return the critic."""
        return critic


def divider_of(device: str, num_ranks: int) -> Divider:
    """Return what divides models over the ranks of the default process group.

    Args:
        device: `learner.device`.
        num_ranks: 1: there is no group, and nothing is divided.
    """
    if num_ranks == 1:
        return LeaveWhole()
    # accelerate takes seconds to import, and one rank does without it.
    divider: Divider = import_module("asyncrl.learner.sharded").FSDPDivider(device, num_ranks)
    return divider


def whole_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor whole and on the CPU, gathered one at a time; every rank must go through all of them.

    Args:
        named: A model's parameters or an optimizer's state, the same names in the same order on every rank.
    """
    for name, tensor in named:
        yield name, whole(tensor).cpu()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole, detached, on its device: itself where it is not divided."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def divided_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, the same and whole on every rank, on the device of `other` and divided as `other` is."""
    moved = tensor.to(other.device)
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return moved
    return distribute_tensor(moved, other.device_mesh, other.placements, src_data_rank=None)


def is_divided(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether any of these is divided over ranks."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)
