"""Generators that join a live run: one leaves in good order, one is killed, and the books balance."""

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from tests.integration.conftest import ASYNCRL, NO_EVALUATION, NO_MODEL, NO_MODELS, assert_balanced, reached, samples_by


async def test_a_generator_that_leaves_and_one_that_is_killed_give_their_groups_back_and_the_run_goes_on(tiny, beside):
    config = tiny(
        num_steps=20_000, checkpoint__every_steps=0, **NO_EVALUATION,
        **NO_MODELS | {"generate__engine": NO_MODEL | {"token_latency_s": 0.05}},
        placement={"most_joining_generators": 2}, supervision__heartbeat_s=0.5, supervision__heartbeat_timeout_s=20.0,
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        await reached(run, 1)
        leaving, killed = (beside(*ASYNCRL, "join", run.run_folder) for _ in range(2))
        async for _ in run.steps():
            status = await run.status()
            names = {process.name for process in status.processes if process.joined and process.state == "ready"}
            if len(names) == 2 and all(samples_by(run.run_folder, name) >= 32 for name in names):
                break
        leaving.terminate()
        killed.kill()
        async for _ in run.steps(first=status.version):
            status = await run.status()
            if (status.guests["left"], status.guests["lost"]) == (1, 1):
                break
        await reached(run, status.version + 5)
        drained = await run.drain()
    assert leaving.wait(90) == 0
    assert drained.phase == "stopped", drained.reason
    assert drained.guests == {"here": 0, "most": 2, "came": 2, "left": 1, "lost": 1}
    assert {process.name: process.deaths for process in drained.processes} == {"learner": 0, "reward-0": 0, "generator-0": 0}
    assert_balanced(drained)
    ledger = LedgerReader(run.run_folder)
    generated_by = {sample.generator for number in range(drained.groups["trained"]) for sample in ledger.group(number).samples}
    assert generated_by == {"generator-0", *names}
