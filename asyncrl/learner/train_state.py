"""Everything that one optimizer step reads and changes, together; and what of it is on the device, where that changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from asyncrl.config.run import RunConfig
from asyncrl.errors import ResidencyError
from asyncrl.learner.checkpoint_folder import StepMemory
from asyncrl.learner.model.critic import Critic
from asyncrl.learner.model.policy import Reference
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.ranks.group import Ranks
from asyncrl.residency.device import Device, SimulatedDevice
from asyncrl.residency.manager import ResidencyManager
from asyncrl.residency.plan import gib
from asyncrl.schema.control import Phase, PhaseReached


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
    offload: Offload | None = None
    """None: everything stays on the device."""

    def follow(self, config: RunConfig) -> None:
        """Train by this config from the next step on."""
        self.optimizer.follow(config.learner, config.num_steps)
        if self.critic_optimizer is not None and config.algorithm.critic is not None:
            rate = config.algorithm.critic.learning_rate
            self.critic_optimizer.follow(replace(config.learner, learning_rate=rate), config.num_steps)

    def bring(self, phase: Phase) -> None:
        """Have on the device what a phase of a step needs: `inference` the reference, `train` what is trained.

        Raises:
            ResidencyError: It does not fit.
        """
        has_own = phase == "train" or (self.reference is not None and self.reference.is_own_model)
        if self.offload is not None and has_own:
            self.offload.manager.switch(phase)


class Offload:
    """What the learner moves, and when.

    Example:
        offload = open_offload(state, config, run_folder, clock)
        reached = offload.reach("rollout", 1)
    """

    def __init__(self, manager: ResidencyManager, device: Device, state: TrainState) -> None:
        """Take over a state that is on the device."""
        self.manager, self.device, self._state = manager, device, state

    def reach(self, phase: Phase, number: int) -> PhaseReached:
        """Do what the controller asks.

        Returns:
            This rank's answer, once every rank has reached the phase.

        Raises:
            ResidencyError: It cannot be done, here or on another rank.
        """
        try:
            reached = self.manager.switch("train" if phase == "train" else "rollout", number)
        except Exception:  # the boundary: the other ranks wait for this one's answer
            self._num_failed(1.0)
            raise
        if failed := self._num_failed(0.0):
            raise ResidencyError(f"phase {phase!r} was not reached by {failed} of the learner's other ranks; their logs say why")
        return replace(reached, phase=phase)

    def _num_failed(self, own: float) -> int:
        """Wait for all ranks, and return how many of them failed."""
        return int(self._state.ranks.sum(torch.tensor(own)).item())

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count activations on a simulated device; a GPU counts by itself, and without a budget there is nothing to run out of.

        With several ranks activations are not counted: FSDP empties and fills the storages of gathered weights again and again.
        """
        device, is_alone = self.device, self._state.ranks.size == 1
        if not isinstance(device, SimulatedDevice) or device.budget_bytes is None or not is_alone:
            yield
            return
        with device.counting_activations():
            yield
        device.hold(one.grad for one in self._state.model.parameters() if one.grad is not None)

    def describe(self) -> str:
        """Return what is on the device, in words."""
        held = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in self.manager.resident.items())
        return f"{held or 'no component'}, {gib(self.device.allocated_bytes)} in all of {gib(self.device.budget_bytes or 0)}"
