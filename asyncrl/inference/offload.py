"""An inference worker's models on a device that phases share: there in phase `inference`, away in the others.

Every model is a component, `reference` or `reward NAME`. They never change, so one that is sent away may be destroyed and read
from its own folder again (`placement.offload_to = "disk"`). Each worker has an equal part of the device's budget; that all fit
beside each other is checked before anything is started (control/phase_room.py).

Invariants: an order is answered when the memory is given back, or taken and filled; every switch is a line of the memory
timeline. Used on the worker's one thread, between two batches.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from asyncrl.clock import Clock
from asyncrl.config.check import REFERENCE
from asyncrl.config.run import RunConfig
from asyncrl.inference.scorer import Scorer
from asyncrl.observe.memory import MemoryLine, open_memory
from asyncrl.observe.steps import JsonLines
from asyncrl.residency.components import FrozenModelComponent
from asyncrl.residency.device import device_at
from asyncrl.residency.manager import ResidencyManager
from asyncrl.residency.plan import GIB, SWAP_FOLDER, PhaseNeeds


def open_scorer_offload(
    scorer: Scorer, config: RunConfig, run_folder: Path, model_folder: Path, name: str, clock: Clock
) -> tuple[ResidencyManager, JsonLines[MemoryLine]]:
    """Put a scorer's models under a manager.

    Args:
        scorer: On the device.
        config: `placement`, `inference` and `algorithm` are read.
        run_folder: `memory/NAME.jsonl` is written there, and `swap/NAME/` where a model's own folder has not all of it.
        model_folder: What the reference was opened from, unless the config names another.
        name: The worker's.
        clock: Times moves.

    Returns:
        The manager, and the timeline, which the caller closes.
    """
    placement = config.placement
    budget_bytes = int(placement.device_memory_gib * GIB) // config.inference.num_workers
    device = device_at(config.inference.device, budget_bytes or None)
    swap = run_folder / SWAP_FOLDER / name
    models: list[tuple[str, PreTrainedModel, Path]] = []
    if scorer.reference is not None:
        models.append((REFERENCE, scorer.reference.model, Path(config.algorithm.reference.path or model_folder)))
    models += [
        (f"reward {model.name}", scorer.reward_models[model.name].model, Path(model.path))
        for model in config.inference.reward_models
    ]
    components = [FrozenModelComponent(component, model, device, folder, swap) for component, model, folder in models]
    names = tuple(component.name for component in components)
    phases = [
        PhaseNeeds("rollout", soon=names, gives_back=True),
        PhaseNeeds("inference", now=names),
        PhaseNeeds("train", soon=names, gives_back=True),
    ]
    timeline = open_memory(run_folder, name)
    manager = ResidencyManager(
        name,
        components,
        phases,
        device,
        clock,
        host_bytes=int(placement.host_memory_gib * GIB) or None,
        offload_to=placement.offload_to,
        record=timeline.write,
    )
    return manager, timeline
