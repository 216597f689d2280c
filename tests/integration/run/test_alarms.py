"""Alarms of real runs: raised by the trouble that each is for, and over once its advice is followed; all without a model.

A disk that fills up is in test_full_disk.py; what a policy does to itself and what weights do to it is in test_policy_alarms.py.
All rules are in tests/unit/observe/test_alarms.py too, over reports that are made up.
"""

import asyncio
import contextlib
import signal
from statistics import fmean
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import asyncrl
from asyncrl.observe.steps import read_events
from asyncrl.plan.simulator.measured import scenario_of_run
from tests.integration import conftest as kit

OFF = {**kit.NO_EVALUATION, "checkpoint__every_steps": 0, "num_steps": 100_000}
LONG_TAIL = {"kind": "fake", "num_slots": 24, "max_sequence_tokens": 256, "vocabulary_size": 8, "mean_tokens": 20.0, "sigma": 1.2,
             "token_latency_s": 0.01}  # fmt: skip


async def test_a_reward_that_stops_paying_is_told_in_three_ways_pauses_the_run_and_mended_ends_them(tiny, tmp_path):
    score = f"    return 0.0 if os.path.exists({str(tmp_path / 'broken')!r}) else 1.0 + sum(map(ord, text)) % 5\n"
    rewards = kit.python_reward(tmp_path, f"import os\ndef score(prompt, text):\n{score}")
    config = tiny(**OFF, **kit.NO_MODELS, reward__functions=rewards, observe__alarms={"reward.collapse": "pause"})
    async with asyncrl.Run(config) as run:
        await kit.reached(run, 20)
        (tmp_path / "broken").touch()
        for rule in ("reward.equal", "reward.dead"):
            await kit.said(run, rule)
        raised = await kit.said(run, "reward.collapse", "begin a run from the checkpoint before the fall")
        async for event in run.events("phase", after=raised):
            if event.subject == "paused":
                break
        assert "reward.collapse" in {alarm.rule for alarm in (await run.status()).alarms}
        (tmp_path / "broken").unlink()
        await run.resume()
        for rule in ("reward.equal", "reward.dead", "reward.collapse"):
            await kit.said(run, rule, "is over", raised)


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
        async with asyncrl.Run(tiny(**OFF | kit.NO_MODELS | {"num_steps": 1000} | settings)) as run:
            status = await run.wait()
    assert (status.phase, status.version < 1000) == ("stopped", True)
    assert status.reason.startswith("alarm reward.equal: ")
    assert "asyncrl inspect" in status.reason
    posted = [(one["run"], one["rule"], one["text"]) for one in told]
    assert "reward.equal" in {rule for _, rule, _ in posted}
    assert list(dict.fromkeys(posted)) == [
        ("tiny", event.subject, event.text) for event in read_events(run.run_folder) if event.kind == "alarm"
    ]


def long_tail(policy: str, num_steps: int) -> dict[str, Any]:
    return OFF | kit.NO_MODELS | {
        "num_steps": num_steps, "generate__engine": LONG_TAIL, "generate__sampling__max_new_tokens": 240,
        "packing__tokens_per_row": 1024, "algorithm__groups_per_step": 8, "algorithm__group_size": 2,
        "buffer__policy": policy, "buffer__max_staleness": 1,
    }  # fmt: skip


async def test_a_long_tail_is_flat_under_wait(tiny):
    async with asyncrl.Run(tiny(**long_tail("wait", 15))) as run:
        metrics = [report.metrics async for report in run.steps()]
    last, seen = metrics[-1], scenario_of_run(run.run_folder)  # which the simulator takes
    assert (seen.num_steps, fmean(seen.lengths.values)) == (15, pytest.approx(last["bias/length"], rel=0.5))
    assert (last["bias/length_ratio"], last["bias/flagged"]) == (1.0, 0.0)
    assert not {"bias", "groups.lost"} & {event.subject for event in read_events(run.run_folder) if event.kind == "alarm"}


async def test_a_long_tail_is_flagged_under_drop_and_a_higher_bound_ends_it(tiny):
    async with asyncrl.Run(tiny(**long_tail("drop", 100_000))) as run:
        raised = [await kit.said(run, rule, "a higher buffer.max_staleness") for rule in ("bias", "groups.lost")]
        report = await kit.step_where(run, lambda report: report.metrics.get("bias/flagged", 0.0) > 0)
        assert report.metrics["bias/lost/stale"] > 0
        assert report.metrics["bias/length_ratio_high"] < 0.95
        await run.change({"buffer.max_staleness": 16})
        for rule, first in zip(("bias", "groups.lost"), raised, strict=True):
            await kit.said(run, rule, "is over", first)


async def test_too_few_generators_and_too_many_are_told_and_another_number_of_them_ends_it(tiny):
    """A step takes 150 ms. One generator needs 384 ms for the samples of a step, two need 192 ms, and eight need 48 ms."""
    engine = kit.NO_MODEL | {"length_distribution": "fixed", "token_latency_s": 0.006, "num_slots": 1}
    settings = {"generate__engine": engine, "learner__fake_step_s": 0.15, "buffer__ahead": "as_allowed"}
    async with asyncrl.Run(tiny(**OFF, **settings)) as run:
        few = await kit.said(run, "generation.slow", "more generators or slots")
        await run.change({"generate.num_workers": 8})
        await kit.said(run, "generation.slow", "is over", few)
        many = await kit.said(run, "generation.starved", "fewer generators cost nothing", few)
        await run.change({"generate.num_workers": 2})
        await kit.said(run, "generation.starved", "is over", many)


async def test_a_generator_that_is_held_up_is_told_and_ends_as_it_is_restarted(tiny, quick_looks):
    """It is stopped for most of the time, as beside a process that takes its cores."""

    async def hold_up(process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.5)
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.05)

    settings = {"generate__num_workers": 3, "learner__fake_step_s": 0.005}
    settings |= {"buffer__max_staleness": 64, "buffer__ahead": "as_allowed"}
    async with asyncrl.Run(tiny(**OFF, **kit.NO_MODELS | settings)) as run, asyncio.TaskGroup() as group:
        await kit.reached(run, 5)
        holding = group.create_task(hold_up(psutil.Process(kit.recorded_pids(run.run_folder)["generator-1"])))
        raised = await kit.said(run, "generation.uneven", "or restart it")
        kit.kill(run.run_folder, "generator-1")
        await holding
        await kit.said(run, "generation.uneven", "is over", raised)


async def test_a_process_that_hangs_is_told_while_the_step_is_open_and_once_it_goes_on_the_step_ends_it(tiny, quick_looks):
    async with asyncrl.Run(tiny(**OFF, **kit.NO_MODELS)) as run:
        await kit.reached(run, 5)
        before = max((event.seq for event in read_events(run.run_folder)), default=0)
        generator = psutil.Process(kit.recorded_pids(run.run_folder)["generator-0"])
        generator.suspend()
        raised = await kit.said(run, "stall.early", "holds the others up; its log says more: ", before)
        generator.resume()
        await kit.said(run, "stall.early", "is over", raised)


async def test_a_reward_that_is_slow_and_keeps_memory_is_told_and_mended_ends_both(tiny, tmp_path, quick_looks):
    slow, leak = tmp_path / "slow", tmp_path / "leak"
    rewards = kit.python_reward(tmp_path, f"""
import os, time
kept = []
def score(prompt, text):
    if os.path.exists({str(slow)!r}):
        time.sleep(0.1)
    if os.path.exists({str(leak)!r}):
        kept.append(bytearray(500_000))
    else:
        kept.clear()
    return len(text) % 3
""")  # fmt: skip
    slow.touch()
    beats = {"supervision__heartbeat_s": 0.2}  # which tell what a process holds
    config = tiny(**OFF, **kit.NO_MODELS, **beats, reward__functions=rewards)
    async with asyncrl.Run(config) as run:
        raised = await kit.said(run, "score.slow", "or a quicker reward")
        slow.unlink()
        await kit.said(run, "score.slow", "is over", raised)
        leak.touch()
        # Of this process: other tests may take memory too.
        await kit.step_where(run, lambda report: report.metrics["memory/resident_gb/reward-0"] > 0.3)
        raised = await kit.said(run, "memory.full", "says which process grows", raised)
        leak.unlink()
        await kit.said(run, "memory.full", "is over", raised)
