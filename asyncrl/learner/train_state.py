"""Everything that one optimizer step reads and changes, together."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from transformers import PreTrainedModel

from asyncrl.learner.model.critic import Critic
from asyncrl.learner.model.policy import Reference
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.ranks.group import Ranks
from asyncrl.schema.control import Phase


class StepMemory(msgspec.Struct):
    """What a step remembers of those before it; saved in checkpoints, so that a replayed step is the same step."""

    kl_coefficient: float = -1.0
    """The adaptive coefficient in force; negative: the config's own, not adapted yet."""
    recipe: str = ""
    """What `kind = "auto"` picked last; empty: nothing yet."""
    measured: dict[str, float] = {}
    """What it picks the next from."""


class DeviceMemory(Protocol):
    """Components that leave the device and come back (learner/offload.py)."""

    def bring(self, phase: Phase) -> None:
        """Have on the device what a phase of a step needs: `inference` the reference, `train` what is trained.

        Raises:
            ResidencyError: It does not fit.
        """
        ...

    def watch(self) -> AbstractContextManager[None]:
        """Return a context in which a simulated device counts activations."""
        ...

    def describe(self) -> str:
        """Return what is on the device, in words."""
        ...


@dataclass(slots=True)
class TrainState:
    """A policy in training, and what is trained with it."""

    model: PreTrainedModel
    optimizer: PolicyOptimizer
    reference: Reference | None = None
    critic: Critic | None = None
    """Value head or separate model."""
    critic_optimizer: PolicyOptimizer | None = None
    """None where there is no critic."""
    ranks: Ranks = field(default_factory=Ranks)
    memory: StepMemory = field(default_factory=StepMemory)
    offload: DeviceMemory | None = None
    """None: everything stays on the device."""

    def bring(self, phase: Phase) -> None:
        """See `DeviceMemory.bring`; without offload everything is there."""
        if self.offload is not None:
            self.offload.bring(phase)
