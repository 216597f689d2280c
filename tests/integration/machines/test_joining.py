"""Generators that join a live run: one leaves in good order, one is killed, and the books balance."""

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from tests.integration import conftest as kit


def at_work(run: asyncrl.Run, status: asyncrl.RunStatus) -> set[str]:
    """Return who has joined, is ready and has made some samples."""
    joined = {process.name for process in status.processes if process.joined and process.state == "ready"}
    return {name for name in joined if kit.samples_by(run.run_folder, name) >= 32}


async def test_a_generator_that_leaves_and_one_that_is_killed_give_their_groups_back_and_the_run_goes_on(tiny, beside):
    config = tiny(
        num_steps=20_000, checkpoint__every_steps=0, **kit.NO_EVALUATION,
        **kit.NO_MODELS | {"generate__engine": kit.NO_MODEL | {"token_latency_s": 0.05}},
        placement={"most_joining_generators": 2}, supervision__heartbeat_s=0.5, supervision__heartbeat_timeout_s=20.0,
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        await kit.reached(run, 1)
        leaving, killed = (beside(*kit.ASYNCRL, "join", run.run_folder) for _ in range(2))
        names = at_work(run, status := await kit.status_where(run, lambda status: len(at_work(run, status)) == 2))
        leaving.terminate()
        killed.kill()
        status = await kit.status_where(run, lambda status: status.guests["left"] == status.guests["lost"] == 1, status.version)
        await kit.reached(run, status.version + 5)
        drained = await run.drain()
    assert leaving.wait(90) == 0
    assert drained.phase == "stopped", drained.reason
    assert drained.guests == {"here": 0, "most": 2, "came": 2, "left": 1, "lost": 1}
    assert {process.name: process.deaths for process in drained.processes} == {"learner": 0, "reward-0": 0, "generator-0": 0}
    kit.assert_balanced(drained)
    ledger = LedgerReader(run.run_folder)
    generated_by = {sample.generator for number in range(drained.groups["trained"]) for sample in ledger.group(number).samples}
    assert generated_by == {"generator-0", *names}
