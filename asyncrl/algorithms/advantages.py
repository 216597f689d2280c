"""How good each sample was, compared with the others of its prompt. No torch: runs on rewards before any tensor exists.

Invariants: only samples with the same group id influence each other; order of samples and of groups does not matter; a group of
one has advantage 0 (nothing to compare it with), unless `singleton_keeps_reward` says what verl does. Called by learner/step.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """S samples of one step, in any order."""

    rewards: FloatArray
    """[S]."""
    group_ids: NDArray[np.int64]
    """[S]."""
    epsilon: float = 1e-6
    """Added to a group's standard deviation."""
    singleton_keeps_reward: bool = False
    """What a group of one gets: its raw reward (verl, OpenRLHF), or 0."""


Advantage = Callable[[AdvantageInputs], FloatArray]


def grpo(inputs: AdvantageInputs) -> FloatArray:
    """Return (R - group mean) / (unbiased group standard deviation + epsilon), [S].

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1; unbiased deviation as in verl, OpenRLHF, AReaL, TRL.
    """

    def of_group(rewards: FloatArray) -> FloatArray:
        deviation: FloatArray = (rewards - rewards.mean()) / (rewards.std(ddof=1) + inputs.epsilon)
        return deviation

    return _per_group(inputs, of_group, singleton_scale=1.0 / (1.0 + inputs.epsilon))


def dr_grpo(inputs: AdvantageInputs) -> FloatArray:
    """Return R - group mean, [S].

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    return _per_group(inputs, lambda rewards: rewards - rewards.mean())


def rloo(inputs: AdvantageInputs) -> FloatArray:
    """Return R - mean of the other samples of the group, [S].

    Source: Kool et al. 2019; Ahmadian et al. (arXiv 2402.14740), equation 8.
    """
    return _per_group(inputs, lambda rewards: (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1)))


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _per_group(inputs: AdvantageInputs, of_group: Callable[[FloatArray], FloatArray], singleton_scale: float = 1.0) -> FloatArray:
    advantages = np.zeros(len(inputs.rewards), dtype=np.float64)
    for group_id in np.unique(inputs.group_ids):
        members = np.flatnonzero(inputs.group_ids == group_id)
        rewards = inputs.rewards[members]
        if len(members) > 1:
            advantages[members] = of_group(rewards)
        elif inputs.singleton_keeps_reward:
            advantages[members] = rewards * singleton_scale
    return advantages
