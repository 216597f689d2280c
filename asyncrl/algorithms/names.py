"""The names a config may use, checked once, before anything expensive starts. Called by learner/start.py."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.ratios import CORRECTIONS
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError


def check_names(algorithm: AlgorithmConfig) -> None:
    """Refuse names that no registry knows.

    Raises:
        ConfigError: Names the field, what it says, and everything it may say.
    """
    _check("advantage", algorithm.advantage, ADVANTAGES)
    _check("loss", algorithm.loss, LOSSES)
    _check("correction", algorithm.correction, CORRECTIONS)
    _check("aggregation", algorithm.aggregation, AGGREGATIONS)


def _check(field: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ConfigError(f"algorithm.{field} must be one of {', '.join(known)}, got {name!r}")
