"""The controller's data path over in-process channels: real admission, real buffer, a ledger in memory."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path

import msgspec
import pytest

from asyncrl.buffer import events as ev
from asyncrl.buffer.open import open_buffer
from asyncrl.buffer.payloads import TakenStep
from asyncrl.config.load import parse_config
from asyncrl.control.batch_feeder import BatchFeeder
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.evaluation import Evaluation
from asyncrl.control.peers import Peers
from asyncrl.errors import RunError
from asyncrl.schema.batches import StepBatch, StepDone
from asyncrl.schema.control import AbortGroup
from asyncrl.schema.samples import (
    GroupWork,
    InferRequest,
    InferResult,
    Prompt,
    SampleFailure,
    Score,
    ScoreRequest,
    Scores,
    ids_to_bytes,
    logprobs_to_bytes,
)
from asyncrl.tasks.sampler import PromptSequence
from asyncrl.transport.protocol import Lane
from tests.builders import answer_to, hello, score_of
from tests.in_process import InProcessListener
from tests.virtual_clock import VirtualClock

B, G, ETA, NUM_STEPS = 2, 2, 1, 4


def _score(request: ScoreRequest, reward: float = 1.0, parts: dict[str, float] | None = None) -> Scores:
    scores = tuple(Score(index, reward, parts or {}) for index in request.indices)
    return Scores(request.group_id, request.attempt, scores, "reward-0", purpose=request.purpose)


class Bench:
    """A flow with one generator and one reward worker at the other ends."""

    def __init__(self, algorithm=None, policy="wait", **settings) -> None:
        self.config = parse_config({
            "num_steps": NUM_STEPS,
            "algorithm": {"groups_per_step": B, "group_size": G, **(algorithm or {})},
            "buffer": {"max_staleness": ETA, "policy": policy, "ledger": "memory"},
            "eval": {"num_prompts": 3},
            **settings,
        })
        self.clock = VirtualClock()
        self.peers = Peers()
        self.buffer = open_buffer(self.config, Path())
        prompts = PromptSequence([Prompt(f"p{i}", text=f"{i}=", answer="46") for i in range(50)], seed=0)
        self.dispatcher = Dispatcher(self.config, self.buffer, prompts, self.peers, self.clock)
        self.dispatcher.changed = self.pump
        self.listener = InProcessListener(hello("controller", "controller"))

    def pump(self) -> None:
        """Do what the controller's loops do."""
        self.dispatcher.issue()
        self.dispatcher.scores.dispatch(self.peers)

    async def join(self, kind, name):
        far = await self.listener.connect(hello(kind, name))
        peer = self.peers.add(await self.listener.accept())
        return far, peer

    async def with_generator(self, version: int = 0, slots: int = 64):
        far, peer = await self.join("generator", "generator-0")
        peer.num_slots, peer.live_version = slots, version
        self.dispatcher.tell(ev.GeneratorReady("generator-0", slots, version))
        return far

    async def full_steps(self, slots: int = 64):
        """Have as many groups generated and scored as may be; return the generator's end."""
        far = await self.with_generator(slots=slots)
        for work in await _works(far, (ETA + 1) * B):
            for index in work.indices:
                self.dispatcher.take_samples([answer_to(work, index)], "generator-0")
        self.score_everything()
        return far

    def score_everything(self) -> None:
        """Answer every reward request that is waiting, as if a worker had."""
        for asked in self.buffer.state.unscored():
            for index in asked.indices:
                self.dispatcher.take_answers([score_of(asked.group_id, index)])

    def answer(self, work, rewards, version=0):
        """Answer a group at once, samples and rewards."""
        for index, reward in zip(work.indices, rewards, strict=True):
            self.dispatcher.take_samples([answer_to(work, index, versions=version)], "generator-0")
            self.dispatcher.take_answers([score_of(work.group_id, index, reward)])


async def _feed(feeder: BatchFeeder) -> None:
    while True:
        await feeder.woken.wait()
        feeder.woken.clear()
        await feeder.send_possible()


async def _works(far, count: int) -> list[GroupWork]:
    works = []
    async with asyncio.timeout(30):
        while len(works) < count:
            works.append((await far.receive()).message)
    return works


async def test_what_is_said_again_frees_no_slot_and_counts_for_nothing():
    bench = Bench()
    work, other, *_ = await _works(await bench.with_generator(), 4)
    sample, held = answer_to(work, 0), bench.buffer.state.pool.members_on
    assert bench.dispatcher.take_samples([sample], "generator-0") == [sample]
    failure = SampleFailure(other.group_id, 0, other.attempt, "generate", "no room")
    assert bench.dispatcher.take_failure(failure, "generator-0") is True
    before = held("generator-0"), bench.dispatcher.generated_tokens
    for _ in range(3):
        assert bench.dispatcher.take_samples([sample, sample], "generator-0") == []
        assert bench.dispatcher.take_failure(failure, "generator-0") is False
    assert (held("generator-0"), bench.dispatcher.generated_tokens) == before == (4 * G - 2, 2)


async def test_a_dead_generators_groups_go_to_another():
    bench = Bench()
    far = await bench.with_generator()
    works = await _works(far, 4)
    bench.dispatcher.take_samples([answer_to(works[0], 0)], "generator-0")
    other, peer = await bench.join("generator", "generator-1")
    peer.num_slots, peer.live_version = 64, 0
    bench.dispatcher.generator_dead("generator-0")
    bench.dispatcher.tell(ev.GeneratorReady("generator-1", 64, 0))
    bench.pump()
    again = await _works(other, 4)
    assert {work.group_id: work.indices for work in again} == {0: (1,), 1: (0, 1), 2: (0, 1), 3: (0, 1)}
    assert all(work.attempt > 0 for work in again)


async def test_a_full_step_goes_to_the_learner_and_a_restarted_learner_gets_the_very_same():
    bench = Bench()
    await bench.full_steps()
    feed = BatchFeeder(bench.config, bench.dispatcher, bench.clock)
    bench.dispatcher.changed = feed.woken.set
    learner, peer = await bench.join("learner", "learner")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_feed(feed))
        feed.hold(False)
        feed.learner_ready(peer.connection, 0)
        first = (await asyncio.wait_for(learner.receive(), 30)).message
        assert isinstance(first, StepBatch)
        assert first.step == 0
        assert sorted({sample.group_id for sample in first.samples}) == [0, 1]
        feed.learner_dead()
        replacement, peer = await bench.join("learner", "learner")
        feed.learner_ready(peer.connection, 0)
        again = (await asyncio.wait_for(replacement.receive(), 30)).message
        assert again.rows == first.rows
        assert feed.step_done(StepDone(0, 1, {}, 0.0, 1.0))
        assert not feed.step_done(StepDone(0, 1, {}, 0.0, 1.0))
        running.cancel()
    assert bench.buffer.counts().trained == B
    bench.buffer.check()


async def test_a_generator_is_told_to_stop_at_a_group_that_is_stale_before_it_is_finished():
    bench = Bench(policy="drop")
    far = await bench.with_generator()
    slow, *quick = await _works(far, (ETA + 1) * B)
    bench.dispatcher.take_samples([answer_to(slow, 0)], "generator-0")
    for step in range(ETA + 1):
        bench.buffer.version_published(step)
        bench.dispatcher.tell(ev.VersionIsLive("generator-0", step))
        quick += await _works(far, B * (step > 0))
        for work in quick[B * step : B * (step + 1)]:
            for index in work.indices:
                bench.dispatcher.take_samples([answer_to(work, index, versions=step)], "generator-0")
        bench.score_everything()
        taken = bench.buffer.take(step, bench.clock.now())
        bench.dispatcher.follow(taken.instructions)
    assert bench.buffer.counts().dropped == {"stale": 1}
    order = (await asyncio.wait_for(far.receive(Lane.CONTROL), 30)).message
    assert order == AbortGroup(slow.group_id)
    members = bench.buffer.state.pool.members_on("generator-0")
    failure = SampleFailure(slow.group_id, 1, slow.attempt, "generate", "aborted after 7 tokens")
    assert bench.dispatcher.take_failure(failure, "generator-0") is False
    assert bench.buffer.state.pool.members_on("generator-0") == members - 1


async def test_an_outside_learner_takes_a_step_at_a_time_and_again_after_a_restart():
    bench = Bench(learner={"kind": "external"})
    await bench.full_steps()
    feed, ending = BatchFeeder(bench.config, bench.dispatcher, bench.clock), asyncio.Event()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        takers = [group.create_task(feed.take_outside(ending)), group.create_task(_refused(feed.take_outside(ending)))]
        await asyncio.sleep(0)
        feed.hold(False)
    assert [len(each.members) for each in takers[0].result().groups] == [G, G]
    assert "report it with `trained`" in takers[1].result()
    assert BatchFeeder(bench.config, bench.dispatcher, bench.clock).version == 0  # it was taken and not trained
    feed.step_done(feed.outside_step(0, {}, 1.0))
    with pytest.raises(RunError, match="not in hand"):
        feed.outside_step(0, {}, 1.0)


async def _refused(work) -> str:
    with pytest.raises(RunError) as refusal:
        await work
    return str(refusal.value)


async def test_an_evaluation_survives_its_generator_and_never_enters_the_ledger():
    bench = Bench()
    bench.dispatcher.hold(groups=True, evaluation=False)
    far = await bench.with_generator()
    evaluation = Evaluation(bench.config, [Prompt(f"h{i}", text="1=", answer="46") for i in range(5)], 0, 0.0)
    bench.dispatcher.evaluation = evaluation
    bench.dispatcher.changed()
    works = await _works(far, 3)
    assert all(work.purpose == "eval" and work.group_id < 0 for work in works)
    other, peer = await bench.join("generator", "generator-1")
    peer.num_slots, peer.live_version = 64, 0
    bench.dispatcher.tell(ev.GeneratorReady("generator-1", 64, 0))
    bench.peers.remove(bench.peers.get("generator-0"))
    bench.dispatcher.generator_dead("generator-0")
    for work in await _works(other, 3):
        answer = answer_to(work, 0, "generator-1")
        assert evaluation.awaits(answer)
        assert evaluation.take_samples(answer.members()).indices == (0,)
        assert not evaluation.awaits(answer)
        reward = float(work.group_id == -1)
        evaluation.take_scores(work.group_id, [Score(0, reward, {"answer_match": reward})])
    assert evaluation.done
    assert evaluation.report(2.0).accuracy == pytest.approx(1 / 3)
    assert bench.buffer.counts().issued == 0


async def test_an_evaluation_sample_with_token_ids_beyond_the_vocabulary_counts_as_failed():
    bench = Bench()
    bench.buffer.know_vocabulary(100, 0.0)
    bench.dispatcher.hold(groups=True, evaluation=False)
    far = await bench.with_generator()
    reward, _ = await bench.join("reward", "reward-0")
    bench.dispatcher.evaluation = Evaluation(bench.config, [Prompt("a", answer="46"), Prompt("b", answer="46")], 0, 0.0)
    bench.dispatcher.changed()
    works = await _works(far, 2)
    bench.dispatcher.take_samples([answer_to(works[0], 0)], "generator-0")
    bench.dispatcher.take_samples(
        [msgspec.structs.replace(answer_to(works[1], 0), token_ids=ids_to_bytes([3, 500]))], "generator-0"
    )
    bench.dispatcher.take_answers([_score(await _next(reward), 1.0, {"answer_match": 1.0})])
    assert bench.dispatcher.evaluation.done
    assert bench.dispatcher.evaluation.report(1.0).accuracy == 0.5
    assert bench.dispatcher.refused_samples == 1


async def test_an_evaluation_s_reward_that_is_no_number_counts_as_a_failure():
    bench = Bench()
    bench.dispatcher.hold(groups=True, evaluation=False)
    far = await bench.with_generator()
    reward, _ = await bench.join("reward", "reward-0")
    bench.dispatcher.evaluation = evaluation = Evaluation(bench.config, [Prompt(name, answer="46") for name in "abc"], 0, 0.0)
    bench.dispatcher.changed()
    wrong = ((math.nan, {}), (1.0, {"answer_match": math.inf}), (1.0, {"answer_match": 1.0}))
    for work, changes in zip(await _works(far, 3), wrong, strict=True):
        bench.dispatcher.take_samples([answer_to(work, 0)], "generator-0")
        bench.dispatcher.take_answers([_score(await _next(reward), *changes)])
    assert evaluation.done
    report = evaluation.report(1.0)
    assert (report.num_samples, report.accuracy, report.reward_mean) == (3, pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert [kind.reason for kind in bench.dispatcher.failures.kinds.values()] == ["the reward of an evaluation is not finite"]


JUDGE = {"reward_models": [{"name": "judge", "path": "/judge", "weight": 2.0}]}
REFERENCE = {"kl": {}, "reference": {"where": "worker"}}


def _result(request: InferRequest, reward: float = 0.25) -> InferResult:
    logprobs = logprobs_to_bytes([-0.3, -0.4]) if request.purpose == "train" else b""
    return InferResult(
        request.group_id, request.index, request.attempt, logprobs, {"judge": reward}, "", "inference-0", purpose=request.purpose
    )


async def _next(far):
    return (await asyncio.wait_for(far.receive(), 30)).message


async def test_rules_and_models_are_asked_at_once_and_the_score_is_complete_when_both_answered():
    bench = Bench(REFERENCE, inference=JUDGE)
    far = await bench.with_generator()
    reward, _ = await bench.join("reward", "reward-0")
    inference, _ = await bench.join("inference", "inference-0")
    works = await _works(far, 4)
    for num_ready, work in enumerate(works[:B]):
        for index in work.indices:
            sample = answer_to(work, index)
            bench.dispatcher.take_samples([sample], "generator-0")
            score_request, infer_request = await _next(reward), await _next(inference)
            assert (infer_request.prompt_ids, infer_request.token_ids) == (sample.prompt_ids, sample.token_ids)
            assert infer_request.temperature == bench.config.generate.sampling.temperature
            assert bench.dispatcher.take_answers([_score(score_request)]) == []
            assert bench.buffer.counts().ready == num_ready
            (scores,) = bench.dispatcher.take_answers([_result(infer_request)])
            assert [score.reward for score in scores.scores] == [1.5]
    taken = bench.buffer.take(0, 0.0)
    for group in taken.groups:
        for member in group.members:
            assert member.reward == 1.5
            assert member.parts == {"judge": 0.25}
            assert member.reference_logprobs == logprobs_to_bytes([-0.3, -0.4])
    bench.buffer.check()


async def test_an_evaluation_sample_is_judged_by_reward_models_and_not_by_the_reference():
    for settings, asks_models in (({"inference": JUDGE}, True), ({}, False)):
        bench = Bench(REFERENCE, **settings)
        bench.dispatcher.hold(groups=True, evaluation=False)
        far = await bench.with_generator()
        inference, _ = await bench.join("inference", "inference-0")
        reward, _ = await bench.join("reward", "reward-0")
        bench.dispatcher.evaluation = Evaluation(bench.config, [Prompt("h", text="1=", answer="46")], 0, 0.0)
        bench.dispatcher.changed()
        (work,) = await _works(far, 1)
        bench.dispatcher.take_samples([answer_to(work, 0)], "generator-0")
        bench.dispatcher.take_answers([_score(await _next(reward))])
        assert bench.dispatcher.evaluation.done != asks_models
        if asks_models:
            request = await _next(inference)
            assert request.purpose == "eval"
            bench.dispatcher.take_answers([_result(request)])
        assert bench.dispatcher.evaluation.report(1.0).reward_mean == (1.5 if asks_models else 1.0)


# -- groups that teach nothing


async def test_when_nothing_has_spread_the_run_still_comes_to_its_end_and_says_why_once(caplog):
    bench = Bench({"dynamic_sampling": True, "max_resamples": 3})
    far = await bench.with_generator()
    with caplog.at_level(logging.WARNING):
        for step in range(NUM_STEPS):
            while not isinstance(bench.buffer.take(step, 0.0), TakenStep):
                bench.answer((await _works(far, 1))[0], [1.0, 1.0], version=step)
            bench.buffer.mark_trained(step, 0.0)
            bench.buffer.version_published(step + 1)
            bench.dispatcher.tell(ev.VersionIsLive("generator-0", step + 1))
    assert bench.buffer.counts().dropped == {"no spread": 3 * B}
    assert bench.buffer.counts().trained == NUM_STEPS * B
    (message,) = [record.getMessage() for record in caplog.records]
    assert "6 groups in a row taught nothing (no spread)" in message
    assert "algorithm.max_resamples" in message


async def test_a_run_without_pairs_goes_on_sampling_and_says_so_at_every_multiple_until_one_comes(caplog):
    bench = Bench({"kind": "dpo", "max_resamples": 3})
    far = await bench.with_generator()
    with caplog.at_level(logging.WARNING):
        for _ in range(6 * B):
            bench.answer((await _works(far, 1))[0], [1.0, 1.0])
    assert bench.buffer.counts().dropped == {"no pair": 6 * B}
    assert [record.args[0].partition(":")[2] for record in caplog.records] == [
        " 6 in a row had none and were dropped",
        " 12 in a row had none and were dropped",
    ]
    for knob in ("algorithm.preference", "algorithm.group_size", "generate.sampling.temperature", "stall_timeout_s"):
        assert knob in caplog.records[0].getMessage()
    assert bench.dispatcher.fruitless == "a group with a preference pair: 12 in a row had none and were dropped"
    bench.answer((await _works(far, 1))[0], [0.0, 1.0])
    assert (bench.dispatcher.fruitless, bench.buffer.counts().ready) == ("", 1)
