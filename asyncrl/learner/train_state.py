"""The state that one optimizer step reads and changes, and which parts of it are on the device.

These parts change if learner and generators share a device, or if a device is too small for all of them at once:

    phase       on the device                                          leaves
    rollout     nothing (hybrid: the policy, which engines read too)   everything else: generation needs the memory
    inference   the reference, while a step reads it                   what does not fit beside it, the optimizer first
    train       policy, critic, their optimizers                       all else, where the device's memory is known

Each rank moves its own shards, and a phase is reached when all ranks have reached it. The controller orders `rollout` and `train`
(SetPhase); its `inference`, in which inference workers use the device, is `rollout` here. The learner's own `inference` is part
of a step, and exists only if the reference is on the learner. A checkpoint in `rollout` is read from host memory or disk and
needs no device memory. Used on the learner's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from asyncrl.clock import Clock
from asyncrl.config.run import LocalLaunch, RunConfig
from asyncrl.errors import ResidencyError
from asyncrl.learner.checkpoint_folder import StepMemory
from asyncrl.learner.model.policy import Critic, Reference
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.ranks.group import Ranks, part_here, rank_device
from asyncrl.models.memory import BYTES, forward_row, shape_of_json
from asyncrl.residency.components import ResidencyManager, TensorComponent
from asyncrl.residency.device import Device, SimulatedDevice, device_at
from asyncrl.residency.plan import GIB, SWAP_FOLDER, PhaseNeeds, gib
from asyncrl.schema.control import Phase, PhaseReached

POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
POLICY_OPTIMIZER, CRITIC_OPTIMIZER = "policy optimizer", "critic optimizer"
PROCESS = "learner"
_SUM_BYTES = 4
"""Bytes of gradient per parameter."""


@dataclass(slots=True)
class TrainState:
    """A policy in training, with its optimizer, reference and critic."""

    model: PreTrainedModel
    optimizer: PolicyOptimizer
    reference: Reference | None = None
    critic: Critic | None = None
    critic_optimizer: PolicyOptimizer | None = None
    ranks: Ranks = field(default_factory=Ranks)
    memory: StepMemory = field(default_factory=StepMemory)
    offload: Offload | None = None
    """None: everything stays on the device."""

    def follow(self, config: RunConfig) -> None:
        """Use this config from the next step on."""
        self.optimizer.follow(config.learner, config.num_steps)
        if self.critic_optimizer is not None and config.algorithm.critic is not None:
            rate = config.algorithm.critic.learning_rate
            self.critic_optimizer.follow(replace(config.learner, learning_rate=rate), config.num_steps)

    def bring(self, phase: Phase) -> None:
        """Bring to the device what a phase of a step needs: for `inference` the reference, for `train` the trained components.

        Raises:
            ResidencyError: The components do not fit.
        """
        has_own = phase == "train" or (self.reference is not None and self.reference.is_own_model)
        if self.offload is not None and has_own:
            self.offload.manager.switch(phase)


class Offload:
    """Moves the learner's components between device, host memory and disk.

    Example:
        offload = open_offload(state, config, run_folder, clock)
        reached = offload.reach("rollout", 1)
    """

    def __init__(self, manager: ResidencyManager, device: Device, state: TrainState) -> None:
        """Take over a state that is on the device."""
        self.manager, self.device, self._state = manager, device, state

    def reach(self, phase: Phase, number: int) -> PhaseReached:
        """Reach a phase that the controller orders.

        Returns:
            This rank's answer, after every rank has reached the phase.

        Raises:
            ResidencyError: The phase was not reached, on this rank or another.
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
        """Count activations on a simulated device with a budget; a GPU counts its memory itself.

        With several ranks activations are not counted, because FSDP repeatedly frees and refills the storage of gathered weights.
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


def needs_offload(config: RunConfig) -> bool:
    """Return whether processes use the learner's device in turn, or it has a budget."""
    return config.placement.takes_turns or config.placement.device_memory_gib > 0


def open_offload(state: TrainState, config: RunConfig, run_folder: Path, clock: Clock) -> Offload:
    """Let a manager move a state's components.

    Whether every phase fits was checked before the start (control/placement/memory.py).

    Args:
        state: On the device.
        config: `placement`, `learner` and `algorithm` are read.
        run_folder: `memory/learner.jsonl` is written there, and `swap/` if components go to disk; ranks other than 0 write
            `memory/learner-RANK.jsonl` and `swap/learner-RANK/`.
        clock: Times moves.
    """
    rank = state.ranks.rank
    process = f"{PROCESS}-{rank}" if rank else PROCESS
    device = open_device(config, rank)
    swap = run_folder / SWAP_FOLDER / (process if rank else "")
    components = [TensorComponent.of_module(POLICY, state.model, device, swap)]
    modules: list[torch.nn.Module] = [state.model]
    # An optimizer that is always in host memory is not a component.
    if not config.learner.offload_optimizer:
        components.append(TensorComponent(POLICY_OPTIMIZER, device, state.optimizer.state_tensors, swap))
    if state.critic is not None and state.critic_optimizer is not None:
        modules.append(state.critic)
        components.append(TensorComponent.of_module(CRITIC, state.critic, device, swap))
        if not config.learner.offload_optimizer:
            components.append(TensorComponent(CRITIC_OPTIMIZER, device, state.critic_optimizer.state_tensors, swap))
    forward = 0
    if state.reference is not None and state.reference.is_own_model:
        components.append(TensorComponent.of_module(REFERENCE, state.reference.model, device, swap, is_frozen=True))
        if device.budget_bytes is not None:
            shape, learner = shape_of_json(state.reference.model.config.to_dict(), "the reference"), config.learner
            forward = int(forward_row(shape, config.packing.tokens_per_row, BYTES[learner.dtype], learner.logprob_chunk_tokens))
    trained = (POLICY, CRITIC, POLICY_OPTIMIZER, CRITIC_OPTIMIZER)
    stays = (POLICY,) if config.placement.kind == "hybrid" else ()
    gradients = 0
    for parameter in (one for module in modules for one in module.parameters() if one.requires_grad):
        gradients += _SUM_BYTES * part_here(parameter).numel()
    phases = [
        PhaseNeeds("rollout", now=stays, soon=trained, gives_back=config.placement.takes_turns),
        PhaseNeeds("inference", now=(*stays, REFERENCE), soon=trained, working_bytes=forward),
        # A backward uses all remaining memory of the budget, and the optimizer makes its moments in the first step.
        PhaseNeeds("train", now=trained, working_bytes=gradients, gives_back=device.budget_bytes is not None),
    ]
    manager = ResidencyManager(config.placement, run_folder, process, components, phases, device, clock)
    state.offload = Offload(manager, device, state)
    return state.offload


def open_device(config: RunConfig, rank: int = 0) -> Device:
    """Return a rank's device with its part of the budget: all of it, unless generation uses the device at the same time."""
    placement = config.placement
    is_shared = placement.kind == "async_hybrid" and isinstance(config.launch, LocalLaunch)
    share = 1 - placement.generation_share if is_shared else 1.0
    budget = int(placement.device_memory_gib * GIB * share) or None
    return device_at(rank_device(config, rank), budget)
