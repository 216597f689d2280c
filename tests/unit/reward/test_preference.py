from __future__ import annotations

import pytest

from asyncrl.config.reward import PreferenceReward
from asyncrl.errors import RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import build_reward
from asyncrl.schema.samples import Prompt


def test_the_chosen_answer_is_worth_1_and_the_rejected_one_0():
    reward = build_reward(PreferenceReward())
    assert [reward(RewardInput(Prompt("p"), "same", "stop", 2, index)) for index in (0, 1)] == [1.0, 0.0]


def test_a_third_member_is_neither():
    with pytest.raises(RewardError, match="member 2"):
        build_reward(PreferenceReward())(RewardInput(Prompt("p"), "", "stop", 2, 2))
