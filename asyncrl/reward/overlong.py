"""DAPO's soft punishment of long answers, as a reward: between 0 and -1, by the number of tokens alone."""

from __future__ import annotations

from asyncrl.algorithms.shaping import overlong_penalty
from asyncrl.config.reward import OverlongPenalty
from asyncrl.reward.inputs import RewardFunction, RewardInput


def build_overlong(config: OverlongPenalty) -> RewardFunction:
    """Build the penalty; its weight is the configured one, so a positive weight punishes."""

    def score(sample: RewardInput) -> float:
        return overlong_penalty(sample.num_tokens, config.max_tokens, config.buffer_tokens)

    return score
