"""Whole runs through the Python API: real processes, real sockets, a real model."""

import asyncio
import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.observe.steps import read_events
from asyncrl.schema.status import RunStatus
from tests.integration import conftest as kit

pytestmark = pytest.mark.timeout(240)


async def _finish(run: asyncrl.Run) -> tuple[list[asyncrl.StepReport], RunStatus]:
    reports = [report async for report in run.steps()]
    return reports, await run.status()


async def test_a_run_trains_every_step_and_leaves_what_it_promises(tiny, judged):
    """Scored by rules and a reward model, against a reference on the worker."""
    async with asyncrl.Run(tiny(**judged, observe__pictures=True)) as run:
        reports, status = await _finish(run)
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


async def test_a_cancelled_run_leaves_nothing_behind(tiny):
    async def train() -> None:
        async with asyncrl.Run(tiny(learner__kind="external", generate__engine=kit.NO_MODEL)):
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(train())
        await asyncio.wait_for(started.wait(), 120)
        task.cancel()


async def test_killed_processes_are_replaced_and_catch_up_by_deltas_and_the_run_finishes(tiny):
    victims = {3: "generator-0", 6: "reward-0", 9: "learner"}
    deaths = dict.fromkeys(victims.values(), 1)
    num_steps = 60  # many more than are made before a report is heard
    config = tiny(
        num_steps=num_steps, generate__num_workers=2, **kit.NO_EVALUATION, learner__learning_rate=1e-5,
        broadcast={"medium": {"kind": "files", "keep_last": 1}, "dtype": "bfloat16", "delta": {"full_every": 4}},
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        async for report in run.steps():
            assert report.staleness_max <= 2
            if victim := victims.pop(report.version, None):
                kit.kill(run.run_folder, victim)
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


async def test_a_run_killed_outright_resumes_and_trains_no_group_twice(tiny):
    settings = kit.NO_EVALUATION | kit.NO_MODELS
    async with asyncrl.Run(tiny(num_steps=10_000, **settings)) as run:
        async for report in run.steps():
            if report.version == 5:
                break
        kit.kill_all(run.run_folder)
    num_steps = len(LedgerReader(run.run_folder / "ledger.sqlite").steps(last=10_000)) + 3
    async with asyncrl.Run(tiny(num_steps=num_steps, **settings), resume=run.run_folder) as again:
        reports, status = await _finish(again)
    assert status.phase == "stopped", status.reason
    assert status.version == num_steps
    kit.assert_balanced(status)
    assert {report.version for report in reports} == set(range(1, num_steps + 1))
    assert len(kit.trained_groups(run.run_folder)) == num_steps * 4
    told = list(read_events(run.run_folder))
    assert [event.seq for event in told] == list(range(1, len(told) + 1))
    assert [event.text for event in told if (event.kind, event.subject) == ("restart", "run")] == [status.resumed]


async def test_a_live_run_is_changed_from_a_named_step_on_and_repeats_earlier_steps_as_they_were(tiny):
    settings = {**kit.NO_EVALUATION, "learner__warmup_steps": 0, "checkpoint__every_steps": 0}
    async with asyncrl.Run(tiny(num_steps=10_000, buffer__max_staleness=4, **settings)) as run:
        async for report in run.steps():
            if report.version == 6:
                values = {"learner.learning_rate": 5e-4, "buffer.max_staleness": 1, "generate.num_workers": 2}
                done = await run.change(values | {"generate.sampling.temperature": 0.9}, who="a test")
            if report.version == 14:
                # It repeats every step, those before the change too.
                kit.kill(run.run_folder, "learner")
            if report.version == 20:
                end = report.step + 40
                await run.change({"num_steps": end, "generate.num_workers": 1})
            if report.version == 21:
                with pytest.raises(asyncrl.RunError, match="cannot change while the run goes on"):
                    await run.change({"algorithm.group_size": 2})
                assert (await run.change({"buffer.max_staleness": 1})).changes == ()
        reports, status = [report async for report in run.steps()], await run.status()
    assert (done.revision, [one.before for one in done.changes]) == (1, [1e-3, 4, 1, 1.0])
    assert (status.phase, status.version) == ("stopped", end), status.reason
    kit.assert_balanced(status)
    rows = [json.loads(line) for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    rates = [
        (row["step"] - 1, row["metrics"]["policy/learning_rate"]) for row in rows if "policy/learning_rate" in row["metrics"]
    ]
    assert len(rates) > end, "no step was repeated"
    assert all(rate == (5e-4 if step >= done.step else 1e-3) for step, rate in rates)
    assert max(report.staleness_max for report in reports if report.step >= done.step) <= 1
    told = [event.text for event in read_events(run.run_folder) if event.kind == "change"]
    assert told[0].startswith(f"from step {done.step} on: learner.learning_rate from 0.001 to 0.0005")
    assert len(told) == 2
    resumed = asyncrl.Run(resume=run.run_folder).config
    generators = [process for process in status.processes if process.kind == "generator"]
    assert [process.name for process in generators] == ["generator-0", "generator-1"]
    assert generators[1].state in {"leaving", "left"}
    assert (resumed.learner.learning_rate, resumed.buffer.max_staleness, resumed.num_steps) == (5e-4, 1, end)
    assert asyncrl.load_config(run.run_folder / "revisions" / "0.toml").buffer.max_staleness == 4
