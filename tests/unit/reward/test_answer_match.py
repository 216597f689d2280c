import pytest

from asyncrl.config.reward import AnswerMatchReward
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.answer_match import build_answer_match
from asyncrl.reward.inputs import RewardInput
from asyncrl.schema.samples import Prompt


def score(text: str, reference: str, **options: object) -> float:
    reward = build_answer_match(AnswerMatchReward(**options))
    return reward(RewardInput(Prompt("p", answer=reference), text, "stop", 4))


def test_exact_ignores_surrounding_space_only():
    assert score(" 46\n", "46") == 1.0
    assert score("46.", "46") == 0.0
    assert score("The answer is 46", "46") == 0.0


def test_extract_takes_the_last_match():
    extract = r"<answer>(.*?)</answer>"
    assert score("<answer>1</answer> no, <answer> 2 </answer>", "2", extract=extract) == 1.0
    assert score("<answer>2</answer> no, <answer>1</answer>", "2", extract=extract) == 0.0
    assert score("2", "2", extract=extract) == 0.0
    assert score("<answer>two\nlines</answer>", "two\nlines", extract=extract) == 1.0


def test_empty_answer_is_wrong_in_every_mode():
    for mode in ("exact", "numeric", "regex", "math"):
        assert score("", "5", mode=mode) == 0.0


def test_prompt_without_reference_is_an_error_not_a_reward():
    with pytest.raises(RewardError, match="'p' has no reference answer"):
        score("", "")


def test_whole_numbers_are_exact_unless_a_tolerance_is_given():
    assert score("1000002", "1000001", mode="numeric") == 0.0
    assert score("1000002", "1000001", mode="numeric", tolerance=1e-6) == 1.0
    assert score("0.3333333", "1/3", mode="numeric") == 1.0
    assert score("0.333", "1/3", mode="numeric") == 0.0


def test_numeric_tolerance_is_relative_to_the_reference():
    assert score("1001", "1000", mode="numeric", tolerance=0.001) == 1.0
    assert score("1002", "1000", mode="numeric", tolerance=0.001) == 0.0
    assert score("0.0005", "0", mode="numeric", tolerance=0.001) == 1.0


def test_regex_matches_the_whole_answer():
    assert score("yes", "(?i)YES|y", mode="regex") == 1.0
    assert score("yes and no", "yes", mode="regex") == 0.0
    assert score("x\ny", r"\Ax.y\Z", mode="regex") == 1.0
    with pytest.raises(RewardError, match="not a regular expression"):
        score("x", "(", mode="regex")


def test_patterns_are_checked_when_built():
    with pytest.raises(ConfigError, match="not a regular expression"):
        build_answer_match(AnswerMatchReward(extract="("))
    with pytest.raises(ConfigError, match="has no group"):
        build_answer_match(AnswerMatchReward(extract="answer: .*"))
