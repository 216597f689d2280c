"""Every struct of a config under one name, for programs that build theirs in Python, and the JSON schema of them all.

    from asyncrl.configs import AlgorithmConfig, KLConfig, RunConfig

A struct takes what it is given; `Run`, `Session` and `load_config` check the whole (asyncrl/config/check.py).
"""

# ruff: noqa: F403 - a list of names would be one more place for a new struct
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


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a config's tables, for editors and forms. What goes together is not in it."""
    schema: dict[str, Any] = msgspec.json.schema(RunConfig)
    for definition in schema["$defs"].values():
        for field in definition.get("properties", {}).values():
            if isinstance(field.get("default"), float) and math.isinf(field["default"]):
                del field["default"]  # JSON has no infinity
    return schema
