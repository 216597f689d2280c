"""The controller's data path over in-process channels: real admission, real buffer, a ledger in memory."""

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer import events as ev
from asyncrl.buffer.open import open_buffer
from asyncrl.config.live import changed
from asyncrl.config.load import parse_config
from asyncrl.control.batch_feeder import BatchFeeder
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.evaluation import Evaluation
from asyncrl.control.peers import Peers
from asyncrl.errors import ConfigError
from asyncrl.schema.control import AbortGroup
from asyncrl.schema.samples import Prompt, SampleFailure, ids_to_bytes
from asyncrl.tasks.task import PromptSequence
from asyncrl.transport.protocol import Lane
from tests.builders import answer_to, hello, score_of
from tests.in_process import InProcessListener
from tests.virtual_clock import VirtualClock

B = G = 2


class Bench:
    """A flow with one generator and one reward worker at the other ends."""

    def __init__(self, algorithm=None, **settings) -> None:
        self.config = parse_config({
            "num_steps": 4,
            "algorithm": {"groups_per_step": B, "group_size": G, **(algorithm or {})},
            "buffer": {"max_staleness": 1, "ledger": "memory"},
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

    async def with_generator(self, name: str = "generator-0"):
        far, peer = await self.join("generator", name)
        peer.num_slots, peer.live_version = 64, 0
        self.dispatcher.tell(ev.GeneratorReady(name, 64, 0))
        return far

    def answer(self, work, rewards):
        """Answer a group at once, samples and rewards."""
        for index, reward in zip(work.indices, rewards, strict=True):
            self.dispatcher.take_samples([answer_to(work, index)], "generator-0")
            self.dispatcher.take_answers([score_of(work.group_id, index, reward)])


async def _received(far, count: int) -> list[Any]:
    messages: list[Any] = []
    async with asyncio.timeout(30):
        while len(messages) < count:
            messages.append((await far.receive()).message)
    return messages


async def test_what_is_said_again_frees_no_slot_and_counts_for_nothing():
    bench = Bench()
    work, other, *_ = await _received(await bench.with_generator(), 4)
    sample, held = answer_to(work, 0), bench.buffer.state.pool.members_on
    assert bench.dispatcher.take_samples([sample], "generator-0") == [sample]
    failure = SampleFailure(other.group_id, 0, other.attempt, "generate", "no room")
    bench.dispatcher.take_failure(failure, "generator-0")
    before = held("generator-0"), bench.dispatcher.generated_tokens
    for _ in range(3):
        assert bench.dispatcher.take_samples([sample, sample], "generator-0") == []
        bench.dispatcher.take_failure(failure, "generator-0")
    assert (held("generator-0"), bench.dispatcher.generated_tokens) == before == (4 * G - 2, 2)


async def test_a_generator_is_told_to_stop_at_a_group_that_is_over_and_its_members_free_their_slots():
    bench = Bench()
    far = await bench.with_generator()
    (work,) = await _received(far, 1)
    bench.dispatcher.release([work.group_id])
    assert (await asyncio.wait_for(far.receive(Lane.CONTROL), 30)).message == AbortGroup(work.group_id)
    members = bench.buffer.state.pool.members_on("generator-0")
    failure = SampleFailure(work.group_id, 1, work.attempt, "generate", "aborted after 7 tokens")
    bench.dispatcher.take_failure(failure, "generator-0")
    assert bench.buffer.state.pool.members_on("generator-0") == members - 1


async def test_an_evaluation_survives_its_generator_counts_what_cannot_be_used_as_wrong_and_enters_no_ledger():
    bench = Bench()
    bench.buffer.know_vocabulary(100, 0.0)
    bench.dispatcher.hold(groups=True, evaluation=False)
    bench.dispatcher.evaluation = evaluation = Evaluation(bench.config, [Prompt(name, answer="46") for name in "abcde"], 0, 0.0)
    reward, _ = await bench.join("reward", "reward-0")
    await _received(await bench.with_generator(), 5)
    bench.peers.remove(bench.peers.get("generator-0"))
    bench.dispatcher.generator_dead("generator-0")
    beyond, too_long, *works = await _received(await bench.with_generator("generator-1"), 5)
    assert (beyond.purpose, beyond.group_id < 0) == ("eval", True)
    bench.dispatcher.take_samples([answer_to(beyond, token_ids=ids_to_bytes([3, 500]))], "generator-1")
    failure = SampleFailure(too_long.group_id, 0, too_long.attempt, "generate", "its prompt has no room", "eval")
    bench.dispatcher.take_failure(failure, "generator-1")
    verdicts = ((math.nan, {}), (1.0, {"answer_match": math.inf}), (1.0, {"answer_match": 1.0}))
    for work, verdict in zip(works, verdicts, strict=True):
        bench.dispatcher.take_samples([answer_to(work)], "generator-1")
        (asked,) = await _received(reward, 1)
        about = {"attempt": asked.attempt, "purpose": asked.purpose, "worker": "reward-0"}
        bench.dispatcher.take_answers([score_of(asked.group_id, *asked.indices, *verdict, **about)])
    assert evaluation.done
    assert (evaluation.report(1.0).num_samples, evaluation.report(1.0).accuracy) == (5, 0.2)
    assert bench.dispatcher.refused_samples == 1
    said = [kind.reason for kind in bench.dispatcher.failures.kinds.values()]
    assert said == ["its prompt has no room", "the reward of an evaluation is not finite"]
    assert bench.dispatcher.failures.share == 0.0
    assert bench.buffer.counts().issued == 0


async def test_the_reference_is_asked_at_the_temperature_that_the_sample_was_drawn_at():
    bench = Bench({"kl": {}, "reference": {"where": "worker"}}, generate={"sampling": {"temperature": 0.7}})
    (work,) = await _received(await bench.with_generator(), 1)
    inference, _ = await bench.join("inference", "inference-0")
    bench.dispatcher.take_samples([sample := answer_to(work)], "generator-0")
    (asked,) = await _received(inference, 1)
    assert (asked.prompt_ids, asked.token_ids, asked.temperature) == (sample.prompt_ids, sample.token_ids, 0.7)
    with pytest.raises(ConfigError, match=r"^generate\.sampling\.temperature cannot change with .* = 'worker'"):
        changed(bench.config, {"generate.sampling.temperature": 1.0})


async def test_only_a_prompt_that_failed_four_times_in_a_row_is_set_aside():
    bench = Bench({"dynamic_sampling": True})
    works, failures = await _received(await bench.with_generator(), 2), bench.dispatcher.failures
    for work, rewards in zip(works, ([0.0, 1.0], [1.0, 1.0]), strict=True):
        prompt_id = work.prompt.prompt_id
        assert not any(failures.group_failed(prompt_id, "no") for _ in range(3))
        bench.answer(work, rewards)
        assert [failures.group_failed(prompt_id, "no") for _ in range(4)] == [False, False, False, True]
    assert (bench.buffer.counts().ready, bench.buffer.counts().dropped) == (1, {"no spread": 1})


async def test_a_group_of_remax_has_one_member_more_which_is_greedy():
    (work,) = await _received(await Bench({"advantage": "remax", "group_size": 3}).with_generator(), 1)
    assert (work.indices, work.greedy_index) == ((0, 1, 2, 3), 3)


@pytest.mark.parametrize(("group_ids", "waited_s"), [((), 5.0), ((2, 3), 8.0)])
async def test_an_outside_learner_waits_in_its_call_and_one_that_names_its_groups_since_its_step_before(group_ids, waited_s):
    bench, ending = Bench(learner={"kind": "external"}), asyncio.Event()
    for work in await _received(await bench.with_generator(), 2 * B):
        bench.answer(work, [0.0, 1.0])
    feeder = BatchFeeder(bench.config, bench.dispatcher, bench.clock)
    feeder.hold(False)
    assert (await feeder.take_outside(ending)).step == 0
    bench.clock.advance(2.0)
    first = feeder.outside_step(0, {}, bench.clock.now())
    feeder.step_done(first)
    feeder.hold(True)
    bench.clock.advance(3.0)
    taking = asyncio.get_running_loop().create_task(feeder.take_outside(ending, group_ids))
    await asyncio.sleep(0)
    bench.clock.advance(5.0)
    feeder.hold(False)
    assert (await asyncio.wait_for(taking, 30)).step == 1
    assert (first.waited_s, feeder.outside_step(1, {}, bench.clock.now()).waited_s) == (0.0, waited_s)


# -- groups that teach nothing


async def test_when_nothing_has_spread_groups_are_trained_all_the_same_and_the_run_says_why_once(caplog):
    bench = Bench({"dynamic_sampling": True, "max_resamples": 3})
    far = await bench.with_generator()
    with caplog.at_level(logging.WARNING):
        for _ in range(4 * B):
            bench.answer((await _received(far, 1))[0], [1.0, 1.0])
    assert (bench.buffer.counts().dropped, bench.buffer.counts().ready) == ({"no spread": 3 * B}, B)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "6 groups in a row taught nothing (no spread)" in message


async def test_a_run_without_pairs_goes_on_sampling_and_says_so_at_every_multiple_until_one_comes(caplog):
    bench = Bench({"kind": "dpo", "max_resamples": 3})
    far = await bench.with_generator()
    with caplog.at_level(logging.WARNING):
        for _ in range(6 * B):
            bench.answer((await _received(far, 1))[0], [1.0, 1.0])
    assert bench.buffer.counts().dropped == {"no pair": 6 * B}
    said = [record.args[0].partition(":")[2] for record in caplog.records]
    assert said == [f" {num} in a row had none and were dropped" for num in (6, 12)]
    assert bench.dispatcher.fruitless == "a group with a preference pair: 12 in a row had none and were dropped"
    bench.answer((await _received(far, 1))[0], [0.0, 1.0])
    assert (bench.dispatcher.fruitless, bench.buffer.counts().ready) == ("", 1)
