"""asyncrl: asynchronous, off-policy-tolerant reinforcement learning for language models.

`Run` owns a run, `connect` joins one; everything exported here is typed and stable. Nothing is imported before it is used, so
that `import asyncrl` costs nothing and brings in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # `as`: exported
    from asyncrl import configs as configs
    from asyncrl.algorithms.types import LossConfig as LossConfig
    from asyncrl.algorithms.types import LossInputs as LossInputs
    from asyncrl.algorithms.types import LossOutputs as LossOutputs
    from asyncrl.client import Run as Run
    from asyncrl.client import RunClient as RunClient
    from asyncrl.client import connect as connect
    from asyncrl.clock import SystemClock as SystemClock
    from asyncrl.config.load import load_config as load_config
    from asyncrl.config.load import parse_config as parse_config
    from asyncrl.config.run import RunConfig as RunConfig
    from asyncrl.endpoint.server import Endpoint as Endpoint
    from asyncrl.errors import AsyncRLError as AsyncRLError
    from asyncrl.errors import ConfigError as ConfigError
    from asyncrl.errors import LaunchError as LaunchError
    from asyncrl.errors import RunError as RunError
    from asyncrl.errors import RunLostError as RunLostError
    from asyncrl.groups import GroupStream as GroupStream
    from asyncrl.groups import batched as batched
    from asyncrl.groups import group_norm as group_norm
    from asyncrl.groups import with_rewards as with_rewards
    from asyncrl.learner.step.train_step import StepResult as StepResult
    from asyncrl.observe.steps import EvalReport as EvalReport
    from asyncrl.observe.steps import RunEvent as RunEvent
    from asyncrl.observe.steps import StepReport as StepReport
    from asyncrl.schema.samples import ChatMessage as ChatMessage
    from asyncrl.schema.samples import GroupsTaken as GroupsTaken
    from asyncrl.schema.samples import Prompt as Prompt
    from asyncrl.schema.samples import Sample as Sample
    from asyncrl.schema.samples import ScoredGroup as ScoredGroup
    from asyncrl.schema.samples import ScoredSample as ScoredSample
    from asyncrl.schema.samples import ids_from_bytes as ids_from_bytes
    from asyncrl.schema.samples import ids_to_bytes as ids_to_bytes
    from asyncrl.schema.samples import logprobs_from_bytes as logprobs_from_bytes
    from asyncrl.schema.samples import logprobs_to_bytes as logprobs_to_bytes
    from asyncrl.schema.samples import mask_from_bytes as mask_from_bytes
    from asyncrl.schema.status import ExternalGroup as ExternalGroup
    from asyncrl.schema.status import RunStatus as RunStatus
    from asyncrl.schema.status import SubmitResult as SubmitResult
    from asyncrl.schema.weights import WeightsAvailable as WeightsAvailable
    from asyncrl.schema.weights import WeightsManifest as WeightsManifest
    from asyncrl.serve.client import Server as Server
    from asyncrl.serve.records import RunRecord as RunRecord
    from asyncrl.session import Session as Session
    from asyncrl.sweep.statistics import Comparison as Comparison
    from asyncrl.sweep.statistics import compare as compare
    from asyncrl.tasks.task import TaskData as TaskData
    from asyncrl.weights.publisher import Publisher

    WeightPublisher = Publisher

_HOMES = {
    "asyncrl.algorithms.types": ("LossConfig", "LossInputs", "LossOutputs"),
    "asyncrl.client": ("Run", "RunClient", "connect"),
    "asyncrl.clock": ("SystemClock",),
    "asyncrl.config.load": ("load_config", "parse_config"),
    "asyncrl.config.run": ("RunConfig",),
    "asyncrl.endpoint.server": ("Endpoint",),
    "asyncrl.errors": ("AsyncRLError", "ConfigError", "LaunchError", "RunError", "RunLostError"),
    "asyncrl.groups": ("GroupStream", "batched", "group_norm", "with_rewards"),
    "asyncrl.learner.step.train_step": ("StepResult",),
    "asyncrl.observe.steps": ("EvalReport", "RunEvent", "StepReport"),
    "asyncrl.schema.samples": ("ChatMessage", "GroupsTaken", "Prompt", "Sample", "ScoredGroup", "ScoredSample", "ids_from_bytes",
                               "ids_to_bytes", "logprobs_from_bytes", "logprobs_to_bytes", "mask_from_bytes"),
    "asyncrl.schema.status": ("ExternalGroup", "RunStatus", "SubmitResult"),
    "asyncrl.schema.weights": ("WeightsAvailable", "WeightsManifest"),
    "asyncrl.serve.client": ("Server",),
    "asyncrl.serve.records": ("RunRecord",),
    "asyncrl.session": ("Session",),
    "asyncrl.sweep.statistics": ("Comparison", "compare"),
    "asyncrl.tasks.task": ("TaskData",),
    "asyncrl.weights.publisher": ("WeightPublisher",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]

if not TYPE_CHECKING:  # a type checker sees the imports above, and no other name

    def __getattr__(name: str) -> object:
        """Import an exported name from where it lives, the first time it is asked for."""
        if name == "configs":
            return importlib.import_module("asyncrl.configs")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME_OF[name]), "Publisher" if name == "WeightPublisher" else name)

    def __dir__() -> list[str]:
        return sorted({*__all__, "__version__", "configs"})
