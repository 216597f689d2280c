import pytest

from asyncrl.config.reward import FormatCheckReward
from asyncrl.errors import ConfigError
from asyncrl.reward.format_check import build_format_check
from asyncrl.reward.inputs import RewardInput
from asyncrl.schema.samples import Prompt


def test_pattern_must_match_the_whole_completion():
    reward = build_format_check(FormatCheckReward(pattern=r"<think>.*</think>\s*<answer>.*</answer>"))
    score = lambda text: reward(RewardInput(Prompt("p"), text, "stop", 1))  # noqa: E731
    assert score("<think>a\nb</think>\n<answer>1</answer>") == 1.0
    assert score("<think>a</think><answer>1</answer> and more") == 0.0
    assert score("") == 0.0


def test_wrong_pattern_is_refused_when_built():
    with pytest.raises(ConfigError, match="format_check pattern"):
        build_format_check(FormatCheckReward(pattern="["))
