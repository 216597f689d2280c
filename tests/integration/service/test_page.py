"""The page in a real browser: its numbers are the files', it is alone, and hostile text does nothing."""

import asyncio
import contextlib
import hashlib
import itertools
import re
import shutil
import sys
import tomllib
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.buffer.ledger import records as rec
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.buffer.ledger.store import SqliteLedger
from asyncrl.config.load import dump_config, parse_config
from asyncrl.control.lifecycle.state import GOAL_REACHED
from asyncrl.observe import samples as sampled
from asyncrl.observe import steps as files
from asyncrl.observe.alarms import OVER, RULES, Alarms, raised_in
from asyncrl.observe.spans import SPANS_FILE, UNTOLD, read_spans
from asyncrl.schema.samples import Prompt, ids_from_bytes, logprobs_from_bytes
from asyncrl.serve.pages import FOLDER
from tests.builders import write_rows
from tests.integration.conftest import NO_MODEL, command_line, tiny_settings, written
from tests.integration.service.browser import (
    MARKS,
    as_values,
    assert_accessible,
    expect,
    go,
    numbers,
    opened,
    rows_of_table,
    values_of_table,
    viewed,
)

pytestmark = MARKS
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\0\u202eevil\u2066"
HOSTILE_SHOWN = HOSTILE.replace("\0", "⟨U+0000⟩").replace("\u202e", "⟨U+202E⟩").replace("\u2066", "⟨U+2066⟩")
NUM_STEPS = 10_000
NUM_SERIES = 150
MOST_HEAP_BYTES = 200_000_000
MOST_PAGE_BYTES = 250_000
CHARTS = {
    "Reward": {"mean": "reward_mean", "standard deviation": "reward_std"},
    "Staleness, versions": {"mean": "staleness_mean", "max": "staleness_max", "bound": "bound"},
    "Idle share": {"learner": "learner_idle", "generators": "generators_idle"},
    "Buffer, groups": {"running": "groups_running", "scoring": "groups_scoring", "ready": "groups_ready"},
    "Off-policy: effective sample size, clipped": {
        "ess": "ratio/ess", "clip fraction": "policy/clip_fraction", "kept fraction": "policy/kept_fraction"},
    "Off-policy: KL, nat": {"k3": "kl/mean", "k1": "kl/k1"},
    "Weights, ms": {"sync": "weight_sync_ms", "learner stood still": "weights/blocked_ms",
                    "generator stood still": "weights/swap_ms"},
    "Tokens a second": {"generated": "generated_tokens_per_s", "trained": "trained_tokens_per_s"},
    "Entropy, nat": {"entropy": "policy/entropy"},
    "Learner memory, GB": {"peak": "memory/peak_gb", "allocated": "memory/allocated_gb"},
}  # fmt: skip
"""Which figure of a step is which line of which chart."""
SECONDS = {
    "Idle share now": {"learner": "idle/learner", "generators": "idle/generators"},
    "Groups now": {"running": "queue/running", "scoring": "queue/scoring", "ready": "queue/ready"},
    "Requests in the engines": {"running": "process/requests_running", "slots": "process/slots"},
    "Tokens generated in a second": {"generated": "throughput/generated_tokens_per_sec"},
    "Resident memory, GB": {
        **{name: f"memory/resident_gb/{name}" for name in ("learner", "generator-0", "reward-0")},
        "available": "memory/available_gb"},
}  # fmt: skip
RANDOM_TOKENS = 12
VIEWS = ("timeline", "samples", "logs", "alarms", "events", "config", "ledger")
HEADINGS = {
    "/run/tiny": "tiny", **{f"/run/tiny/{view}": f"tiny: {view}" for view in VIEWS}, "/compare/tiny,copied": "Compare 2 runs",
    "/": "Runs",
}  # fmt: skip
LATER = {"/": ("link", "tiny"), "/run/tiny": ("heading", "Over seconds, since")}
"""What comes to a page after its heading."""


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """The folder of a run of 6 steps on the fake engine, with a learner that has a model, ended."""
    folder = tmp_path_factory.mktemp("real")
    settings = tiny_settings(folder, generate__engine=NO_MODEL, num_steps=6, supervision__heartbeat_s=0.2)
    config = written(parse_config(settings), folder / "tiny.toml")
    assert command_line("run", config, "--plain", timeout=300).returncode == 0
    return folder / "tiny"


@pytest.fixture
def recorded(real, tmp_path) -> Path:
    """A copy of it, and behind what it wrote some rows of what it has not met: alarms, a death, a lost group, odd tokens."""
    folder = shutil.copytree(real, tmp_path / "tiny", ignore=shutil.ignore_patterns("checkpoints"))
    steps, events = files.read_steps(folder), list(files.read_events(folder))
    wanted = {name for lines in CHARTS.values() for name in lines.values() if "/" in name}
    wanted |= {f"bias/{name}{end}" for name in ("length_ratio", "reward_gap") for end in ("", "_low", "_high")}
    lacking = {name: place / 7 for place, name in enumerate(sorted(wanted - steps[-1].metrics.keys()), start=1)}
    steps[-1] = msgspec.structs.replace(steps[-1], metrics=steps[-1].metrics | lacking)
    (folder / files.STEPS_FILE).write_bytes(msgspec.json.Encoder().encode_lines(steps))
    # A run this short may end before a second has seen each process.
    values = {name: place / 7 for lines in SECONDS.values() for place, name in enumerate(lines.values(), start=1)}
    seconds = [*files.read_lines(folder / files.SECONDS_FILE, files.SecondReport)]
    seconds.append(files.SecondReport(seconds[-1].time_s + 1.0 if seconds else steps[-1].time_s, values))
    (folder / files.SECONDS_FILE).write_bytes(msgspec.json.Encoder().encode_lines(seconds))
    alarms = Alarms(4)
    bad = msgspec.structs.replace(steps[0], metrics={"ratio/ess": 0.05})
    raised = {alarm.rule: alarm for _ in range(5) for alarm in alarms.take(bad)}
    number, now = events[-1].seq, events[-1].time_s
    told = [("death", "generator-0", "exit -9", 3)]
    told += [("alarm", rule, raised[rule].text, version) for rule, version in (("off_policy.ess", 3), ("off_policy.lost", 4))]
    told += [("alarm", "off_policy.ess", f"off_policy.ess{OVER}", 5)]
    write_rows(folder / files.EVENTS_FILE, *(
        files.RunEvent(seq=number + place, time_s=now + place, kind=kind, subject=subject, text=text, version=version)
        for place, (kind, subject, text, version) in enumerate(told, start=1)
    ))  # fmt: skip
    with contextlib.closing(SqliteLedger(folder / "ledger.sqlite")) as ledger:
        group = LedgerReader(folder).issued()
        ledger.write([rec.IssuedRecord(group, Prompt("odd"), "generator-0", 6, 1, now)])
        ledger.write([rec.MovedRecord(group, "dropped", "stale", now + 1)])
    write_rows(folder / sampled.TOKENS_FILE, odd_tokens(steps[-1].step, group))
    return folder


def odd_tokens(step: int, group: int) -> sampled.TokenRow:
    """Tokens of which every figure differs, with all flags there are."""
    source = np.random.default_rng(0)
    size = RANDOM_TOKENS
    ids, versions = np.arange(size, dtype="<i4").tobytes(), np.repeat(np.arange(3, dtype="<i4"), size // 3).tobytes()
    floats = [
        source.uniform(low, high, size).astype("<f4").tobytes() for low, high in ((-3, 0), (-3, 0), (0, 2), (0, 2), (-2, 1))
    ]
    usual = sampled.TRAINED | sampled.KEPT
    flags = bytes([usual, usual | sampled.CLIPPED, sampled.TRAINED, 0] * (size // 4))
    return sampled.TokenRow(step, group, 0, 0.25, 0, ids, versions, *floats, flags, tuple(f"t{place}" for place in range(size)))


def test_the_page_is_small_still_and_what_it_brings_along_is_what_it_says():
    found = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert sum(map(len, found.values())) <= MOST_PAGE_BYTES
    vendor = FOLDER / "vendor"
    record = tomllib.loads((vendor / "VENDORED.toml").read_text())
    assert {name: hashlib.sha512(found[vendor / name]).hexdigest() for name in record["files"]} == record["files"]
    assert {path.name for path in found if path.parent == vendor} == {*record["files"], "VENDORED.toml"}
    assert f"v{record['version']}" in found[vendor / "uPlot.js"].decode()[:200]
    assert record["source"].endswith(f"/{record['name']}-{record['version']}.tgz")
    assert len(record["sha512"]) == 128
    own = b"".join(text for path, text in found.items() if path.parent == FOLDER)
    assert not [word for word in (b"transition", b"animation", b"@keyframes", b"smooth") if word in own]  # nothing moves


async def test_a_run_has_the_numbers_of_its_files(page, recorded, tmp_path):
    copied = shutil.copytree(recorded, tmp_path / "copied")
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()}
    steps, evals, events = files.read_steps(recorded), files.read_evals(recorded), list(files.read_events(recorded))
    newest = steps[-1]
    command = [sys.executable, "-m", "asyncrl", "view", recorded, copied]
    viewer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        await opened(page, (await viewer.stdout.readline()).decode().strip())
        accuracies = [evals[0].accuracy, evals[-1].accuracy]
        of_step = [newest.reward_mean, newest.staleness_mean, newest.staleness_max, newest.learner_idle, newest.generators_idle]
        assert [row[1:12] for row in await values_of_table(page, "2 of 2 runs, newest first")] == [
            [name, "done", 6, 6, *of_step, *accuracies] for name in ("copied", "tiny")
        ]
        assert "token" not in page.url
        await page.get_by_role("link", name="copied").click()
        await page.get_by_role("heading", name="Over seconds, since").wait_for()
        rows = [msgspec.structs.asdict(step) | step.metrics | {"bound": 2} for step in steps]
        seconds = list(files.read_lines(recorded / files.SECONDS_FILE, files.SecondReport))
        expected = {
            f"{title}: {label}": next((row[name] for row in reversed(of) if name in row), None)
            for of, charts in ((rows, CHARTS), ([second.values for second in seconds], SECONDS))
            for title, lines in charts.items() for label, name in lines.items()
        }  # fmt: skip
        expected |= {"Held-out evaluations: accuracy": evals[-1].accuracy, "Held-out evaluations: reward": evals[-1].reward_mean}
        told = await numbers(page)
        assert told == {name: value for name, value in expected.items() if value is not None or name in told}
        assert None not in expected.values()
        for title, lines in {"Reward": CHARTS["Reward"], "Staleness, versions": CHARTS["Staleness, versions"]}.items():
            await page.locator("figure", has=page.get_by_text(title, exact=True)).get_by_text("Values").click()
            assert await values_of_table(page, f"{title}: the newest 6") == [
                [row["step"], *(row[name] for name in lines.values())] for row in reversed(rows)
            ]
        await page.get_by_text("Every value of step 5").click()
        every = dict(await values_of_table(page, "Every value"))
        plain = msgspec.to_builtins(newest)
        assert every == {k: v for k, v in {**plain, **newest.metrics}.items() if isinstance(v, (int, float))}
        assert not await page.get_by_role("button", name="Pause").count()

        await page.get_by_role("link", name="off_policy.lost").click()  # it stands, so the run's page says it
        rules, alarms = {rule.name: rule for rule in RULES}, await values_of_table(page, "Raised, newest first")
        assert [row[:2] + row[4:] for row in alarms] == as_values(
            [one.rule, one.level, rules[one.rule].source, moment(one.since_s), one.version,
             moment(one.over_s) if one.over_s else "stands", one.over_version if one.over_s else "", one.text]
            for one in raised_in(events)[::-1]
        )  # fmt: skip
        assert [row[:1] + row[2:4] for row in alarms[:2]] == [["off_policy.lost", 0.05, 0.1], ["off_policy.ess", 0.05, 0.3]]
        assert [row[8] for row in alarms[:2]] == ["", 5]
        assert {row[0]: row[2:] for row in await rows_of_table(page, "Rules")} == {
            rule.name: [rule.meets, f"{rule.needed} of {rule.of}", rule.source, rule.advice, "goes on"] for rule in RULES
        }
        await page.get_by_role("link", name="events").click()
        await page.get_by_role("cell", name="exit -9").wait_for()
        shown = [event for event in reversed(events) if event.kind != "swap"]
        await expect(page.locator("tbody tr")).to_have_count(len(shown))  # they may come in several parts
        assert [row[:1] + row[2:5] for row in await rows_of_table(page, "What happened, newest first")] == [
            [str(event.seq), event.kind, event.subject, event.text] for event in shown
        ]
        await page.get_by_label("Show").select_option("death")
        await expect(page.locator("tbody tr:visible")).to_have_count(1)
        await page.get_by_role("link", name="config").click()
        assert await page.get_by_label("Config, TOML").text_content() == (recorded / "config.toml").read_text()
        await page.get_by_role("link", name="logs").click()
        await page.get_by_label("Log of").select_option("learner.log")
        text = (recorded / "logs" / "learner.log").read_text()
        await expect(page.locator("pre")).to_have_text(text)
        lines = [(line[:23], path.stem, line) for path in sorted((recorded / "logs").glob("*.log"))
                 for line in path.read_text().splitlines() if "at version 0" in line]  # fmt: skip
        found = [f"{process}: {line}" for _, process, line in sorted(lines, key=lambda line: line[0])]
        assert {line.partition(":")[0] for line in found} == {"controller", "learner"}
        for word, is_pattern in (("AT VERSION 0", False), ("at ver.ion 0", True)):
            await page.get_by_label("as a regular expression").set_checked(is_pattern)
            await page.get_by_label("Lines of all processes with").fill(word)
            await page.keyboard.press("Enter")
            await expect(page.locator("pre")).to_have_text("\n".join(found))
    finally:
        await page.goto("about:blank")
        viewer.terminate()
        await viewer.wait()
    assert before == {path: path.stat().st_mtime_ns for path in before}


async def test_the_ledger_has_the_numbers_of_the_ledger(page, recorded):
    ledger, newest = LedgerReader(recorded), files.read_steps(recorded)[-1]
    counts, issued = ledger.counts(), ledger.issued()
    groups = defaultdict(int)
    for row in counts:
        groups[row.state] += row.groups
    async with viewed(page, recorded):
        await go(page, "/run/tiny/ledger")
        states = ("running", "scoring", "ready", "taken", "trained", "dropped", "failed")
        told = " + ".join(f"{state} {groups[state]}" for state in states)
        await expect(page.locator("#sum")).to_have_text(f"issued {issued} = {told}; sum holds: yes")
        assert sum(groups.values()) == issued
        trained = f"trained {groups['trained']}, groups of trained steps {groups['trained']}: the sums agree"
        await expect(page.locator("#trained")).to_have_text(trained)
        assert await values_of_table(page, "Groups by state") == as_values([
            *([row.state, row.reason, row.groups] for row in counts),
            ["all", "", issued],
        ])
        lost = sorted((row for row in counts if row.state in {"dropped", "failed"}), key=lambda row: -row.groups)
        assert await values_of_table(page, "Dropped and failed, by reason") == [
            [row.reason, row.state, row.groups, row.groups / issued] for row in lost
        ]
        assert [row[1:] for row in await values_of_table(page, "At step 5")] == [
            [newest.metrics[f"bias/{name}{end}"] for end in ("", "_low", "_high")] for name in ("length_ratio", "reward_gap")
        ]
        versions, prompts, steps = ledger.versions(), ledger.prompts(), ledger.steps()
        assert await values_of_table(page, f"The newest {len(versions)} versions") == as_values(
            msgspec.structs.astuple(row) for row in reversed(versions)
        )
        assert await values_of_table(page, f"The {len(prompts)} prompts issued most often") == as_values(
            map(msgspec.structs.astuple, prompts)
        )
        assert await values_of_table(page, f"The newest {len(steps)} steps") == [
            [row.step, row.state, len(row.group_ids), row.max_staleness, moment(row.taken_s), moment(row.trained_s)]
            for row in reversed(steps)
        ]
        await go(page, "/run/tiny/samples")
        await page.get_by_label("Groups that are").select_option("dropped")
        dropped = ledger.groups("dropped")
        assert [
            row[:6] for row in await values_of_table(page, f"The newest {len(dropped)} groups that are dropped")
        ] == as_values(
            [f"g{one.group_id}", one.prompt.prompt_id, one.reason, one.generator, one.version, one.attempt] for one in dropped
        )


def moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(int(seconds), UTC):%Y-%m-%d %H:%M:%S}Z"


@pytest.fixture
def arms(tmp_path) -> list[Path]:
    """The files of three runs that have ended: two that differ in their seed, and one in its bound too."""
    folders = [tmp_path / name for name in ("one", "two", "near")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        settings = tiny_settings(tmp_path, name=folder.name, seed=seed, num_steps=8, buffer__max_staleness=0 if seed == 2 else 2)
        (folder / "config.toml").write_text(dump_config(parse_config(settings)))
        steps = [
            files.StepReport(
                step=step, version=step + 1, time_s=1e9 + step * (1 + seed / 7), reward_mean=(step + seed) / 13,
                staleness_mean=step / (3 + seed), learner_idle=(seed + 1) / (step + 3), metrics={"data/samples": 16.0 + seed},
            )
            for step in range(8)
        ]  # fmt: skip
        evals = [files.EvalReport(version=version, accuracy=(version + seed) / 17, num_samples=8) for version in (0, 8)]
        write_rows(folder / files.STEPS_FILE, *steps)
        write_rows(folder / files.EVAL_FILE, *evals)
        ended = files.RunEvent(seq=1, time_s=1e9, kind="phase", subject="stopped", text=GOAL_REACHED)
        write_rows(folder / files.EVENTS_FILE, ended)
    return folders


async def test_runs_are_compared_by_the_numbers_of_their_files(page, arms):
    steps, names = {folder.name: files.read_steps(folder) for folder in arms}, [folder.name for folder in arms]
    async with viewed(page, *arms):
        for name in names:
            await page.get_by_label(f"Compare {name}", exact=True).check()
        await page.get_by_role("button", name="Compare").click()
        await page.get_by_role("heading", name="Compare 3 runs").wait_for()
        expected = []
        for folder in arms:
            own, evals = steps[folder.name], files.read_evals(folder)
            means = [sum(getattr(step, field) for step in own) / len(own) for field in ("reward_mean", "staleness_mean")]
            pace = pytest.approx((len(own) - 1) / (own[-1].time_s - own[0].time_s))
            expected.append([folder.name, "done", own[-1].version, evals[0].accuracy, evals[-1].accuracy, *means, pace])
        assert await values_of_table(page, "Results; reward and staleness are means of the newest 50 steps") == expected
        assert await rows_of_table(page, "Settings that differ") == [
            ["buffer.max_staleness", "2", "2", "0"], ["name", '"one"', '"two"', '"near"'], ["seed", "0", "1", "2"]
        ]  # fmt: skip
        await expect(page.locator("figure canvas")).to_have_count(4)  # drawn, not only told
        places = {
            "steps": lambda own: [float(step.step) for step in own],
            "samples trained": lambda own: list(itertools.accumulate(step.metrics["data/samples"] for step in own)),
            "seconds since the first step": lambda own: [step.time_s - own[0].time_s for step in own],
        }
        of_charts = {"Reward": "reward_mean", "Staleness, mean": "staleness_mean", "Learner idle": "learner_idle"}
        for over, place in places.items():
            await page.get_by_label("Over", exact=True).select_option(over)
            shown = await numbers(page)
            assert all(
                shown[f"{title}: {name}"] == getattr(steps[name][-1], field)
                for title, field in of_charts.items()
                for name in names
            )
            figure = page.locator("figure", has=page.get_by_text("Reward", exact=True))
            await figure.get_by_text("Values").click()
            points = {name: dict(zip(place(steps[name]), steps[name], strict=True)) for name in names}
            xs = sorted({x for own in points.values() for x in own}, reverse=True)
            assert await values_of_table(page, f"Reward: the newest {len(xs)}") == [
                [x, *(points[name][x].reward_mean if x in points[name] else None for name in names)] for x in xs
            ], over
        await page.get_by_label("Over", exact=True).select_option("steps")
        await page.get_by_label("Seeds as one line, with their range").check()
        await page.locator("figure", has=page.get_by_text("Reward", exact=True)).get_by_text("Values").click()
        band = []
        for step in reversed(range(8)):
            both = [steps[name][step].reward_mean for name in ("one", "two")]
            band.append([step, sum(both) / 2, min(both), max(both), *[steps["near"][step].reward_mean] * 3])
        assert await values_of_table(page, "Reward: the newest 8") == band
        labels = ["one and 1 more", "one and 1 more, least", "one and 1 more, most", "near", "near, least", "near, most"]
        shown = await numbers(page)
        assert [shown[f"Reward: {label}"] for label in labels] == band[0][1:]


WHAT = {"idle": "waits", "wait": "waits", "step": "trains", "generate": "generates", "score": "scores", "swap": "swaps weights",
        "publish": "publishes", "checkpoint": "writes a checkpoint", "evaluate": "evaluates"}  # fmt: skip


async def test_the_timeline_tells_what_the_spans_tell_and_moves_by_keyboard(page, real):
    spans = list(read_spans(real))
    first, last = spans[0].start_s, max(span.end_s for span in spans)
    tracks = defaultdict(list)
    for span in spans:
        why = span.attributes.get("why", "the batch of its next step" if span.name == "wait" else "")
        tracks[span.process, WHAT[span.name], why].append(span)
    expected = {}
    for key, own in tracks.items():
        starts, ends = (np.array([getattr(span, name) - first for span in own]) for name in ("start_s", "end_s"))
        about = [span.attributes for span in own]
        oldest = [one.get("version", one.get("oldest_version", -1)) for one in about]
        newest = max(one.get("version", one.get("newest_version", -1)) for one in about)
        least = min((one for one in oldest if one >= 0), default=-1)
        versions = "" if newest < 0 else f"{newest:g}" if least == newest else f"{least:g} to {newest:g}"
        expected[key] = as_values([[len(own), ends.sum() - starts.clip(0).sum(), versions]])[0]
    async with viewed(page, real):
        await page.get_by_role("link", name="tiny").click()
        await page.get_by_role("link", name="timeline").click()
        told = {tuple(row[:3]): row[3:] for row in await values_of_table(page, "What is in the window")}
        assert {key: row for key, row in told.items() if key[2] != UNTOLD} == expected
        assert told["generator-0", "swaps weights", ""][2] == "0 to 6"
        assert all(why for _, what, why in told if what == "waits")
        await page.get_by_text("Every one of").click()
        every = await values_of_table(page, "Every span of the window")
        assert [row[3] for row in every if row[2] != UNTOLD] == sorted(span.start_s - first for span in spans)
        lanes = defaultdict(list)
        for process, _what, _why, start, length, *_ in every:
            lanes[process].append((start, start + length))
        for process in lanes.keys() - {"admission", "controller"}:
            reached_s, *_ = lanes[process][0]
            for start, end in lanes[process]:
                assert start <= reached_s + 2e-3, (process, start)  # no gap is without a reason
                reached_s = max(reached_s, end)
        canvas, said = page.get_by_role("application"), page.locator("#said")
        await expect(said).to_have_text(f"Seconds 0.000 to {last - first:.3f} of {last - first:.3f}.")
        await canvas.focus()
        for key, fewer in (("+", True), ("+", True), ("ArrowRight", True), ("-", True), ("Home", False)):
            before = await said.text_content()
            await page.keyboard.press(key)
            await expect(said).not_to_have_text(before)
            assert (len(await rows_of_table(page, "Every span of the window")) < len(every)) == fewer
        await page.mouse.move(700, 500)
        await page.mouse.wheel(0, -400)
        await expect(said).not_to_have_text(before)


SIZES = """() => performance.getEntriesByType("resource").filter(({ name }) => name.includes("bins="))
    .map((one) => one.decodedBodySize)"""
COLOURS_OF_LANE = """(row) => {
    const canvas = document.querySelector(".timeline");
    const scale = canvas.width / canvas.clientWidth;
    const { data } = canvas.getContext("2d").getImageData(120 * scale, (40 * row + 34) * scale, canvas.width - 120 * scale, 1);
    const found = new Set();
    for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
    return [...found];
}"""
"""The colours along the foot of a lane."""


def write_many_spans(folder):
    """Give a run's folder a timeline of 10,000 s: a million samples by four generators, and ten swaps."""
    sample = (
        b'{"name":"generate","start_s":%d.%02d,"end_s":%d.%02d,"process":"generator-%d","attributes":{"newest_version":%d}}\n'
    )
    swap = b'{"name":"swap","start_s":%d,"end_s":%d,"process":"generator-0","attributes":{"version":%d}}\n'
    with (folder / SPANS_FILE).open("wb") as file:
        for i in range(1_000_000):
            file.write(sample % (1000 + i // 100, i % 100, 1000 + (i + 50) // 100, (i + 50) % 100, i % 4, i // 100_000))
        for i in range(10):
            file.write(swap % (1000 + 1000 * i, 1001 + 1000 * i, i))


async def test_a_million_spans_do_not_hold_the_timeline(page, recorded):
    write_many_spans(recorded)
    async with viewed(page, recorded):
        await page.get_by_role("link", name="tiny").click()
        await page.get_by_role("link", name="timeline").click()
        found = {(row[0], row[1]): row[3:] for row in await rows_of_table(page, "What is in the window")}
        assert found["generator-2", "generates"][0] == "250000"
        assert float(found["generator-2", "generates"][1]) == pytest.approx(125_000)
        assert found["generator-0", "swaps weights"] == ["10", "10", "0 to 9"]
        versions = {"127,176,234", "229,171,119", "124,198,150", "194,154,214", "222,154,161", "112,188,193"}  # a colour each
        assert versions <= set(await page.evaluate(COLOURS_OF_LANE, 0))  # the whole run is drawn: ten versions
        await page.get_by_role("application").focus()
        for _ in range(13):
            await page.keyboard.press("+")
        await page.get_by_text("Every one of").wait_for()
        sizes = await page.evaluate(SIZES)
        assert len(sizes) > 1
        assert max(sizes) < 1 << 17


async def test_a_sample_is_shown_token_by_token_as_the_learner_saw_it(page, real):
    kept = {(row.group_id, row.index): row for row in sampled.read_samples(real) if row.step == 4}
    tokens = sampled.read_tokens(real, 4)
    assert tokens.keys() >= kept.keys()
    async with viewed(page, real):
        await page.get_by_role("link", name="tiny").click()
        await page.get_by_role("link", name="samples").click()
        await page.get_by_label("Step (").fill("4")
        await page.keyboard.press("Tab")
        ratios = {}
        for key, (part,) in tokens.items():
            trained = np.frombuffer(part.flags, np.uint8) & sampled.TRAINED > 0
            learner, behaviour = (logprobs_from_bytes(one).astype(float) for one in (part.learner, part.behaviour))
            ratios[key] = float(np.quantile(np.exp(learner - behaviour)[trained], 0.99))
        listed = {row[0]: row[1:6] for row in await rows_of_table(page, f"{len(tokens)} samples of step 4")}
        for key, row in kept.items():
            figures = (row.reward, row.num_tokens, 4 - row.oldest_version, ratios[key])
            shown = listed[f"g{key[0]}.{key[1]}"]
            assert [float(cell) for cell in (*shown[:2], *shown[3:])] == list(figures)
        group, index = max(kept, key=lambda key: kept[key].num_tokens)
        await page.get_by_role("button", name=f"g{group}.{index}", exact=True).click()
        await page.get_by_role("listbox", name=f"Tokens of g{group}.{index}").focus()
        (part,) = tokens[group, index]
        ids, flags = ids_from_bytes(part.token_ids).tolist(), np.frombuffer(part.flags, np.uint8)
        floats = [logprobs_from_bytes(getattr(part, name)).tolist() for name in ("weights", "entropy", "advantages")]
        learner, behaviour = (logprobs_from_bytes(one).tolist() for one in (part.learner, part.behaviour))
        for place, token in enumerate(ids):
            (row,) = await rows_of_table(page, "The chosen token")
            assert row[1] == (await page.locator(".tokens [aria-selected=true]").text_content())
            assert [float(cell) for cell in row[3:6]] == [ids_from_bytes(part.versions)[place], behaviour[place], learner[place]]
            assert (row[0], row[2], row[12]) == (str(place), str(token), "true")
            assert float(row[6]) == np.exp(learner[place] - behaviour[place])
            assert [float(row[7]), float(row[10]), float(row[11])] == [column[place] for column in floats]
            assert row[8:10] == [str(bool(flags[place] & bit)).lower() for bit in (sampled.KEPT, sampled.CLIPPED)]
            await page.keyboard.press("ArrowRight")
        members = LedgerReader(real).group(group).samples
        assert await values_of_table(page, "Rewards of its group") == as_values(
            [one.index, one.state, one.reward, one.num_tokens] for one in members
        )


async def test_samples_are_in_the_chosen_order_and_tokens_have_the_colour_of_the_chosen_figure(page, recorded):
    step = files.read_steps(recorded)[-1].step
    kept = [f"g{row.group_id}.{row.index}" for row in sampled.read_samples(recorded) if row.step == step]
    ((group, index), (part,)), *_ = [item for item in sampled.read_tokens(recorded, step).items() if item[1][0].texts[0] == "t0"]
    flags = np.frombuffer(part.flags, np.uint8)
    trained, is_kept, clipped = (flags & bit > 0 for bit in (sampled.TRAINED, sampled.KEPT, sampled.CLIPPED))
    version = ids_from_bytes(part.versions).tolist()
    async with viewed(page, recorded):
        await go(page, "/run/tiny/samples")
        order = page.get_by_label("Order")
        caption = f"{len(kept) + 1} samples of step {step}"
        assert [row[0] for row in await rows_of_table(page, caption)][: len(kept)] == kept
        columns = {"lowest reward": (1, 1), "highest reward": (1, -1), "longest": (2, -1), "oldest": (4, -1),
                   "highest ratio": (5, -1)}  # fmt: skip
        assert await order.locator("option").all_text_contents() == ["as kept", *columns]
        for label, (column, sign) in columns.items():
            await order.select_option(label)
            values = [row[column] for row in await values_of_table(page, caption)]
            assert values == sorted(values, key=lambda value, sign=sign: sign * value), label
            assert len(set(values)) > 1, label
        first = re.compile("/tokens.*&group={}&index={}$".format(*kept[0][1:].split(".")))
        clicked = asyncio.Event()

        async def answer_late(route):
            await clicked.wait()
            await route.continue_()

        await page.route(first, answer_late)
        async with page.expect_response(first) as answered:
            async with page.expect_request(first):
                await order.select_option("as kept")
            await page.get_by_role("button", name=f"g{group}.{index}", exact=True).click()
            await page.get_by_role("article", name=f"Sample g{group}.{index}").wait_for()
            clicked.set()
        await (await answered.value).finished()  # and it does not take the place of the sample that was clicked
        await page.evaluate("() => new Promise(requestAnimationFrame)")
        colour, spans = page.get_by_label("Colour by"), page.locator(".tokens span")
        await expect(spans).to_have_text(list(part.texts))
        figures = ["log-probability", "ratio", "weight", "clipped", "kept", "entropy", "advantage"]
        assert await colour.locator("option").all_text_contents() == ["version", *figures]
        seen = set()
        for label in ("version", *figures):
            await colour.select_option(label)
            classes = [set(one.split()) for one in await spans.evaluate_all("all => all.map(one => one.className)")]
            shades = tuple(next((one for one in own if one.startswith("shade")), "") for own in classes)
            has_shade = [True] * RANDOM_TOKENS if label == "version" else trained.tolist()
            assert [bool(one) for one in shades] == has_shade, label
            seen.add(shades)
        assert len(seen) == 1 + len(figures)  # every choice has colours of its own
        marks = {"changes": [place > 0 and version[place] != version[place - 1] for place in range(RANDOM_TOKENS)],
                 "untrained": ~trained, "clipped": clipped, "dropped": trained & ~is_kept}  # fmt: skip
        for mark, where in marks.items():  # told by a line too, whatever the colour
            assert [mark in own for own in classes] == [bool(one) for one in where], mark


async def test_ten_thousand_steps_and_hostile_text_do_not_hold_the_page(page, recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "long", ignore=shutil.ignore_patterns("samples.jsonl", "tokens.jsonl"))
    newest = files.read_steps(recorded)[-1]
    more = {f"reward_part/{number}": number / 7 for number in range(NUM_SERIES - len(newest.metrics))}
    newest = msgspec.structs.replace(newest, metrics=newest.metrics | more)
    assert len(newest.metrics) >= NUM_SERIES
    write_rows(folder / files.STEPS_FILE, *(
        msgspec.structs.replace(newest, step=step, version=step + 1, reward_mean=step / 7) for step in range(6, NUM_STEPS)
    ))  # fmt: skip
    rows = [next(sampled.read_samples(recorded)) for _ in range(2)]
    rows[0] = msgspec.structs.replace(rows[0], text=HOSTILE, prompt=HOSTILE, prompt_id=HOSTILE, parts={HOSTILE: 1.0})
    rows[1] = msgspec.structs.replace(rows[1], index=rows[0].index + 1, text="long " * 100_000)
    write_rows(folder / "samples.jsonl", *rows)
    for row, num_tokens in zip(rows, (3, 100_000), strict=True):
        for first in range(0, num_tokens, sampled.MOST_ROW_TOKENS):
            size = min(sampled.MOST_ROW_TOKENS, num_tokens - first)
            ids, floats = np.ones(size, "<i4").tobytes(), [np.full(size, -0.5, "<f4").tobytes()] * 5
            texts = (HOSTILE,) * size
            of_sample = (row.step, row.group_id, row.index, 1.0, first)
            write_rows(folder / sampled.TOKENS_FILE, sampled.TokenRow(*of_sample, ids, ids, *floats, b"\3" * size, texts))
    (folder / "logs" / "learner.log").write_text(HOSTILE)
    async with viewed(page, folder):
        await page.get_by_role("link", name="long").click()
        await page.get_by_text(f"Every value of step {NUM_STEPS - 1}").wait_for()
        took_ms = await page.evaluate("() => performance.now()")
        assert (await numbers(page))["Reward: mean"] == (NUM_STEPS - 1) / 7
        for summary in await page.locator("summary").all():
            await summary.click()
        devtools = await page.context.new_cdp_session(page)
        await devtools.send("HeapProfiler.collectGarbage")
        heap = await devtools.send("Runtime.getHeapUsage")
        heap_bytes = heap["usedSize"] + heap["embedderHeapUsedSize"] + heap["backingStorageSize"]
        assert heap_bytes < MOST_HEAP_BYTES
        print(f"10,000 steps: {took_ms:.0f} ms from the page's first byte, {heap_bytes / 1e6:.0f} MB")  # noqa: T201
        for view in ("samples", "logs"):
            await page.get_by_role("link", name=view).click()
            await page.get_by_role("heading", name=f"long: {view}").wait_for()
            if view == "logs":
                await page.get_by_label("Log of").select_option("learner.log")
                await page.get_by_label("Follow").check()
                with (folder / "logs" / "learner.log").open("a") as log:
                    log.write("\na line that came later\n")
                await page.get_by_text("a line that came later").wait_for()
            await page.get_by_text("<script>").first.wait_for()
            assert "\u202e" not in await page.content()
            assert "⟨U+202E⟩evil" in await page.locator("main").text_content()
            assert not await page.locator("main script, main img").count()
            assert "owned" not in await page.title()
        await page.get_by_role("link", name="samples").click()
        await page.get_by_role("button", name=f"g{rows[1].group_id}.{rows[1].index}", exact=True).click()
        await page.get_by_role("button", name="Show all 500000 characters").click()
        assert len(await page.get_by_label("Completion of").text_content()) == 500_000
        await expect(page.locator(".tokens span")).to_have_count(2000)  # of its 10^5 tokens
        await page.get_by_label("From token").fill("99999")
        await page.keyboard.press("Tab")
        await expect(page.locator(".tokens span")).to_have_count(1)
        assert (await rows_of_table(page, "The chosen token"))[0][:2] == ["99999", HOSTILE_SHOWN]
        assert not await page.locator("main script, main img").count()


async def test_the_keyboard_and_a_screen_reader_reach_everything(page, recorded, tmp_path):
    assert await page.evaluate("() => fetch('http://example.org/').catch(() => 'refused')") == "refused"
    assert page.elsewhere == ["http://example.org/"]  # so what the page asks elsewhere is seen, here and in the other tests
    page.elsewhere.clear()
    page.troubles.clear()
    async with viewed(page, recorded, shutil.copytree(recorded, tmp_path / "copied")):
        await page.get_by_role("link", name="tiny").wait_for()
        for path, heading in HEADINGS.items():
            await go(page, path)
            await expect(page.locator("h1")).to_have_text(heading)
            await expect(page.locator("main")).to_be_focused()
            if path in LATER:
                role, name = LATER[path]
                await page.get_by_role(role, name=name).first.wait_for()
            await assert_accessible(page, heading.replace(": ", "-"))
