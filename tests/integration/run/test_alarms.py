"""Alarms of real runs: raised by the trouble that each is for, and over once its advice is followed; all without a model.

What a policy does to itself (off_policy.*, gradient.spike, entropy.collapse, kl.reference, length.grows) is in
experiments/alarms, over runs that collapse. Every rule has its trouble and its end in tests/unit/observe/test_alarms.py, and
some are there alone: a disk or a memory that fills up, a slow generator, a slow or a hollow reward. A step that stays open is in
tests/unit/control/test_controller.py.
"""

from statistics import fmean

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import asyncrl
from asyncrl.observe.steps import read_events
from asyncrl.plan.simulator.measured import scenario_of_run
from tests.integration.conftest import NO_EVALUATION, NO_MODELS, python_reward

pytestmark = pytest.mark.timeout(240)
OFF = {**NO_EVALUATION, "checkpoint__every_steps": 0, "num_steps": 100_000}
LONG_TAIL = {"kind": "fake", "num_slots": 24, "max_sequence_tokens": 256, "vocabulary_size": 8, "mean_tokens": 20.0, "sigma": 1.2,
             "token_latency_s": 0.01}  # fmt: skip


async def said(run: asyncrl.Run, rule: str, what: str = "", after: int = 0) -> int:
    """Wait until the run says of a rule's alarm that it is raised, with its advice, or `is over`; return the event's number."""
    async for event in run.events("alarm", after=after):
        if event.subject == rule and what in event.text:
            return event.seq
    pytest.fail(f"{rule} was not raised, or not over")


async def test_a_reward_that_stops_paying_is_told_in_three_ways_pauses_the_run_and_mended_ends_them(tiny, tmp_path):
    score = f"    return 0.0 if os.path.exists({str(tmp_path / 'broken')!r}) else 1.0 + sum(map(ord, text)) % 5\n"
    rewards = python_reward(tmp_path, f"import os\ndef score(prompt, text):\n{score}")
    config = tiny(**OFF, **NO_MODELS, reward__functions=rewards, observe__alarms={"reward.collapse": "pause"})
    async with asyncrl.Run(config) as run:
        async for report in run.steps():
            if report.version == 20:
                break
        (tmp_path / "broken").touch()
        for rule in ("reward.equal", "reward.dead"):
            await said(run, rule)
        raised = await said(run, "reward.collapse", "resume from the checkpoint before the fall")
        async for event in run.events("phase", after=raised):
            if event.subject == "paused":
                break
        assert "reward.collapse" in {alarm.rule for alarm in (await run.status()).alarms}
        (tmp_path / "broken").unlink()
        await run.resume()
        for rule in ("reward.equal", "reward.dead", "reward.collapse"):
            await said(run, rule, "is over", raised)


async def test_a_run_that_cannot_learn_says_so_to_a_webhook_that_fails_at_first_too_and_ends_where_its_config_says_so(tiny):
    told, answers = [], [500, 500]

    async def take(request: web.Request) -> web.Response:
        if answers:
            return web.Response(status=answers.pop())
        told.append(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/alarms", take)
    async with TestServer(app) as server:
        settings = {"observe__alarms": {"reward.equal": "stop"}, "observe__webhook": str(server.make_url("/alarms?key=1"))}
        async with asyncrl.Run(tiny(**OFF | NO_MODELS | {"num_steps": 1000} | settings)) as run:
            status = await run.wait()
    assert (status.phase, status.version < 1000) == ("stopped", True)
    assert status.reason.startswith("alarm reward.equal: ")
    assert "asyncrl inspect" in status.reason
    posted = [(one["run"], one["rule"], one["text"]) for one in told]
    assert "reward.equal" in {rule for _, rule, _ in posted}
    assert posted == [("tiny", event.subject, event.text) for event in read_events(run.run_folder) if event.kind == "alarm"]


@pytest.mark.parametrize("policy", ["wait", "drop"])
async def test_a_long_tail_is_flat_under_wait_and_flagged_under_drop(tiny, policy):
    config = tiny(**OFF | NO_MODELS | {
        "num_steps": 30, "generate__engine": LONG_TAIL, "generate__sampling__max_new_tokens": 240,
        "packing__tokens_per_row": 1024, "algorithm__groups_per_step": 8, "algorithm__group_size": 2,
        "buffer__policy": policy, "buffer__max_staleness": 1,
    })  # fmt: skip
    async with asyncrl.Run(config) as run:
        metrics = [report.metrics async for report in run.steps()]
    last, seen = metrics[-1], scenario_of_run(run.run_folder)  # which the simulator takes
    assert (seen.num_steps, fmean(seen.lengths.values)) == (30, pytest.approx(last["bias/length"], rel=0.5))
    alarms = {event.subject for event in read_events(run.run_folder) if event.kind == "alarm"}
    if policy == "wait":
        assert (last["bias/length_ratio"], last["bias/flagged"]) == (1.0, 0.0)
        assert not {"bias", "groups.lost"} & alarms
    else:
        assert last["bias/lost/stale"] > 0
        assert last["bias/length_ratio_high"] < 0.95
        assert {"bias", "groups.lost"} <= alarms
