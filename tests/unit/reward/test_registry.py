import asyncio
import time

import pytest

from asyncrl.config.reward import CodeExecReward, FormatCheckReward, OverlongPenalty, PreferenceReward, PythonReward, RewardConfig
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import NamedReward, TimeLimit, batch_values, build_reward, build_rewards, judge_for, score_sample
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
    rewards = build_rewards(RewardConfig(functions=(PythonReward(path="rewards_of_columns:score_batch"),)))
    items = [RewardInput(Prompt("p", reference_json=f'{{"city": "{city}"}}'), "Rome", "stop", 1) for city in ("Rome", "Oslo")]
    assert [total for total, _ in score(rewards, *items)] == [1.0, 0.0]


def test_program_time_must_fit_into_the_sample_time():
    config = RewardConfig(functions=(CodeExecReward(sandbox="none", wall_s=30.0),), timeout_s=30.0)
    with pytest.raises(ConfigError, match=r"wall_s \(30\) must be under timeout_s \(30\)"):
        build_rewards(config)


def test_a_format_matches_over_lines_an_overlong_answer_costs_up_to_one_and_a_preference_has_two_answers():
    check = build_reward(FormatCheckReward(pattern=r"<a>.*</a>"))
    texts = ("<a>x\ny</a>", "<a>x</a> ", "x<a></a>", "")
    assert [check(RewardInput(Prompt("p"), text, "stop", 1)) for text in texts] == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="not a regular expression"):
        build_reward(FormatCheckReward(pattern="("))
    penalty = build_reward(OverlongPenalty(max_tokens=100, buffer_tokens=20))
    assert [penalty(RewardInput(Prompt("p"), "", "stop", n)) for n in (0, 80, 90, 100, 150)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(RewardError, match="member 2"):
        build_reward(PreferenceReward())(RewardInput(Prompt("p"), "", "stop", 1, 2))


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
    assert all(score.error and len(score.error) < 2000 for score in failed)
    assert (scored.reward, scored.error) == (0.5, "")
