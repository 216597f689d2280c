"""Whole runs through the Python API: real processes, real sockets, a real model."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.buffer.ledger.store import connect_read_only
from asyncrl.control.launch.processes import find_controllers
from asyncrl.observe.samples import TOKENS_FILE, TokenRow
from asyncrl.observe.steps import SECONDS_FILE, SecondReport, read_events, read_lines
from asyncrl.plan.simulator.measured import scenario_of_run
from asyncrl.schema.samples import logprobs_from_bytes
from tests.builders import until
from tests.integration import conftest as kit


def seconds_of(run: asyncrl.Run) -> list[SecondReport]:
    return list(read_lines(run.run_folder / SECONDS_FILE, SecondReport))


async def test_a_run_trains_every_step_and_leaves_what_it_promises(tiny, judged):
    """Scored by rules and a reward model, against a reference on the worker."""
    async with asyncrl.Run(tiny(**judged, observe__pictures=True)) as run:
        reports, status = [report async for report in run.steps()], await run.status()
        evaluations = await run.evaluations()
    assert [report.version for report in reports] == [1, 2, 3, 4, 5]
    assert max(report.staleness_max for report in reports) <= 2
    assert status.phase == "stopped", status.reason
    assert status.groups["trained"] == 5 * 4
    kit.assert_balanced(status)
    assert {process.kind for process in status.processes} == {"learner", "reward", "inference", "generator"}
    ledger = LedgerReader(run.run_folder)
    members = [member for group_id in kit.trained_groups(run.run_folder) for member in ledger.group(group_id).samples]
    assert len(members) == 5 * 4 * 4
    for member in members:
        assert set(member.parts) == {"answer_match", "taste"}
        assert member.reward == pytest.approx(member.parts["answer_match"] + 0.1 * member.parts["taste"])
    # Of all steps together: nothing need be judged or fetched between the last two.
    assert {name for report in reports for name in report.metrics} >= {
        "data/truncated_fraction", "time/generate_mean_s", "time/score_mean_s", "weights/fetch_ms", "reward_part/answer_match",
        "reward_part/taste", "process/generated_tokens/generator-0", "disk/free_gb", "weights/probe_error", "memory/allocated_gb",
    }  # fmt: skip
    spans = [json.loads(line) for line in (run.run_folder / "spans.jsonl").read_text().splitlines()]
    starts = {span["process"] for span in spans if span.get("attributes", {}).get("why") == "its start"}
    assert starts == {"learner", "reward-0", "inference-0", "generator-0"}
    # At version 0 the learner is the reference, so the worker's numbers must be its own; later they are not.
    divergence = [report.metrics["kl/reference_mean"] for report in reports]
    assert divergence[0] == pytest.approx(0.0, abs=1e-8)
    assert divergence[-1] > 1e-7
    assert [evaluation.version for evaluation in evaluations] == [0, 5]
    assert AutoModelForCausalLM.from_pretrained(status.checkpoint).config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(status.checkpoint)("1+2=")["input_ids"]
    told = list(read_events(run.run_folder))
    assert {event.kind for event in told} >= {"phase", "swap", "checkpoint", "evaluation"}
    newest = [event.subject for event in told if event.kind == "checkpoint"][-1]
    assert (newest, (run.run_folder / newest).is_dir()) == ("checkpoints/step-000005", True)  # in a copy of the folder, too
    names = {path.name for path in run.run_folder.iterdir()}
    assert {"reward.png", "timeline.png", "metrics.jsonl", "steps.jsonl", "eval.jsonl", "ledger.sqlite", "config.toml"} <= names
    assert "api.json" not in names
    assert kit.metrics_of(run.run_folder)
    assert scenario_of_run(run.run_folder).num_steps == 5, "the simulator takes it"


async def test_a_run_that_is_cancelled_leaves_nothing_as_it_starts_and_as_it_goes_on(tiny):
    """Calls that are cancelled: session/test_session_cancelled.py."""
    config = tiny(learner__kind="external", generate__engine=kit.NO_MODEL)
    run_folder, started = Path(config.folder) / config.name, asyncio.Event()

    async def whole() -> None:
        async with asyncrl.Run(config):
            started.set()
            await asyncio.Event().wait()

    for begun in (lambda: find_controllers(run_folder), (run_folder / "api.json").exists, started.is_set):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(whole())
            await until(begun)
            task.cancel()
        # What is on its way out has some seconds.
        await until(lambda: not kit.processes_of(run_folder) and asyncio.all_tasks() == {asyncio.current_task()})


async def test_a_program_hears_that_its_run_failed_as_it_was_drained(tiny):
    async def leave_a_step_behind() -> None:
        slow = kit.NO_MODELS | {"learner__fake_step_s": 60.0} | kit.NO_EVALUATION
        async with asyncrl.Run(tiny(**slow, supervision__drain_timeout_s=0.5)) as run:
            while not (await run.status()).groups.get("taken"):
                await asyncio.sleep(0.05)

    with pytest.raises(asyncrl.RunError, match="drain"):
        await leave_a_step_behind()


async def test_killed_processes_are_replaced_and_catch_up_by_deltas_and_the_run_finishes(tiny):
    victims = {3: "generator-0", 6: "reward-0", 9: "learner"}
    deaths = dict.fromkeys(victims.values(), 1)
    config = tiny(
        num_steps=10_000, generate__num_workers=2, **kit.NO_EVALUATION, learner__learning_rate=1e-5,
        broadcast={"medium": {"kind": "files", "keep_last": 1}, "dtype": "bfloat16", "delta": {"full_every": 4}},
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        async for report in run.steps():
            assert report.staleness_max <= 2
            if victim := victims.pop(report.version, None):
                kit.kill(run.run_folder, victim)
                if not victims:
                    num_steps = (await run.status()).version + 50
                    await run.change({"num_steps": num_steps})
        status = await run.status()
    assert (status.phase, status.version) == ("stopped", num_steps), status.reason
    kit.assert_balanced(status)
    assert {process.name: process.deaths for process in status.processes if process.deaths} == deaths
    told = list(read_events(run.run_folder))
    for kind in ("death", "restart"):
        assert sorted(event.subject for event in told if event.kind == kind) == sorted(deaths)
    swaps = [event.version for event in told if event.kind == "swap"]
    assert swaps == sorted(set(swaps))
    assert len(swaps) > num_steps / 4
    assert [event.seq for event in told] == list(range(1, len(told) + 1))
    assert len(kit.trained_groups(run.run_folder)) == num_steps * 4
    rows = kit.metrics_of(run.run_folder)
    sizes = {row["weights/update_bytes"] for row in rows if "weights/update_bytes" in row}
    assert min(sizes) < max(sizes) / 3
    assert all(row.get("weights/probe_error", 0.0) < config.probe_tolerance for row in rows)
    weights = run.run_folder / "weights"
    assert len(list(weights.glob("version-*"))) == 1
    assert 1 <= len(list(weights.glob("*.delta"))) <= 4


async def test_a_run_that_stands_still_goes_on_writing_its_seconds_and_what_its_dead_controller_left_is_ended_by_the_next(tiny):
    """That is ended before anybody can ask the new controller for something. Resumed with all its steps: test_replay.py."""
    settings = kit.NO_EVALUATION | kit.NO_MODELS | {"num_steps": 10_000}
    async with asyncrl.Run(tiny(**settings)) as run:
        await kit.reached(run, 5)
        psutil.Process(kit.recorded_pids(run.run_folder)["learner"]).suspend()
        num_before = len(seconds_of(run))
        await until(lambda: len(seconds_of(run)) > num_before)
        stood = (await run.status()).version
        await until(lambda: len(seconds_of(run)) > num_before + 2)
        assert (await run.status()).version == stood
        await until(lambda: [second.values["idle/learner"] for second in seconds_of(run)[-2:]] == [0.0, 0.0])  # it has its batch
        last, newest = seconds_of(run)[-2:]
        assert newest.time_s - last.time_s >= 1.0
        psutil.Process(json.loads((run.run_folder / "api.json").read_text())["pid"]).kill()
    config = (run.run_folder / "config.toml").read_text()
    with pytest.raises(asyncrl.AsyncRLError, match="resume with the same"):
        await asyncrl.Run(resume=run.run_folder, overrides={"algorithm.groups_per_step": 5}).__aenter__()
    late = {"supervision.start_timeout_s": 0.01, "supervision.heartbeat_s": 0.05, "supervision.max_deaths": 0}
    with pytest.raises(asyncrl.RunError, match="sent no heartbeat"):
        async with asyncrl.Run(resume=run.run_folder, overrides=late) as refused:
            await refused.wait()
    assert (run.run_folder / "config.toml").read_text() == config
    async with asyncrl.Run(tiny(**settings), resume=run.run_folder) as again:
        status = await again.drain()
    assert status.phase == "stopped", status.reason
    kit.assert_balanced(status)
    assert len(kit.trained_groups(run.run_folder)) >= stood * 4


async def test_bound_evaluations_checkpoints_and_time_limit_change_in_a_live_run_and_the_ledger_says_by_whom(tiny):
    settings = kit.NO_EVALUATION | kit.NO_MODELS | {
        "num_steps": 100_000, "checkpoint__every_steps": 0, "buffer__max_staleness": 1, "buffer__ahead": "as_allowed",
        "generate__engine__token_latency_s": 0.002, "learner__fake_step_s": 0.2,
    }  # fmt: skip
    wider = {"buffer.max_staleness": 6, "eval.every_steps": 2, "eval.num_prompts": 3, "eval.samples_per_prompt": 2}
    async with asyncrl.Run(tiny(**settings)) as run:
        await kit.reached(run, 5)
        up = await run.change(wider | {"checkpoint.every_steps": 3, "checkpoint.keep_last": 2}, who="ann")
        version = up.step + 4
        while (await kit.reached(run, version)).staleness_max <= 1:
            version += 1
        while (before := await run.pause()).groups["ready"] < 3 * 4:  # two steps take 8 of them; more are too old for a third
            await run.resume()
            await kit.reached(run, before.version + 1)
        down = await run.change({"buffer.max_staleness": 1, "eval.every_steps": 0}, who="bob")
        await run.resume()
        await kit.reached(run, down.step + 6)
        await run.change({"max_run_s": 0.01}, who="bob")
        status = await run.wait()
        reports, evaluations = [report async for report in run.steps()], await run.evaluations()
    assert (status.phase, status.reason) == ("stopped", "max_run_s (0.01 s) is over")
    kit.assert_balanced(status)
    staleness = [report.staleness_max for report in reports]
    assert max(staleness[: up.step]) <= 1
    assert 1 < max(staleness[up.step : down.step]) <= 6
    assert max(staleness[down.step :]) <= 1
    assert before.dropped.get("stale", 0) == 0
    assert status.dropped["stale"] >= before.groups["ready"] - 2 * 4
    assert {(one.version % 2, one.num_samples) for one in evaluations} == {(0, 6)}
    assert 5 < min(one.version for one in evaluations) <= max(one.version for one in evaluations) <= down.step
    told = list(read_events(run.run_folder))
    saved = sorted({event.version for event in told if event.kind == "checkpoint"})
    assert saved == [version for version in range(up.step + 1, status.version) if version % 3 == 0] + [status.version]
    assert len(list((run.run_folder / "checkpoints").iterdir())) == 2
    with connect_read_only(run.run_folder / "ledger.sqlite") as ledger:
        said = [text for (text,) in ledger.execute("SELECT detail FROM events WHERE what = 'changed' ORDER BY at_s")]
    assert [(text.split(":")[0], text[-8:]) for text in said[:2]] == [
        (f"from step {up.step} on", "(by ann)"),
        (f"from step {down.step} on", "(by bob)"),
    ]
    assert "buffer.max_staleness from 1 to 6, eval.every_steps from 0 to 2" in said[0]
    assert "buffer.max_staleness from 6 to 1, eval.every_steps from 2 to 0" in said[1]
    assert [text.partition(": ")[2] for text in said[2:]] == ["max_run_s from 0.0 to 0.01 (by bob)"]


AT_ONCE = {
    "learner.learning_rate": 5e-4, "learner.max_grad_norm": 0.5, "algorithm.clip_low": 1e-7, "algorithm.clip_high": 1e-7,
    "algorithm.dual_clip": 5.0, "algorithm.max_ratio": 3.0, "algorithm.entropy_coefficient": 1.0,
    "algorithm.kl.coefficient": 0.5,
}  # fmt: skip
STANDS_STILL = 1e-12
"""A learning rate so low that no log-probability moves."""


def assert_steps_were_trained_by(run_folder: Path, values: dict[str, float], first_step: int) -> None:
    """The ledger has these settings with each step from that one on, and with none before."""
    with connect_read_only(run_folder / "ledger.sqlite") as ledger:
        rows = [(step, json.loads(params)["settings"]) for step, params in ledger.execute("SELECT step, params FROM steps")]
    assert rows
    assert all((settings[field] == value) == (step >= first_step) for step, settings in rows for field, value in values.items())


def assert_groups_keep_the_temperature_of_their_issue(run_folder: Path, step: int, end: int) -> None:
    """Until step `end` weights are those of the beginning; from `step` on the learner divides by another temperature.

    So its log-probabilities are those of the sampler, but for groups that were drawn before the change and trained after it.
    """
    is_new = dict[int, bool]()
    for row in read_lines(run_folder / TOKENS_FILE, TokenRow):
        if row.step < end and row.group_id not in is_new:
            is_same = logprobs_from_bytes(row.learner).tolist() == pytest.approx(logprobs_from_bytes(row.behaviour), abs=1e-4)
            assert is_same or row.step >= step
            is_new[row.group_id] = is_same and row.step >= step
    old = [is_new[group_id] for group_id in sorted(is_new)]
    assert old == sorted(old)
    assert any(old)
    assert any(not is_new[row.group_id] for row in read_lines(run_folder / TOKENS_FILE, TokenRow) if step <= row.step < end)


async def test_a_live_run_is_changed_from_a_named_step_on_and_repeats_earlier_steps_as_they_were(tiny, mixed_rewards):
    settings = kit.NO_EVALUATION | {
        "num_steps": 10_000, "buffer__max_staleness": 4, "buffer__ahead": "as_allowed", "checkpoint__every_steps": 0,
        "learner__warmup_steps": 0, "learner__learning_rate": STANDS_STILL, "learner__minibatches": 2,
        "algorithm__loss": "ppo_clip", "algorithm__kl": {"coefficient": 0.01}, "observe__samples": 16,
        "reward__functions": mixed_rewards,
    }  # fmt: skip
    beside = {"buffer.max_staleness": 1, "generate.num_workers": 2}
    async with asyncrl.Run(tiny(**settings)) as run:
        await kit.reached(run, 6)
        learner = psutil.Process(kit.recorded_pids(run.run_folder)["learner"])
        learner.suspend()
        while (await run.status()).groups["ready"] < 2 * 4:  # two steps' groups are of before the change
            await asyncio.sleep(0.02)
        cooled = await run.change({"generate.sampling.temperature": 0.5}, who="a test")
        learner.resume()
        await kit.reached(run, cooled.step + 6)
        done = await run.change(AT_ONCE | beside, who="a test")
        await kit.reached(run, done.step + 4)
        kit.kill(run.run_folder, "learner")  # it repeats every step, those before the changes too
        await kit.reached(run, done.step + 8)
        end = (await run.pause()).version + 25
        await run.change({"num_steps": end, "generate.num_workers": 1})
        await run.resume()
        with pytest.raises(asyncrl.RunError, match="cannot change while the run goes on"):
            await run.change({"algorithm.group_size": 2})
        assert (await run.change({"buffer.max_staleness": 1})).changes == ()
        reports, status = [report async for report in run.steps()], await run.status()
    assert (status.phase, status.version) == ("stopped", end), status.reason
    assert (done.revision, {one.field: one.after for one in done.changes}) == (2, AT_ONCE | beside)
    assert [one.before for one in done.changes] == [STANDS_STILL, 1.0, 0.2, 0.2, None, 5.0, 0.0, 0.01, 4, 1]
    kit.assert_balanced(status)
    assert max(report.staleness_max for report in reports if report.step >= done.step) <= 1
    assert_steps_were_trained_by(run.run_folder, AT_ONCE, done.step)
    rows = [json.loads(line) for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [(row["step"] - 1, row["metrics"]) for row in rows if "policy/learning_rate" in row["metrics"]]
    assert len(steps) > end, "no step was repeated"
    for step, figures in steps:
        is_new = step >= done.step
        assert figures["policy/learning_rate"] == pytest.approx(5e-4 if is_new else STANDS_STILL, rel=1e-6)
        assert figures["kl/coefficient"] == (0.5 if is_new else 0.01)
    assert_groups_keep_the_temperature_of_their_issue(run.run_folder, cooled.step, done.step)
    told = [event.text for event in read_events(run.run_folder) if event.kind == "change"]
    assert told[1].startswith(f"from step {done.step} on: learner.learning_rate from 1e-12 to 0.0005")
    assert len(told) == 3
    resumed = asyncrl.Run(resume=run.run_folder).config
    generators = [process for process in status.processes if process.kind == "generator"]
    assert [process.name for process in generators] == ["generator-0", "generator-1"]
    assert generators[1].state in {"leaving", "left"}
    assert (resumed.learner.learning_rate, resumed.buffer.max_staleness, resumed.num_steps) == (5e-4, 1, end)
    assert asyncrl.load_config(run.run_folder / "revisions" / "0.toml").buffer.max_staleness == 4
