"""Everything that one optimizer step reads and changes, together.

Called by learner/start.py (which makes it), learner/step.py, learner/worker.py, learner/follower.py and learner/checkpoint.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
from transformers import PreTrainedModel

from asyncrl.learner.critic import Critic
from asyncrl.learner.optim import PolicyOptimizer
from asyncrl.learner.ranks import OneRank, Ranks
from asyncrl.learner.rows import Row
from asyncrl.schema.control import Phase


class Reference(Protocol):
    """The frozen policy on the learner's devices."""

    def logprobs(self, row: Row, temperature: float) -> torch.Tensor:
        """Return float32 [M], log-probability of each target of the row, without gradient."""
        ...


class Memory(Protocol):
    """The device's memory, where components of the trainee leave it and come back (learner/residents.py)."""

    def bring(self, phase: Phase) -> None:
        """Have on the device what a phase of a step needs: `inference` the reference, `train` what is trained.

        Raises:
            ResidencyError: It does not fit.
        """
        ...

    def make_room(self) -> str:
        """Take off the device what no forward or backward pass of training needs; return what left, in words."""
        ...

    def watch(self) -> AbstractContextManager[None]:
        """Return a context in which a simulated device counts activations."""
        ...

    def describe(self) -> str:
        """Return what is on the device, in words."""
        ...


class StepMemory(msgspec.Struct):
    """What a step remembers of those before it; saved in checkpoints, so that a replayed step is the same step."""

    kl_coefficient: float = -1.0
    """The adaptive coefficient in force; negative: the config's own, not adapted yet."""
    recipe: str = ""
    """What `kind = "auto"` picked last; empty: nothing yet."""
    measured: dict[str, float] = {}
    """What it picks the next from."""


@dataclass(slots=True)
class Trainee:
    """A policy in training."""

    model: PreTrainedModel
    optimizer: PolicyOptimizer
    reference: Reference | None = None
    critic: Critic | None = None
    """Value head or separate model."""
    critic_optimizer: PolicyOptimizer | None = None
    """None where there is no critic."""
    ranks: Ranks = field(default_factory=OneRank)
    memory: StepMemory = field(default_factory=StepMemory)
    residents: Memory | None = None
    """None: everything stays on the device."""

    def bring(self, phase: Phase) -> None:
        """See `Memory.bring`; without residents everything is there."""
        if self.residents is not None:
            self.residents.bring(phase)
