"""What every advantage takes and gives. No torch.

Legend: S samples of one step, in any order; T the most response tokens of one of them, right-padded. A trained token is one the
policy wrote and the step trains; tool output and padding are not.

Invariants: whatever stands at an untrained token (NaN too) changes nothing; an untrained token has advantage exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.algorithm import AlgorithmConfig

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """S samples of one step. Only `rewards`, `group_ids` and `mask` are always there."""

    rewards: FloatArray
    """[S], one number a sample."""
    group_ids: NDArray[np.int64]
    """[S]."""
    mask: NDArray[np.bool_]
    """[S, T], true on trained tokens."""
    token_rewards: FloatArray | None = None
    """[S, T], where a penalty changed them; None: `rewards` on the last trained token of each sample, 0 elsewhere."""
    values: FloatArray | None = None
    """[S, T], the critic's estimate in the state before each token."""
    log_ratios: FloatArray | None = None
    """[S, T], log of proximal / behaviour (`vtrace`)."""
    greedy_rewards: FloatArray | None = None
    """[S], reward of the greedy sample of each sample's group (`remax`)."""


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """What an advantage is told; each reads what it knows."""

    epsilon: float = 1e-6
    """Added to a group's standard deviation."""
    gamma: float = 1.0
    gae_lambda: float = 1.0
    vtrace_rho: float = 1.0
    """Bound of the importance weight in V-trace's temporal differences."""
    vtrace_c: float = 1.0
    """Bound of the importance weight that cuts V-trace's traces."""
    whiten: bool | Literal["samples"] = False
    """Over all trained tokens, or over samples."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> AdvantageConfig:
        """Return the part of a run's config that advantages read."""
        same = {name: getattr(algorithm, name) for name in ("gamma", "gae_lambda", "vtrace_rho", "vtrace_c", "whiten")}
        return cls(epsilon=algorithm.advantage_epsilon, **same)


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """One number a trained token."""

    advantages: FloatArray
    """[S, T]."""
    returns: FloatArray | None = None
    """[S, T], what the critic is trained towards; only of advantages that need one."""


Advantage = Callable[[AdvantageInputs, AdvantageConfig], AdvantageOutputs]
