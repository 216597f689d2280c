"""The learner's components on a device that it shares, or that is too small for all of them at once.

    phase       on the device                                          leaves
    rollout     nothing (hybrid: the policy, which engines read too)   everything else: generation wants the room
    inference   the reference, while a step reads it                   what does not fit beside it, the optimizer first
    train       policy, critic, their optimizers                       what does not fit beside them

Each rank moves its own shards, and a phase is reached when all ranks have reached it. `rollout` and `train` are the controller's
(SetPhase); its `inference`, in which inference workers have the device, is `rollout` here. The learner's own `inference` is
within a step, and only where the reference is here. A checkpoint in `rollout` is read from host memory or disk, without a byte
on the device.

A step reads it as `TrainState.offload`. Used on the learner's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor

from asyncrl.clock import Clock
from asyncrl.config.run import LocalLaunch, RunConfig
from asyncrl.errors import ResidencyError
from asyncrl.learner.ranks.launch import rank_device
from asyncrl.learner.train_state import TrainState
from asyncrl.observe.memory import MemoryLine, open_memory
from asyncrl.observe.steps import JsonLines
from asyncrl.residency.components import Component, FrozenModelComponent, ModuleComponent, TensorComponent
from asyncrl.residency.device import Device, SimulatedDevice, device_at
from asyncrl.residency.manager import ResidencyManager
from asyncrl.residency.plan import GIB, SWAP_FOLDER, PhaseNeeds, gib
from asyncrl.schema.control import Phase, PhaseReached

POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
POLICY_OPTIMIZER, CRITIC_OPTIMIZER = "policy optimizer", "critic optimizer"
PROCESS = "learner"
_SUM_BYTES = 4
"""Of gradients, a parameter."""


class Offload:
    """What the learner moves, and when.

    Example:
        offload = open_offload(state, config, run_folder, model_folder, clock)
        reached = offload.reach("rollout", 1)
    """

    def __init__(self, manager: ResidencyManager, device: Device, state: TrainState, timeline: JsonLines[MemoryLine]) -> None:
        """Take over a state that is on the device."""
        self._manager, self._device, self._state, self._timeline = manager, device, state, timeline

    @property
    def allocated_bytes(self) -> int:
        """What this rank has on its device."""
        return self._device.allocated_bytes

    def close(self) -> None:
        """Close the timeline's file."""
        self._timeline.close()

    def reach(self, phase: Phase, number: int) -> PhaseReached:
        """Do what the controller asks.

        Returns:
            This rank's answer, once every rank has reached the phase.

        Raises:
            ResidencyError: It cannot be done, here or on another rank.
        """
        try:
            reached = self._manager.switch("train" if phase == "train" else "rollout", number)
        except Exception:  # the boundary: the other ranks wait for this one's answer
            self._num_failed(1.0)
            raise
        if failed := self._num_failed(0.0):
            raise ResidencyError(f"phase {phase!r} was not reached by {failed} of the learner's other ranks; their logs say why")
        return replace(reached, phase=phase)

    def _num_failed(self, own: float) -> int:
        """Wait for all ranks, and return how many of them failed."""
        return int(self._state.ranks.sum(torch.tensor(own)).item())

    def prefetch(self) -> None:
        """Bring what training needs nearer while generation has the device."""
        self._manager.prefetch("train")

    def readable(self) -> AbstractContextManager[None]:
        """Return a context in which everything can be saved, wherever it is."""
        return self._manager.readable()

    def bring(self, phase: Phase) -> None:
        """See `DeviceMemory`."""
        if phase == "train" or (self._state.reference is not None and self._state.reference.is_own_model):
            self._manager.switch(phase)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """See `DeviceMemory`; a GPU counts by itself, and without a budget there is nothing to run out of.

        With several ranks activations are not counted: FSDP empties and fills the storages of gathered weights again and again.
        """
        device, is_alone = self._device, self._state.ranks.size == 1
        if not isinstance(device, SimulatedDevice) or device.budget_bytes is None or not is_alone:
            yield
            return
        with device.counting_activations():
            yield
        device.hold(one.grad for one in self._state.model.parameters() if one.grad is not None)

    def describe(self) -> str:
        """See `DeviceMemory`."""
        held = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in self._manager.resident.items())
        return f"{held or 'no component'}, {gib(self._device.allocated_bytes)} in all of {gib(self._device.budget_bytes or 0)}"


def needs_offload(config: RunConfig) -> bool:
    """Return whether the learner's device is shared by turns, or has a budget."""
    return config.placement.takes_turns or config.placement.device_memory_gib > 0


def open_offload(state: TrainState, config: RunConfig, run_folder: Path, model_folder: Path, clock: Clock) -> Offload:
    """Put a state's components under a manager; that every phase has room was checked before the start (control/phase_room.py).

    Args:
        state: On the device.
        config: `placement`, `learner` and `algorithm` are read.
        run_folder: `memory/learner.jsonl` is written there, and `swap/` where components go to disk; by another rank than 0
            `memory/learner-RANK.jsonl` and `swap/learner-RANK/`.
        model_folder: What the reference was opened from, unless the config names another.
        clock: Times moves.
    """
    rank = state.ranks.rank
    process = f"{PROCESS}-{rank}" if rank else PROCESS
    device = open_device(config, rank)
    swap = run_folder / SWAP_FOLDER / (process if rank else "")
    components = learner_components(state, config, device, swap, model_folder)
    phases = learner_phases(state, config)
    timeline = open_memory(run_folder, process)
    manager = ResidencyManager(
        process,
        components,
        phases,
        device,
        clock,
        host_bytes=int(config.placement.host_memory_gib * GIB) or None,
        offload_to=config.placement.offload_to,
        record=timeline.write,
    )
    offload = Offload(manager, device, state, timeline)
    state.offload = offload
    return offload


def open_device(config: RunConfig, rank: int = 0) -> Device:
    """Return a rank's device with its part of the budget: all of it, but beside generation that goes on."""
    placement = config.placement
    is_shared = placement.kind == "async_hybrid" and isinstance(config.launch, LocalLaunch)
    share = 1 - placement.generation_share if is_shared else 1.0
    budget = int(placement.device_memory_gib * GIB * share) or None
    return device_at(rank_device(config, rank), budget)


def learner_components(state: TrainState, config: RunConfig, device: Device, swap: Path, model_folder: Path) -> list[Component]:
    """Return a state's components; an optimizer that is kept in host memory anyway is none."""
    components: list[Component] = [ModuleComponent(POLICY, state.model, device, swap)]
    if not config.learner.offload_optimizer:
        components.append(TensorComponent(POLICY_OPTIMIZER, device, state.optimizer.state_tensors, swap))
    if state.critic is not None and state.critic_optimizer is not None:
        components.append(ModuleComponent(CRITIC, state.critic, device, swap))
        if not config.learner.offload_optimizer:
            components.append(TensorComponent(CRITIC_OPTIMIZER, device, state.critic_optimizer.state_tensors, swap))
    if state.reference is not None and state.reference.is_own_model:
        folder = Path(config.algorithm.reference.path or model_folder)
        components.append(FrozenModelComponent(REFERENCE, state.reference.model, device, folder, swap))
    return components


def learner_phases(state: TrainState, config: RunConfig) -> list[PhaseNeeds]:
    """Return what the learner needs in each phase."""
    trained = (POLICY, CRITIC, POLICY_OPTIMIZER, CRITIC_OPTIMIZER)
    stays = (POLICY,) if config.placement.kind == "hybrid" else ()
    modules: list[torch.nn.Module] = [state.model, *([] if state.critic is None else [state.critic])]
    gradients = 0
    for parameter in (one for module in modules for one in module.parameters() if one.requires_grad):
        gradients += _SUM_BYTES * (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
    return [
        PhaseNeeds("rollout", now=stays, soon=trained, gives_back=config.placement.takes_turns),
        PhaseNeeds("inference", now=(*stays, REFERENCE), soon=trained),
        PhaseNeeds("train", now=trained, soon=(REFERENCE,), working_bytes=gradients),
    ]
