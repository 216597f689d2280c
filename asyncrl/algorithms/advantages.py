"""How good each sample was, compared with the others of its prompt. No torch: runs on rewards before any tensor exists.

Invariants: only samples with the same group id influence each other; order of samples and of groups does not matter; a group of
one has advantage 0 (nothing to compare it with), unless `singleton_keeps_reward` says what verl does. Called by learner/step.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncrl.algorithms.advantage_types import Advantage, AdvantageConfig, AdvantageInputs, AdvantageOutputs, FloatArray


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return (R - group mean) / (unbiased group standard deviation + epsilon), [S].

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1; unbiased deviation as in verl, OpenRLHF, AReaL, TRL.
    """

    def of_group(rewards: FloatArray) -> FloatArray:
        deviation: FloatArray = (rewards - rewards.mean()) / (rewards.std(ddof=1) + config.epsilon)
        return deviation

    return _per_group(inputs, config, of_group, singleton_scale=1.0 / (1.0 + config.epsilon))


def dr_grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R - group mean, [S].

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    return _per_group(inputs, config, lambda rewards: rewards - rewards.mean())


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R - mean of the other samples of the group, [S].

    Source: Kool et al. 2019; Ahmadian et al. (arXiv 2402.14740), equation 8.
    """
    return _per_group(inputs, config, lambda rewards: (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1)))


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _per_group(
    inputs: AdvantageInputs, config: AdvantageConfig, of_group: Callable[[FloatArray], FloatArray], singleton_scale: float = 1.0
) -> AdvantageOutputs:
    advantages = np.zeros(len(inputs.rewards), dtype=np.float64)
    for group_id in np.unique(inputs.group_ids):
        members = np.flatnonzero(inputs.group_ids == group_id)
        rewards = inputs.rewards[members]
        if len(members) > 1:
            advantages[members] = of_group(rewards)
        elif config.singleton_keeps_reward:
            advantages[members] = rewards * singleton_scale
    return AdvantageOutputs(np.where(inputs.mask, advantages[:, None], 0.0))
