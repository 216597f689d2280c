from __future__ import annotations

import pytest

from asyncrl.config.reward import OverlongPenalty
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import build_reward
from asyncrl.schema.samples import Prompt


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (100, -1.0), (101, -1.0), (10_000, -1.0)]
)
def test_the_penalty_grows_over_the_buffer_and_is_floored(num_tokens, expected):
    reward = build_reward(OverlongPenalty(max_tokens=100, buffer_tokens=40))
    assert reward(RewardInput(Prompt("p"), "", "length", num_tokens)) == pytest.approx(expected)
