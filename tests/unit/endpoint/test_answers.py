"""What becomes of answers, over a session that only counts."""

import asyncio
from types import SimpleNamespace

import pytest

from asyncrl.endpoint.answers import Answers
from asyncrl.errors import ConfigError, LearnerError, RunError
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample
from tests.builders import make_sample, until


class Session:
    """Two groups a step; a group is too old where its number says so."""

    def __init__(self):
        self.config = SimpleNamespace(num_steps=3, algorithm=SimpleNamespace(groups_per_step=2))
        self.version, self.oldest, self.without_place, self.released = 0, 0, 0, []
        self.phase, self.reason = "running", ""
        self.run = self

    async def status(self):
        return self

    def is_too_old(self, group):
        return group.group_id < self.oldest

    async def release(self, groups):
        self.released += [group.group_id for group in groups]
        self.without_place -= len(groups)


@pytest.fixture
def session():
    return Session()


@pytest.fixture
def answers(session):
    made = Answers(session, unrewarded_s=0.0)
    for number in range(6):
        members = tuple(ScoredSample(make_sample(number, index), 0.0) for index in range(2))
        made.hold(f"a{number}", ScoredGroup(number, Prompt("p"), members))
    return made


async def test_only_what_was_sent_whole_and_rewarded_is_given_to_a_step(answers, session):
    for number in (0, 1, 3, 4):
        answers.reward(f"a{number}", [1.0, 0.0])
    for number in (1, 2, 3):
        answers.sent(f"a{number}")
    answers.drop("a4")
    batches = answers.batches()
    assert [group.group_id for group in await anext(batches)] == [1, 3]
    for name, why in {"a1": "was given to a step", "a4": "was not read", "a9": "there is no answer a9"}.items():
        with pytest.raises(RunError, match=why):
            answers.reward(name, [1.0])
    session.oldest, session.version = 3, 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(batches)
    assert session.released == [1, 3, 2]  # what no step has taken, and what is too old
    with pytest.raises(RunError, match="too old"):
        answers.reward("a2", [1.0])
    session.phase, session.reason = "stopped", "asked to"
    with pytest.raises(RunError, match=r"the run is over \(asked to\)"):
        await anext(answers.batches())
    session.version = 3
    assert [batch async for batch in answers.batches()] == []


async def test_as_many_unrewarded_answers_as_there_are_groups_without_a_place_give_theirs(answers, session):
    for number in (0, 1, 2, 3):
        answers.sent(f"a{number}")
    answers.reward("a0", [1.0, 0.0])
    session.without_place = 2
    async with asyncio.TaskGroup() as group:
        forgetting = group.create_task(answers.forget())
        await until(lambda: session.released)
        forgetting.cancel()
    assert session.released == [1, 2]
    with pytest.raises(RunError, match="others needed its place"):
        answers.reward("a1", [1.0, 0.0])
    answers.reward("a0", [0.0, 1.0])


@pytest.mark.parametrize("rewards", [[1e300, 0.0], [float("nan"), 0.0], [1.0]])
def test_rewards_that_cannot_be_trained_are_refused(answers, rewards):
    with pytest.raises(LearnerError):
        answers.reward("a0", rewards)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), "x"])
def test_a_time_that_is_none_is_refused(session, seconds):
    with pytest.raises(ConfigError, match="unrewarded_s"):
        Answers(session, seconds)
