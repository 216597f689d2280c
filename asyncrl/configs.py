"""Every struct of a config under one name, for programs that build theirs in Python, and the JSON schema of them all.

    from asyncrl.configs import AlgorithmConfig, KLConfig, RunConfig

A struct takes what it is given; `Run`, `Session` and `load_config` check the whole (asyncrl/config/check.py).
"""

# ruff: noqa: F403, F405 - the names are in __all__; a test compares them with the structs
from __future__ import annotations

import math
from typing import Any

import msgspec

from asyncrl.config.algorithm import *
from asyncrl.config.broadcast import *
from asyncrl.config.generate import *
from asyncrl.config.learner import *
from asyncrl.config.reward import *
from asyncrl.config.run import *
from asyncrl.config.run import RunConfig
from asyncrl.config.tasks import *

__all__ = [
    "AdditionTask", "AlgorithmConfig", "AnswerMatchReward", "AutoMedium", "BroadcastConfig", "BufferConfig", "CUDAIPCMedium",
    "CheckpointConfig", "CodeExecReward", "CriticConfig", "DeltaConfig", "ElasticConfig", "EvalConfig", "FakeEngineConfig",
    "FilesMedium", "FormatCheckReward", "GenerateConfig", "GlooMedium", "InferenceConfig", "JsonlTask", "KLConfig",
    "LearnerConfig", "LoRAConfig", "LocalLaunch", "MaskedGeometric", "MaskedSequence", "MaskedToken", "NCCLMedium",
    "ObserveConfig", "OffPolicySequenceMask", "OverlongPenalty", "OwnerConfig", "PackingConfig", "PlacementConfig",
    "PreferenceConfig", "PreferenceReward", "PreferencesTask", "PretrainedModel", "ProcessNeeds", "PythonCorrection",
    "PythonReward", "PythonTask", "RayEnvironment", "RayLaunch", "ReasoningGymReward", "ReasoningGymTask", "ReferenceConfig",
    "Rejection", "ReplayEngineConfig", "RewardConfig", "RewardModel", "RunConfig", "SamplingConfig", "ScratchModel",
    "SecondMomentClip", "SecondMomentMask", "SharedMemoryMedium", "SharedStorageMedium", "StalenessMask", "StalenessWeight",
    "SupervisionConfig", "TransformersEngineConfig", "TransportConfig", "TruncatedGeometric", "TruncatedSequence",
    "TruncatedToken", "VLLMEngineConfig", "VLLMServerEngineConfig", "Veto", "WarmStart", "ZeroMQMedium", "json_schema",
]  # fmt: skip


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a config's tables, for editors and forms. What goes together is not in it."""
    schema: dict[str, Any] = msgspec.json.schema(RunConfig)
    for definition in schema["$defs"].values():
        for field in definition.get("properties", {}).values():
            if isinstance(field.get("default"), float) and math.isinf(field["default"]):
                del field["default"]  # JSON has no infinity
    return schema
