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

from pathlib import Path

import torch

from asyncrl.clock import Clock
from asyncrl.config.run import LocalLaunch, RunConfig
from asyncrl.learner.ranks.fsdp import part_here
from asyncrl.learner.ranks.launch import rank_device
from asyncrl.learner.train_state import Offload, TrainState
from asyncrl.residency.components import TensorComponent
from asyncrl.residency.device import Device, device_at
from asyncrl.residency.manager import ResidencyManager
from asyncrl.residency.plan import GIB, SWAP_FOLDER, PhaseNeeds

POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
POLICY_OPTIMIZER, CRITIC_OPTIMIZER = "policy optimizer", "critic optimizer"
PROCESS = "learner"
_SUM_BYTES = 4
"""Of gradients, a parameter."""


def needs_offload(config: RunConfig) -> bool:
    """Return whether the learner's device is shared by turns, or has a budget."""
    return config.placement.takes_turns or config.placement.device_memory_gib > 0


def open_offload(state: TrainState, config: RunConfig, run_folder: Path, clock: Clock) -> Offload:
    """Put a state's components under a manager.

    That every phase has room was checked before the start (control/placement/gpu_share.py).

    Args:
        state: On the device.
        config: `placement`, `learner` and `algorithm` are read.
        run_folder: `memory/learner.jsonl` is written there, and `swap/` where components go to disk; by another rank than 0
            `memory/learner-RANK.jsonl` and `swap/learner-RANK/`.
        clock: Times moves.
    """
    rank = state.ranks.rank
    process = f"{PROCESS}-{rank}" if rank else PROCESS
    device = open_device(config, rank)
    swap = run_folder / SWAP_FOLDER / (process if rank else "")
    components = [TensorComponent.of_module(POLICY, state.model, device, swap)]
    modules: list[torch.nn.Module] = [state.model]
    # An optimizer that is kept in host memory anyway is no component.
    if not config.learner.offload_optimizer:
        components.append(TensorComponent(POLICY_OPTIMIZER, device, state.optimizer.state_tensors, swap))
    if state.critic is not None and state.critic_optimizer is not None:
        modules.append(state.critic)
        components.append(TensorComponent.of_module(CRITIC, state.critic, device, swap))
        if not config.learner.offload_optimizer:
            components.append(TensorComponent(CRITIC_OPTIMIZER, device, state.critic_optimizer.state_tensors, swap))
    if state.reference is not None and state.reference.is_own_model:
        components.append(TensorComponent.of_module(REFERENCE, state.reference.model, device, swap, is_frozen=True))
    trained = (POLICY, CRITIC, POLICY_OPTIMIZER, CRITIC_OPTIMIZER)
    stays = (POLICY,) if config.placement.kind == "hybrid" else ()
    gradients = 0
    for parameter in (one for module in modules for one in module.parameters() if one.requires_grad):
        gradients += _SUM_BYTES * part_here(parameter).numel()
    phases = [
        PhaseNeeds("rollout", now=stays, soon=trained, gives_back=config.placement.takes_turns),
        PhaseNeeds("inference", now=(*stays, REFERENCE), soon=trained),
        PhaseNeeds("train", now=trained, soon=(REFERENCE,), working_bytes=gradients),
    ]
    manager = ResidencyManager.of_run(config, run_folder, process, components, phases, device, clock)
    state.offload = Offload(manager, device, state)
    return state.offload


def open_device(config: RunConfig, rank: int = 0) -> Device:
    """Return a rank's device with its part of the budget: all of it, but beside generation that goes on."""
    placement = config.placement
    is_shared = placement.kind == "async_hybrid" and isinstance(config.launch, LocalLaunch)
    share = 1 - placement.generation_share if is_shared else 1.0
    budget = int(placement.device_memory_gib * GIB * share) or None
    return device_at(rank_device(config, rank), budget)
