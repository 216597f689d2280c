"""asyncrl: asynchronous, off-policy-tolerant reinforcement learning for language models.

`Run` owns a run, `connect` joins one; everything exported here is typed and stable. Nothing is imported before it is used, so
that `import asyncrl` costs nothing and brings in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from asyncrl.client import Run, RunClient, connect
    from asyncrl.clock import SystemClock
    from asyncrl.config.load import load_config, parse_config
    from asyncrl.config.run import RunConfig
    from asyncrl.errors import AsyncRLError, ConfigError, LaunchError, RunError, RunLostError
    from asyncrl.observe.steps import EvalReport, StepReport
    from asyncrl.schema.batches import GroupsTaken
    from asyncrl.schema.samples import (
        ChatMessage,
        Prompt,
        Sample,
        ScoredGroup,
        ScoredSample,
        ids_from_bytes,
        ids_to_bytes,
        logprobs_from_bytes,
        logprobs_to_bytes,
        mask_from_bytes,
    )
    from asyncrl.schema.status import ExternalGroup, RunStatus, SubmitResult
    from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
    from asyncrl.serve.client import Server
    from asyncrl.serve.records import RunRecord
    from asyncrl.session import Session, with_rewards
    from asyncrl.tasks.task import TaskData
    from asyncrl.weights.publisher import Publisher as WeightPublisher

_HOMES = {
    "asyncrl.client": ("Run", "RunClient", "connect"),
    "asyncrl.clock": ("SystemClock",),
    "asyncrl.config.load": ("load_config", "parse_config"),
    "asyncrl.config.run": ("RunConfig",),
    "asyncrl.errors": ("AsyncRLError", "ConfigError", "LaunchError", "RunError", "RunLostError"),
    "asyncrl.observe.steps": ("EvalReport", "StepReport"),
    "asyncrl.schema.batches": ("GroupsTaken",),
    "asyncrl.schema.samples": ("ChatMessage", "Prompt", "Sample", "ScoredGroup", "ScoredSample", "ids_from_bytes", "ids_to_bytes",
                               "logprobs_from_bytes", "logprobs_to_bytes", "mask_from_bytes"),
    "asyncrl.schema.status": ("ExternalGroup", "RunStatus", "SubmitResult"),
    "asyncrl.schema.weights": ("WeightsAvailable", "WeightsManifest"),
    "asyncrl.serve.client": ("Server",),
    "asyncrl.serve.records": ("RunRecord",),
    "asyncrl.session": ("Session", "with_rewards"),
    "asyncrl.tasks.task": ("TaskData",),
    "asyncrl.weights.publisher": ("WeightPublisher",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncRLError",
    "ChatMessage",
    "ConfigError",
    "EvalReport",
    "ExternalGroup",
    "GroupsTaken",
    "LaunchError",
    "Prompt",
    "Run",
    "RunClient",
    "RunConfig",
    "RunError",
    "RunLostError",
    "RunRecord",
    "RunStatus",
    "Sample",
    "ScoredGroup",
    "ScoredSample",
    "Server",
    "Session",
    "StepReport",
    "SubmitResult",
    "SystemClock",
    "TaskData",
    "WeightPublisher",
    "WeightsAvailable",
    "WeightsManifest",
    "connect",
    "ids_from_bytes",
    "ids_to_bytes",
    "load_config",
    "logprobs_from_bytes",
    "logprobs_to_bytes",
    "mask_from_bytes",
    "parse_config",
    "with_rewards",
]

if not TYPE_CHECKING:  # a type checker sees the imports above, and no other name

    def __getattr__(name: str) -> object:
        """Import an exported name from where it lives, the first time it is asked for."""
        if name not in _HOME_OF:
            raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME_OF[name]), "Publisher" if name == "WeightPublisher" else name)

    def __dir__() -> list[str]:
        return sorted({*__all__, "__version__"})
