"""The rewards that are built in, and what becomes of a user's; what counts as equal is in tests/adversarial."""

import asyncio
import contextlib
import json
import time
import tomllib
from pathlib import Path

import pytest

from asyncrl.config import reward as kinds
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import (
    NamedReward,
    TimeLimit,
    batch_values,
    build_reward,
    build_rewards,
    check_prompts,
    judge_for,
    score_sample,
)
from asyncrl.reward.sandbox.bubblewrap import probe_sandbox
from asyncrl.reward.sandbox.code_exec import CodeTest, parse_tests
from asyncrl.schema.codec import encode
from asyncrl.schema.samples import Prompt, ScoreRequest

SAMPLE = RewardInput(Prompt("p", answer="46"), "46", "stop", 2)


def score(rewards, *items):
    """What came of samples that came together."""

    async def scored():
        values = await batch_values(rewards, [(item, ()) for item in items], lambda *_: None, TimeLimit(1.0))
        return [await score_sample(rewards, item, values.get(index, {})) for index, item in enumerate(items)]

    return [(one.reward, one.parts) for one in asyncio.run(scored())]


async def half(_sample):
    await asyncio.sleep(0)
    return 0.5


class Exits:
    """Its own methods end whoever calls them."""

    def __float__(self):
        raise SystemExit(3)

    __repr__ = __float__


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "None, which is not a finite number"), ("1", "not a finite number"), (b"1", "not a finite number"),
     (float("nan"), "nan"), (10**400, "not a finite number"), (Exits(), "Exits that cannot be shown")],
)  # fmt: skip
def test_what_is_no_finite_number_fails_the_sample(value, said):
    with pytest.raises(RewardError, match=said):
        score((NamedReward("bad", 1.0, lambda _: value),), SAMPLE)


@pytest.mark.parametrize("values", [map((1).__truediv__, (0, 0)), {0: 1.0, 1: 0.5}, {2.0, 1.0}], ids=["raises", "dict", "set"])
def test_a_batch_s_answers_that_raise_or_have_no_order_are_asked_for_one_by_one(values):
    rewards = (NamedReward("bad", 1.0, half, lambda _: values),)
    assert score(rewards, SAMPLE, SAMPLE) == [(0.5, {"bad": 0.5})] * 2
    assert asyncio.run(score_sample(rewards, SAMPLE, {0: 0.25})).reward == 0.25, "what a batch gave is not asked for again"


def test_what_plain_functions_of_other_samples_take_is_not_taken_off_the_limit_of_a_sample():
    """Here all others together take longer than one may."""

    async def later(_sample):
        await asyncio.sleep(0.01)
        return 1.0

    def blocks_for(seconds):
        return lambda _: time.sleep(seconds) or 1.0

    async def scored(seconds, count):
        rewards = [NamedReward(name, 1.0, each) for name, each in (("a", later), ("b", blocks_for(seconds)), ("c", later))]
        limit = TimeLimit(0.3)
        async with asyncio.TaskGroup() as scoring:
            tasks = [scoring.create_task(score_sample(rewards, SAMPLE, {}, limit=limit)) for _ in range(count)]
        return [(task.result().reward, task.result().late) for task in tasks]

    assert asyncio.run(scored(0.04, 10)) == [(3.0, ())] * 10
    assert asyncio.run(scored(0.32, 1)) == [(2.0, (2,))], "its own is"


def test_user_function_of_several_has_the_task_s_other_columns_at_hand(tmp_path, monkeypatch):
    module = "def score_batch(prompts, texts):\n    return [float(p.columns['city'] == t) for p, t in zip(prompts, texts)]\n"
    (tmp_path / "rewards_of_columns.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = build_rewards(kinds.RewardConfig(functions=(kinds.PythonReward(path="rewards_of_columns:score_batch"),)))
    items = [RewardInput(Prompt("p", reference_json=f'{{"city": "{city}"}}'), "Rome", "stop", 1) for city in ("Rome", "Oslo")]
    assert [total for total, _ in score(rewards, *items)] == [1.0, 0.0]
    (tmp_path / "rewards_of_nothing.py").write_text("def score_batch(prompts, texts):\n    return []\n")
    rewards = build_rewards(kinds.RewardConfig(functions=(kinds.PythonReward(path="rewards_of_nothing:score_batch"),)))
    with pytest.raises(RewardError, match=r"^python: a list of one: returned 0 numbers for 1 samples$"):
        score(rewards, SAMPLE)


def test_program_time_must_fit_into_the_sample_time():
    config = kinds.RewardConfig(functions=(kinds.CodeExecReward(sandbox="none", wall_s=30.0),), timeout_s=30.0)
    with pytest.raises(ConfigError, match=r"wall_s \(30\) must be under timeout_s \(30\)"):
        build_rewards(config)


def test_a_format_matches_over_lines_an_overlong_answer_costs_up_to_one_and_a_preference_has_two_answers():
    check = build_reward(kinds.FormatCheckReward(pattern=r"<a>.*</a>"))
    texts = ("<a>x\ny</a>", "<a>x</a> ", "x<a></a>", "")
    assert [check(RewardInput(Prompt("p"), text, "stop", 1)) for text in texts] == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="not a regular expression"):
        build_reward(kinds.FormatCheckReward(pattern="("))
    penalty = build_reward(kinds.OverlongPenalty(max_tokens=100, buffer_tokens=20))
    assert [penalty(RewardInput(Prompt("p"), "", "stop", n)) for n in (0, 80, 90, 100, 150)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(RewardError, match="member 2"):
        build_reward(kinds.PreferenceReward())(RewardInput(Prompt("p"), "", "stop", 1, 2))


class Silent(Exception):  # noqa: N818 - what a library might raise
    def __str__(self):
        raise KeyError("no words")


RAISED = [Silent(), ValueError("\ud800"), ValueError("word " * 1_000_000), KeyError("x"), asyncio.CancelledError()]


async def test_whatever_a_caller_s_function_raises_fails_its_sample_in_bounded_text_that_can_be_sent():
    told = []

    async def ask(judged):
        told.extend(judged.answers)
        if not judged.wants:
            encode(judged)
            return []
        if not judged.held:
            texts = tuple(map(str, range(len(RAISED) + 2)))
            indices = tuple(range(len(texts)))
            return [ScoreRequest(1, 0, Prompt("p"), indices, texts, ("stop",) * len(texts), (1,) * len(texts))]
        while not told:
            await asyncio.sleep(0)
        raise EOFError  # the run has ended

    def reward(_prompt, text):
        if int(text) < len(RAISED):
            raise RAISED[int(text)]
        return b"1" if int(text) == len(RAISED) else 0.5

    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(judge_for(ask, reward), 30)
    assert ended.group_contains(EOFError)
    (answer,) = told
    *failed, scored = answer.scores
    assert all(score.error and len(score.error) < 300 for score in failed)
    assert (scored.reward, scored.error) == (0.5, "")


async def test_an_async_function_of_a_caller_scores_a_group_s_samples_at_once_and_0_past_the_time_limit():
    told, running = [], set()

    async def ask(judged):
        told.extend(judged.answers)
        if not judged.wants:
            return []
        if not judged.held:
            return [ScoreRequest(1, 0, Prompt("p"), (0, 1, 2), ("a", "b", "c"), ("stop",) * 3, (1,) * 3, timeout_s=0.5)]
        while not told:
            await asyncio.sleep(0)
        raise EOFError  # the run has ended

    async def reward(_prompt, text):
        running.add(text)
        while len(running) < 3:
            await asyncio.sleep(0)
        if text == "c":
            await asyncio.sleep(60)
        if text == "b":
            raise TimeoutError("its own")
        return 0.5

    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(judge_for(ask, reward), 30)
    right, failed, late = told[0].scores
    assert (right.reward, right.error, right.over_limit) == (0.5, "", "")
    assert ("its own" in failed.error, failed.over_limit) == (True, "")
    assert (late.error, late.over_limit) == ("the caller's reward ran past reward.timeout_s (0.5 s)", "")


# -- answer_match ----------------------------------------------------------------------------------------------------------------


EXTRACT = {"extract": r"<answer>(.*?)</answer>"}
NUMERIC = {"mode": "numeric"}
REGEX = {"mode": "regex"}


def matched(text, reference, **options):
    return build_reward(kinds.AnswerMatchReward(**options))(RewardInput(Prompt("p", answer=reference), text, "stop", 4))


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
    assert matched(text, reference, **options) == is_right


@pytest.mark.parametrize(("reference", "said"), [("", "'p' has no reference answer"), ("(", "not a regular expression")])
def test_a_reference_that_cannot_be_used_is_an_error_and_not_a_reward(reference, said):
    with pytest.raises((RewardError, ConfigError), match=said):
        matched("x", reference, mode="regex")


@pytest.mark.parametrize(("extract", "said"), [("(", "not a regular expression"), ("answer: .*", "has no group")])
def test_patterns_are_checked_when_built(extract, said):
    with pytest.raises(ConfigError, match=said):
        build_reward(kinds.AnswerMatchReward(extract=extract))


def test_the_answer_of_gsm8k_ends_with_its_line():
    config = tomllib.loads((Path(__file__).parents[3] / "configs/gsm8k.toml").read_text(encoding="utf-8"))
    (options,) = config["reward"]["functions"]
    assert options.pop("kind") == "answer_match"
    assert matched("So 9 and 9.\n#### 18\n\nIt is done.", "18", **options) == 1.0
    assert matched("So 9 and 9.\n#### 17\n\n18", "18", **options) == 0.0


# -- code_exec -------------------------------------------------------------------------------------------------------------------


def test_three_forms_of_tests_and_no_other():
    forms = ["assert f() == 1", {"stdin": "", "stdout": "1"}, {"function": "S().f", "expected": 1}]
    tests = parse_tests(json.dumps({"tests": forms}), "p")
    assert tests[0] == CodeTest(code="assert f() == 1")
    for wrong in ([], [{}], [{"stdin": "1"}], [{"code": "x", "stdout": "y"}], [{"function": "a.b.c"}], [{"unknown": 1}]):
        with pytest.raises(RewardError, match="'p'"):
            parse_tests(json.dumps({"tests": wrong}), "p")
    with pytest.raises(RewardError, match="'p'"):
        parse_tests("", "p")


def run(code, tests, **options):
    reward = build_reward(kinds.CodeExecReward(sandbox="none", **options))
    return reward(RewardInput(Prompt("p", reference_json=json.dumps({"tests": tests})), code, "stop", 1))


def test_share_of_tests_passed_or_all_or_nothing_without_a_sandbox_where_the_config_says_so():
    tests = [{"function": "f", "args": [2], "expected": 4}, {"function": "f", "args": [3], "expected": 9}]
    code = "```python\ndef f(x):\n    return 2 * x\n```"
    assert run(code, tests) == 0.5
    assert run(code, tests, all_or_nothing=True) == 0.0


SAME = [
    ("(1, 2)", [1, 2]), ("{'a': (1,)}", {"a": [1]}), ("{1: 'x'}", {"1": "x"}), ("0.1 + 0.2", 0.3), ("-1e-10", 0.0),
    ("None", None), ("1e-12 * (1 + 1e-10)", 1e-12), ("2**100", 2**100), ("range(3)", [0, 1, 2]),
    ("fractions.Fraction(1, 2)", 0.5), ("True", True), ("collections.Counter('aa')", {"a": 2}), ("collections.deque([1])", [1]),
    ("map(str, [1])", ["1"]), ("decimal.Decimal('-1.5e3')", -1500.0), ("fractions.Fraction(4, 2)", 2.0), ("3", 3.0),
    ("(n for n in (1, 2))", [1, 2]), ("{'a': 1}.keys()", ["a"]), ("{'a': 1}.items()", [["a", 1]]),
    ("{2**60: 1, -2**60: 2}", {str(2**60): 1, str(-(2**60)): 2}),
]  # fmt: skip
OTHER = [
    ("1", True), ("[1, 2]", [2, 1]), ("[1]", [1, 2]), ("{1, 2}", [1, 1]), ("object()", None), ("None", 0), ("2**100 + 1", 2**100),
    ("{'a': 1}", {}), ("1/0", 0), ("{1, 2}", [1, 2]), ("itertools.count()", [0]), ("range(10**9)", [0]),
    ("decimal.Decimal('1e999999999')", 1), ("decimal.Decimal('nan')", 0), ("fractions.Fraction(10**999, 3)", 1),
    ("{1: 0, 2: 0}", [1, 2]), ("5000000001.0", 5000000000), ("5.0", 5), ("True", 1), ("'5'", 5), ("5", "5"), ("[1, 2.5]", [1, 2]),
    ("{'a': 1.0}", {"a": 1}), ("b'5'", "5"), ("(1,)", 1), ("frozenset([1])", [1]), ("float('inf')", 1e308), ("0", 1e-12),
    ("{2**60 + 1: 1}", {str(2**60): 1}), ("0.0", [-5e-324]), ("2e-12", 1e-12), ("1e-8", 0.0), ("float('nan')", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("cases", "share"), [(SAME, 1.0), (OTHER, 0.0)])
def test_values_are_compared_as_json_and_strictly(cases, share):
    code = "import collections, fractions, decimal, itertools\ndef f(name):\n    return eval(name)"
    assert run(code, [{"function": "f", "args": [name], "expected": expected} for name, expected in cases]) == share


def test_model_code_is_refused_where_bubblewrap_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    status = probe_sandbox()
    assert not status.works
    assert "apt-get install bubblewrap" in status.reason
    with pytest.raises(RewardError, match=r'not run without a sandbox.*bubblewrap is not installed.*sandbox = "none"'):
        build_reward(kinds.CodeExecReward())
    assert run("def f(): return 1", ["assert f() == 1"]) == 1.0


@pytest.mark.parametrize(("mode", "answers", "said"), [
    ("exact", ["1", " "], r"1 prompts have no reference answer \(p1\)"), ("exact", ["1", "x"], ""),
    ("regex", ["4[0-9]", "(?=x)x"], "the reference of prompt 'p1'"), ("regex", ["4[0-9]", "a|b"], ""),
    ("numeric", ["so 2\n#### 2", "so"], r"no reference is a number.*answer_regex"), ("numeric", ["2 apples", "so"], ""),
])  # fmt: skip
def test_references_that_cannot_be_matched_are_refused_at_the_start(mode, answers, said):
    config = kinds.RewardConfig(functions=(kinds.AnswerMatchReward(mode=mode),))
    prompts = [Prompt(f"p{number}", text="q", answer=answer) for number, answer in enumerate(answers)]
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        check_prompts(config, prompts)
