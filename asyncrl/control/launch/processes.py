"""Which processes a run wants, what each one is started with, and how the learner's ranks share its steps.

All of it follows from the config. The learner is one process here: its rank 0, which starts the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.config.learner import ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.control.launch.local import ProcessSpec
from asyncrl.control.lifecycle.events import ProcessPlan
from asyncrl.control.placement.gpu_share import generator_environment
from asyncrl.control.tools.memory import number_of_model
from asyncrl.packing.pack import CostModel, RankPlan
from asyncrl.schema.control import ProcessKind


def plan_processes(config: RunConfig) -> list[ProcessPlan]:
    """Return the run's processes in the order they are started.

    The learner (unless outside code is it), reward workers where rules score here, inference workers where models do, generators.
    """
    plan = [ProcessPlan("learner", "learner")] if config.learner.kind == "builtin" else []
    if config.has_rules and not config.reward.is_caller:
        plan += [ProcessPlan(f"reward-{number}", "reward") for number in range(config.reward.num_workers)]
    if config.needs_inference:
        plan += [ProcessPlan(f"inference-{number}", "inference") for number in range(config.inference.num_workers)]
    plan += [ProcessPlan(f"generator-{number}", "generator") for number in range(config.generate.num_workers)]
    return plan


def plan_ranks(config: RunConfig) -> RankPlan:
    """Return how a step is spread over the learner's ranks, its costs by the model's hidden size.

    A pretrained model's is read from its folder; where that does not say, only linear layers count.
    """
    if config.learner.ranks == 1:
        return RankPlan()
    if isinstance(config.model, ScratchModel):
        return RankPlan(config.learner.ranks, CostModel.of_model(config.model.hidden_size))
    hidden_size = number_of_model(config.model.path, "hidden_size")  # the learner says what is wrong with the folder
    return RankPlan(config.learner.ranks, CostModel.of_model(hidden_size) if hidden_size else CostModel())


def num_threads(config: RunConfig, kind: ProcessKind) -> int:
    """Return how many OpenMP threads a process of this kind may use."""
    if kind == "generator":
        return int(getattr(config.generate.engine, "num_threads", 1))
    return {"learner": config.learner.num_threads, "inference": config.inference.num_threads}.get(kind, 1)


def spec_of(config: RunConfig, run_folder: Path, name: str, kind: ProcessKind, incarnation: int) -> ProcessSpec:
    """Return how a process is started: `python -m asyncrl.pipeline KIND NAME RUN_FOLDER INCARNATION`."""
    command = (sys.executable, "-P", "-m", "asyncrl.pipeline", kind, name, str(run_folder), str(incarnation))
    log_path, env = run_folder / "logs" / f"{name}.log", generator_environment(config) if kind == "generator" else {}
    return ProcessSpec(name, kind, incarnation, command, log_path, num_threads(config, kind), env)
