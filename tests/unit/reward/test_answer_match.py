"""The modes and options of answer_match; what counts as equal is in tests/adversarial/test_reward_answers.py."""

import tomllib
from pathlib import Path

import pytest

from asyncrl.config.reward import AnswerMatchReward
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import build_reward
from asyncrl.schema.samples import Prompt

EXTRACT = {"extract": r"<answer>(.*?)</answer>"}
NUMERIC = {"mode": "numeric"}
REGEX = {"mode": "regex"}


def score(text: str, reference: str, **options: object) -> float:
    reward = build_reward(AnswerMatchReward(**options))
    return reward(RewardInput(Prompt("p", answer=reference), text, "stop", 4))


@pytest.mark.parametrize(("text", "reference", "options", "is_right"), [
    (" 46\n", "46", {}, True), ("46.", "46", {}, False), ("The answer is 46", "46", {}, False),
    ("<answer>1</answer> no, <answer> 2 </answer>", "2", EXTRACT, True), ("2", "2", EXTRACT, False),
    ("<answer>2</answer> no, <answer>1</answer>", "2", EXTRACT, False),
    ("<answer>two\nlines</answer>", "two\nlines", EXTRACT, True),
    *(("", "5", {"mode": mode}, False) for mode in ("exact", "numeric", "regex", "math")),
    ("1000002", "1000001", NUMERIC, False), ("1000002", "1000001", NUMERIC | {"tolerance": 1e-6}, True),
    ("0.333", "1/3", NUMERIC, False), ("1001", "1000", NUMERIC | {"tolerance": 0.001}, True),
    ("1002", "1000", NUMERIC | {"tolerance": 0.001}, False), ("0.0005", "0", NUMERIC | {"tolerance": 0.001}, True),
    ("yes", "(?i)YES|y", REGEX, True), ("yes and no", "yes", REGEX, False), ("x\ny", r"\Ax.y\Z", REGEX, True),
])  # fmt: skip
def test_an_answer_is_right_by_its_mode_and_options(text, reference, options, is_right):
    assert score(text, reference, **options) == is_right


@pytest.mark.parametrize(("reference", "said"), [("", "'p' has no reference answer"), ("(", "not a regular expression")])
def test_a_reference_that_cannot_be_used_is_an_error_and_not_a_reward(reference, said):
    with pytest.raises((RewardError, ConfigError), match=said):
        score("x", reference, mode="regex")


@pytest.mark.parametrize(("extract", "said"), [("(", "not a regular expression"), ("answer: .*", "has no group")])
def test_patterns_are_checked_when_built(extract, said):
    with pytest.raises(ConfigError, match=said):
        build_reward(AnswerMatchReward(extract=extract))


def test_the_answer_of_gsm8k_ends_with_its_line():
    config = tomllib.loads((Path(__file__).parents[3] / "configs/gsm8k.toml").read_text(encoding="utf-8"))
    (options,) = config["reward"]["functions"]
    assert options.pop("kind") == "answer_match"
    assert score("So 9 and 9.\n#### 18\n\nIt is done.", "18", **options) == 1.0
    assert score("So 9 and 9.\n#### 17\n\n18", "18", **options) == 0.0
