"""Generators that join a live run: one leaves in good order, one is killed, and the books balance."""

import subprocess

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.schema.status import RunStatus
from tests.integration.conftest import ASYNCRL, NO_EVALUATION, NO_MODEL, NO_MODELS, assert_balanced, samples_by


def _name(guest: subprocess.Popen[bytes], status: RunStatus) -> str:
    """The name of a guest that is ready; empty while it is not."""
    ready = {process.pid: process.name for process in status.processes if process.joined and process.state == "ready"}
    return ready.get(guest.pid, "")


async def test_a_generator_that_leaves_and_one_that_is_killed_give_their_groups_back_and_the_run_goes_on(tiny, beside):
    config = tiny(
        num_steps=20_000, checkpoint__every_steps=0, **NO_EVALUATION,
        **NO_MODELS | {"generate__engine": NO_MODEL | {"token_latency_s": 0.05}},
        placement={"most_joining_generators": 2}, supervision__heartbeat_s=0.5, supervision__heartbeat_timeout_s=20.0,
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        steps = run.steps()
        await anext(steps)
        leaving, killed = (beside(*ASYNCRL, "join", run.run_folder) for _ in range(2))
        names: set[str] = set()
        for_good = 0
        told = False
        async for _ in steps:
            status = await run.status()
            here = {guest: _name(guest, status) for guest in (leaving, killed)}
            if not names and all(here.values()):
                names = set(here.values())
            elif names and not told and all(samples_by(run.run_folder, name) >= 32 for name in names):
                leaving.terminate()  # once: who is told again while it leaves is gone at once
                killed.kill()
                told = True
            for_good += (status.guests["left"], status.guests["lost"]) == (1, 1)
            if for_good == 5:
                break
        drained = await run.drain()
    assert leaving.wait(90) == 0
    assert drained.phase == "stopped", drained.reason
    assert drained.guests == {"here": 0, "most": 2, "came": 2, "left": 1, "lost": 1}
    assert {process.name: process.deaths for process in drained.processes} == {"learner": 0, "reward-0": 0, "generator-0": 0}
    assert_balanced(drained)
    ledger = LedgerReader(run.run_folder)
    generated_by = {sample.generator for number in range(drained.groups["trained"]) for sample in ledger.group(number).samples}
    assert generated_by == {"generator-0", *names}
