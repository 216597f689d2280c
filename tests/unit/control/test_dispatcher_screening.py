"""What a run does about groups that teach nothing: real admission, real buffer, the controller's data path, no processes."""

from __future__ import annotations

import logging

import pytest

from asyncrl.buffer import events as ev
from asyncrl.buffer.open import open_buffer
from asyncrl.buffer.payloads import TakenStep
from asyncrl.clock import VirtualClock
from asyncrl.config.load import parse_config
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.peers import Peers
from asyncrl.schema.control import PROTOCOL, Hello
from asyncrl.schema.samples import Prompt, Sample, Score, ids_to_bytes, logprobs_to_bytes
from asyncrl.tasks.sampler import PromptSequence
from asyncrl.transport.local import InProcessListener

B, G, NUM_STEPS = 2, 2, 4


class Run:
    """A flow with one generator that answers at once; the test says what each answer is worth."""

    def __init__(self, folder, **algorithm):
        self.config = parse_config({
            "num_steps": NUM_STEPS,
            "algorithm": {"groups_per_step": B, "group_size": G, **algorithm},
            "buffer": {"max_staleness": 1, "ledger": "memory"},
        })
        self.buffer = open_buffer(self.config, folder)
        prompts = PromptSequence([Prompt(f"p{i}") for i in range(50)], seed=0)
        self.peers = Peers()
        self.dispatcher = Dispatcher(self.config, self.buffer, prompts, self.peers, VirtualClock())
        self.dispatcher.changed = self.pump
        self.prompts = []

    def pump(self):
        self.dispatcher.issue()
        self.dispatcher.scores.dispatch(self.peers)

    async def start(self):
        listener = InProcessListener(Hello(PROTOCOL, "controller", "controller", "1", 0))
        self.far = await listener.connect(Hello(PROTOCOL, "generator", "generator-0", "1", 0))
        peer = self.peers.add(await listener.accept())
        peer.num_slots = 64
        self.dispatcher.tell(ev.GeneratorReady("generator-0", 64, 0))

    async def next_work(self):
        delivery = await self.far.receive()
        delivery.ack()
        self.prompts.append(delivery.message.prompt.prompt_id)
        return delivery.message

    def answer(self, work, rewards, version=0):
        for index, reward in zip(work.indices, rewards, strict=True):
            arrays = ids_to_bytes([1]), ids_to_bytes([2]), logprobs_to_bytes([-0.1]), ids_to_bytes([version])
            sample = Sample(work.group_id, index, work.attempt, *arrays, "stop", "x", "generator-0", 0.0, 1.0)
            self.dispatcher.take_sample(sample, lambda: None)
            self.dispatcher.take_answer(Score(work.group_id, index, work.attempt, reward), lambda: None)


async def test_when_nothing_has_spread_the_run_still_comes_to_its_end_and_says_why_once(tmp_path, caplog):
    run = Run(tmp_path, dynamic_sampling=True, max_resamples=3)
    await run.start()
    with caplog.at_level(logging.WARNING):
        for step in range(NUM_STEPS):
            while not isinstance(run.buffer.take(step, 0.0), TakenStep):
                run.answer(await run.next_work(), [1.0, 1.0], version=step)
            run.buffer.mark_trained(step, 0.0)
            run.buffer.version_published(step + 1)
            run.dispatcher.tell(ev.VersionIsLive("generator-0", step + 1))
    assert run.buffer.counts().dropped == {"no spread": 3 * B}
    assert run.buffer.counts().trained == NUM_STEPS * B
    (message,) = [record.getMessage() for record in caplog.records]
    assert "6 groups in a row taught nothing (no spread)" in message
    assert "algorithm.max_resamples" in message


async def test_a_run_without_pairs_goes_on_sampling_and_says_so_at_every_multiple_until_one_comes(tmp_path, caplog):
    run = Run(tmp_path, kind="dpo", max_resamples=3)
    await run.start()
    with caplog.at_level(logging.WARNING):
        for _ in range(6 * B):
            run.answer(await run.next_work(), [1.0, 1.0])
    assert run.buffer.counts().dropped == {"no pair": 6 * B}
    assert [record.args[0].partition(":")[2] for record in caplog.records] == [
        " 6 in a row had none and were dropped",
        " 12 in a row had none and were dropped",
    ]
    for knob in ("algorithm.preference", "algorithm.group_size", "generate.sampling.temperature", "stall_timeout_s"):
        assert knob in caplog.records[0].getMessage()
    assert run.dispatcher.fruitless == "a group with a preference pair: 12 in a row had none and were dropped"
    run.answer(await run.next_work(), [0.0, 1.0])
    assert (run.dispatcher.fruitless, run.buffer.counts().ready) == ("", 1)


@pytest.mark.parametrize(("advantage", "greedy_index", "indices"), [("grpo", -1, (0, 1)), ("remax", 2, (0, 1, 2))])
async def test_work_names_the_member_that_is_drawn_greedily(tmp_path, advantage, greedy_index, indices):
    run = Run(tmp_path, advantage=advantage)
    await run.start()
    work = await run.next_work()
    assert (work.greedy_index, work.indices) == (greedy_index, indices)
