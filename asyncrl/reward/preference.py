"""1 for the chosen answer of a preferences task, 0 for the rejected one: the replay engine gives them back as members 0 and 1."""

from __future__ import annotations

from asyncrl.config.reward import PreferenceReward
from asyncrl.errors import RewardError
from asyncrl.reward.inputs import RewardFunction, RewardInput


def build_preference(_: PreferenceReward) -> RewardFunction:
    """Build the reward; it fails a sample that is of no preferences task."""

    def score(sample: RewardInput) -> float:
        if sample.index > 1:
            raise RewardError(f"member {sample.index} of a group is neither the chosen answer (0) nor the rejected one (1)")
        return 1.0 - sample.index

    return score
