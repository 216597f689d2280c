"""Which processes a run wants, what each one imports and is started with, and how the learner's ranks share its steps.

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
from asyncrl.generate.factory import ENGINE_MODULES
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


def stage_modules(config: RunConfig, kind: ProcessKind) -> tuple[str, ...]:
    """Return what a process of this kind imports before it connects to the controller."""
    if kind == "generator":
        return "asyncrl.generate.worker", ENGINE_MODULES[config.generate.engine.kind]
    return ("asyncrl.learner.fake" if kind == "learner" and config.learner.fake_step_s is not None else f"asyncrl.{kind}.worker",)


def forked_modules(config: RunConfig) -> dict[ProcessKind, tuple[str, ...]]:
    """Return which kinds of processes are forked (fork_server.py), those that compute on a CPU, and what each imports."""
    devices: dict[ProcessKind, str] = {}
    if config.learner.kind == "builtin" and config.learner.fake_step_s is None:
        devices["learner"] = config.learner.device
    if config.generate.engine.kind == "transformers":
        devices["generator"] = config.generate.engine.device_name
    if config.needs_inference:
        devices["inference"] = config.inference.device
    is_safe = sys.platform == "linux"  # elsewhere the system's libraries start threads of their own
    return {kind: stage_modules(config, kind) for kind, device in devices.items() if is_safe and device == "cpu"}


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
