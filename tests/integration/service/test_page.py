"""The page in a real browser: its numbers are the files', it is alone, and hostile text does nothing."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.buffer.ledger import records as rec
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.buffer.ledger.store import SqliteLedger
from asyncrl.config.load import dump_config, load_config, parse_config
from asyncrl.control.launch.controller_process import is_live, read_endpoint
from asyncrl.observe import samples as sampled
from asyncrl.observe import steps as files
from asyncrl.observe.alarms import RULES
from asyncrl.observe.metrics import METRICS
from asyncrl.observe.spans import SPANS_FILE, read_spans
from asyncrl.schema.samples import Prompt, Samples, ids_from_bytes, logprobs_from_bytes
from tests.builders import make_sample, score_of
from tests.integration.conftest import NO_MODEL, tiny_settings
from tests.integration.service.test_serve import Daemon, settings

BROWSER = os.environ.get("ASYNCRL_CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
expect = playwright.expect
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not BROWSER, reason="there is no chromium: apt-get install chromium-headless-shell, or set ASYNCRL_CHROMIUM"
    ),
]
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\0\u202eevil\u2066"
HOSTILE_SHOWN = HOSTILE.replace("\0", "⟨U+0000⟩").replace("\u202e", "⟨U+202E⟩").replace("\u2066", "⟨U+2066⟩")
REACHABLE = "a, button:enabled, input, select, summary, [tabindex='0']"
NUM_STEPS = 10_000
NUM_SERIES = 150
MOST_HEAP_BYTES = 200_000_000
SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
"""Every page, light and dark, for whoever wants to look at them: no test compares pictures."""
HEADINGS = {
    "/run/tiny": "tiny",
    "/run/tiny/timeline": "tiny: timeline",
    "/run/tiny/samples": "tiny: samples",
    "/run/tiny/logs": "tiny: logs",
    "/run/tiny/alarms": "tiny: alarms",
    "/run/tiny/ledger": "tiny: ledger",
    "/compare/tiny,copied": "Compare 2 runs",
    "/": "Runs",
}
NAMED_ROLES = {"button", "link", "textbox", "searchbox", "spinbutton", "combobox", "checkbox", "listbox", "application", "image",
               "region", "table", "dialog", "navigation"}  # fmt: skip
"""What a screen reader announces needs a name."""
FAINT = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const over = (layers) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    const light = (rgb) => {
        const [r, g, b] = rgb.map((one) => linear(one / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const isOff = element.closest(":disabled, noscript, option");
        if (!walker.currentNode.textContent.trim() || isOff || !element.checkVisibility()) continue;
        const grounds = [];
        for (let one = element; one; one = one.parentElement) grounds.unshift(getComputedStyle(one).backgroundColor);
        const [a, b] = [light(over(["#fff", ...grounds])), light(over([getComputedStyle(element).color]))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.set(`${element.tagName}.${element.className}`, ratio.toFixed(2));
    }
    return [...found];
}"""
"""Texts whose contrast to what is behind them is under 4.5 to 1."""


async def accept(dialog) -> None:
    await dialog.accept()


@pytest.fixture
async def page():
    """A page of a browser; the test fails where the page says an error, or asks another host for something."""
    troubles: list[str] = []
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        one = await browser.new_page(viewport={"width": 1300, "height": 900})
        one.set_default_timeout(30_000)
        one.on("console", lambda said: troubles.append(said.text) if said.type in {"error", "warning"} else None)
        one.on("pageerror", lambda error: troubles.append(str(error)))
        one.on("request", lambda asked: None if asked.url.startswith("http://127.0.0.1:") else troubles.append(asked.url))
        one.on("dialog", accept)
        one.troubles = troubles
        yield one
        await browser.close()
    assert not troubles


@contextlib.asynccontextmanager
async def viewed(page, *folders: Path):
    """Look at runs where they lie; the page is at their list."""
    command = [sys.executable, "-m", "asyncrl", "view", *map(str, folders)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        await page.goto((await process.stdout.readline()).decode().strip())
        yield
    finally:
        await page.goto("about:blank")
        process.terminate()
        await process.wait()


async def numbers(page) -> dict[str, float]:
    """The newest values beside the charts, by the chart's title and the series' label."""
    found = await page.eval_on_selector_all(
        "figure dd", "all => all.map(one => [one.closest('figure').firstChild.textContent, one.dataset.series, one.textContent])"
    )
    return {f"{title}: {label}": None if len(text) == 1 and not text.isdigit() else float(text) for title, label, text in found}


async def rows_of_table(page, caption: str) -> list[list[str]]:
    found = page.get_by_role("region", name=caption).locator("tbody tr")
    await found.first.wait_for()
    return await found.evaluate_all("all => all.map(row => [...row.cells].map(cell => cell.textContent))")


async def reached(page, version: int) -> None:
    """Wait until the page shows that version."""
    while not (found := re.search(r"(\d+) of 5000", await page.locator("main").text_content())) or int(found[1]) < version:
        await asyncio.sleep(0.05)


async def go(page, path: str) -> None:
    await page.evaluate("path => { location.hash = path }", path)


async def test_a_live_run_is_followed_and_takes_orders(page, tmp_path):
    daemon, folder = Daemon(tmp_path / "served"), tmp_path / "served" / "runs" / "one"
    try:
        async with await daemon.start() as server:
            slow = {**NO_MODEL, "token_latency_s": 0.05}
            await server.submit(settings(tmp_path, num_steps=5000, generate__engine=slow), name="one", tags=["night"])
            url, token = (daemon.folder / "server.url").read_text(), (daemon.folder / "admin.token").read_text().strip()
            await page.goto(url)
            await page.get_by_label("Token", exact=True).fill("wrong")
            await page.keyboard.press("Enter")
            await page.get_by_text("This is no token of the daemon.").wait_for()
            await page.get_by_label("Token", exact=True).fill(token)
            await page.keyboard.press("Enter")
            await page.get_by_role("link", name="one", exact=True).click()
            await reached(page, 3)
            await page.get_by_role("heading", name="Over seconds, since").wait_for()
            await page.get_by_role("button", name="Change").click()
            dialog = page.get_by_role("dialog")
            await dialog.get_by_label("buffer.max_staleness").fill("-1")
            await dialog.get_by_label("learner.learning_rate").fill("0.002")
            await page.keyboard.press("Enter")
            await dialog.get_by_text("Nothing was changed; see the fields.").wait_for()
            assert "max_staleness" in await page.locator("[id='fault-buffer.max_staleness']").text_content()
            assert await dialog.get_by_label("buffer.max_staleness").get_attribute("aria-invalid")
            await dialog.get_by_label("buffer.max_staleness").fill("1")
            await dialog.get_by_role("button", name="Change").click()
            assert sorted(await rows_of_table(page, re.compile("Changed from step"))) == [
                ["buffer.max_staleness", "2", "1"], ["learner.learning_rate", "0.001", "0.002"]
            ]  # fmt: skip
            assert load_config(folder / "config.toml").buffer.max_staleness == 1
            await page.get_by_role("button", name="Pause").click()
            await page.get_by_text("Pause: done").wait_for()
            await page.get_by_role("cell", name="paused", exact=True).wait_for()
            newest = files.read_steps(folder)[-1]
            await page.get_by_text(f"Every value of step {newest.step}").wait_for()
            assert (await numbers(page))["Reward: mean"] == newest.reward_mean
            assert "generator-0" in [row[0] for row in await rows_of_table(page, "Who waits for whom")]
            await daemon.kill()  # the page finds the next daemon, with the same cookie
            port = url.rpartition(":")[2]
            async with await daemon.start("--port", port):
                await page.get_by_role("button", name="Resume").click()
                await page.get_by_text("Resume: done").wait_for()
                await reached(page, newest.version + 2)
                await page.get_by_role("button", name="Stop").click()
                await page.get_by_role("cell", name="stopped", exact=True).first.wait_for()
                assert await orders(server, 4) == [(what, "admin") for what in ("change", "pause", "resume", "stop")]
                await page.get_by_role("button", name="Log out").click()
                await page.get_by_label("Token", exact=True).wait_for()
                assert not await page.context.cookies()
            own = ("401", "422", "ERR_")  # of the browser itself: the wrong token, the wrong value, and while no daemon was there
            page.troubles[:] = [said for said in page.troubles if not any(word in said for word in own)]
    finally:
        if daemon.process is not None and daemon.process.returncode is None:
            await daemon.end()
        if is_live(folder):
            os.kill(read_endpoint(folder).pid, 9)


async def orders(server, most: int) -> list[tuple[str, str]]:
    """What the run was asked, and by whom."""
    found: list[tuple[str, str]] = []
    async with server._http.get(f"{server._url}/v1/events") as answer:
        while len(found) < most:
            event = json.loads(await answer.content.readline())
            found += [(event["text"], event["who"])] if event["kind"] == "asked" else []
    return found


@pytest.fixture
def recorded(tmp_path) -> Path:
    """The folder of a run of 6 steps that has ended, written as a run writes it."""
    folder, source = tmp_path / "tiny", random.Random(0)
    (folder / "logs").mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(parse_config(tiny_settings(tmp_path, num_steps=6))))
    names = [name for name in METRICS if not name.endswith("/*")]
    with contextlib.closing(files.JsonLines(folder / files.EVENTS_FILE)) as events:
        events.write(
            files.RunEvent(seq=1, time_s=1.0, kind="phase", subject="running", version=0),
            files.RunEvent(seq=2, time_s=2.0, kind="death", subject="generator-0", text="exit -9", version=3),
            files.RunEvent(seq=3, time_s=2.1, kind="alarm", subject="off_policy.ess", text="is 0.1: lower the bound", version=3),
            files.RunEvent(seq=4, time_s=2.5, kind="alarm", subject="reward.equal", text="look at a sample", version=4),
            files.RunEvent(seq=5, time_s=2.6, kind="alarm", subject="off_policy.ess", text="off_policy.ess is over", version=5),
            files.RunEvent(seq=6, time_s=3.0, kind="phase", subject="stopped", text="goal reached", version=6),
        )
    with contextlib.closing(files.JsonLines(folder / files.SECONDS_FILE)) as seconds:
        values = [{"idle/learner": source.random(), "memory/resident_gb/learner": source.random()} for _ in range(100)]
        seconds.write(*(files.SecondReport(1e9 + number, each) for number, each in enumerate(values)))
    steps, evals = files.JsonLines(folder / files.STEPS_FILE), files.JsonLines(folder / files.EVAL_FILE)
    ledger, samples = SqliteLedger(folder / "ledger.sqlite"), files.JsonLines(folder / sampled.SAMPLES_FILE)
    for step in range(6):
        steps.write(files.StepReport(
            step=step, version=step + 1, time_s=1e9 + step, reward_mean=source.random(), reward_std=source.random() / 1e9,
            staleness_mean=source.random(), staleness_max=2, learner_idle=source.random(), weight_sync_ms=source.random() * 1e9,
            metrics={name: source.gauss(0, 1) for name in names} | {"data/samples": float(step + 1)},
        ))  # fmt: skip
        row = sampled.SampleRow(step, step, 0, f"p{step}", "1+1=", "2", 0.0, {"exact": 1.0}, step, step + 1, 7, "stop")
        samples.write(*(msgspec.structs.replace(row, index=index, reward=source.random()) for index in range(4)))
        ledger.write([
            rec.IssuedRecord(step, Prompt(f"p{step}"), "g0", 0, 1, 1.0),
            rec.SamplesRecord(Samples.of([make_sample(step)]), (((step, 2),),), 1.0),
            rec.ScoresRecord(score_of(step, 0, source.random()), 1.0), rec.MovedRecord(step, "running", "ready", "", 1.0),
            rec.TakenRecord(step, (step,), rec.StepParams(0, 4096, 1.0), 0, 3.0), rec.TrainedRecord(step, (step,), 4.0),
        ])  # fmt: skip
    ledger.write([rec.IssuedRecord(6, Prompt("p6"), "g0", 0, 1, 1.0), rec.MovedRecord(6, "running", "dropped", "stale", 2.0)])
    for version in (0, 6):
        evals.write(files.EvalReport(version=version, accuracy=source.random(), num_samples=8, reward_mean=source.random()))
    for file in (steps, evals, ledger, samples):
        file.close()
    (folder / "logs" / "learner.log").write_text("begun\nended\n")
    return folder


async def test_every_page_has_the_numbers_of_the_files(page, recorded, tmp_path):
    copied = shutil.copytree(recorded, tmp_path / "copied")
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()}
    steps, evals = files.read_steps(recorded), files.read_evals(recorded)
    async with viewed(page, recorded, copied):
        listed = await rows_of_table(page, "2 of 2 runs, newest first")
        assert [row[1:7] for row in listed] == [
            [name, "done", "6", "6", repr(evals[0].accuracy), repr(evals[-1].accuracy)] for name in ("copied", "tiny")
        ]
        assert "token" not in page.url
        await page.get_by_role("link", name="copied").click()
        await page.get_by_text("Every value of step 5").wait_for()
        shown, newest = await numbers(page), steps[-1]
        assert shown["Reward: mean"] == newest.reward_mean
        assert shown["Idle share: learner"] == newest.learner_idle
        assert shown["Staleness, versions: bound"] == 2
        assert shown["Off-policy: effective sample size, clipped: ess"] == newest.metrics["ratio/ess"]
        assert shown["Off-policy: KL, nat: k1"] == newest.metrics["kl/k1"]
        assert shown["Weights, ms: sync"] == newest.weight_sync_ms
        assert shown["Held-out evaluations: accuracy"] == evals[-1].accuracy
        await page.get_by_role("heading", name="Over seconds, since 2001-09-09 01:46:40Z").wait_for()
        shown, second = await numbers(page), list(files.read_lines(recorded / files.SECONDS_FILE, files.SecondReport))[-1].values
        assert shown["Idle share now: learner"] == second["idle/learner"]
        assert shown["Resident memory, GB: learner"] == second["memory/resident_gb/learner"]
        figure = page.locator("figure", has=page.get_by_text("Reward", exact=True))
        await figure.get_by_text("Values").click()
        assert [[float(cell) for cell in row] for row in await rows_of_table(page, "Reward: the newest 6")] == [
            [step.step, step.reward_mean, step.reward_std] for step in reversed(steps)
        ]
        await page.get_by_text("Every value of step 5").click()
        every = {name: float(value) for name, value in await rows_of_table(page, "Every value")}
        plain = msgspec.to_builtins(newest)
        assert every == {k: v for k, v in {**plain, **newest.metrics}.items() if isinstance(v, (int, float))}
        assert not await page.get_by_role("button", name="Pause").count()

        await page.get_by_role("link", name="reward.equal").click()  # it stands, so the run's page says it
        assert [row[:2] + row[3:4] + row[5:] for row in await rows_of_table(page, "Raised, newest first")] == [
            ["reward.equal", "error", "4", "", "look at a sample"],
            ["off_policy.ess", "warning", "3", "5", "is 0.1: lower the bound"],
        ]  # fmt: skip
        rules = {row[0]: row[2:] for row in await rows_of_table(page, "Rules")}
        assert rules == {
            rule.name: [rule.meets, f"{rule.needed} of {rule.of}", rule.source, rule.advice, "goes on"] for rule in RULES
        }
        await page.get_by_role("link", name="ledger").click()
        ledger = LedgerReader(recorded)
        counts = ledger.counts()
        total = sum(row.groups for row in counts)
        assert await page.locator("#sum").text_content() == (
            f"issued {total} = running 0 + scoring 0 + ready 0 + taken 0 + trained 6 + dropped 1 + failed 0; sum holds: yes"
        )
        assert await rows_of_table(page, "Dropped and failed, by reason") == [["stale", "dropped", "1", repr(1 / 7)]]
        assert [float(row[1]) for row in await rows_of_table(page, "At step 5")] == [
            newest.metrics[name] for name in ("bias/length_ratio", "bias/reward_gap")
        ]
        assert "the sums agree" in await page.locator("#trained").text_content()
        assert await rows_of_table(page, "Groups by state") == [
            *([row.state, row.reason, str(row.groups)] for row in counts), ["all", "", str(total)]
        ]  # fmt: skip
        await page.get_by_role("link", name="samples").click()
        await page.get_by_label("Order").select_option("highest reward")
        kept = [row for row in sampled.read_samples(recorded) if row.step == 5]
        rewards = [float(row[1]) for row in await rows_of_table(page, "4 samples of step 5")]
        assert rewards == sorted((row.reward for row in kept), reverse=True)
        await page.get_by_label("Groups that are").select_option("dropped")
        ledger = LedgerReader(recorded)
        (dropped,) = ledger.groups("dropped")
        ((group, prompt, why, *_),) = await rows_of_table(page, "The newest 1 groups that are dropped")
        assert (group, prompt, why) == (f"g{dropped.group_id}", dropped.prompt.prompt_id, "stale")
        await page.get_by_role("link", name="events").click()
        await page.get_by_role("cell", name="stopped").wait_for()
        events = list(files.read_events(recorded))
        assert [row[:1] + row[2:4] for row in await rows_of_table(page, "What happened, newest first")] == [
            [str(event.seq), event.kind, event.subject] for event in reversed(events)
        ]
        await page.get_by_label("Show").select_option("death")
        await expect(page.locator("tbody tr:visible")).to_have_count(1)
        await page.get_by_role("link", name="config").click()
        assert await page.get_by_label("Config, TOML").text_content() == (recorded / "config.toml").read_text()
        await page.get_by_role("link", name="logs").click()
        await page.get_by_label("Log of").select_option("learner.log")
        await expect(page.locator("pre")).to_have_text((recorded / "logs" / "learner.log").read_text())
        await page.get_by_label("Lines of all processes with").fill("END")
        await page.keyboard.press("Enter")
        await expect(page.locator("pre")).to_have_text("learner: ended")
        await page.get_by_label("as a regular expression").check()
        await page.get_by_label("Lines of all processes with").fill("^b.g")
        await page.keyboard.press("Enter")
        await expect(page.locator("pre")).to_have_text("learner: begun")
        await go(page, "/")
        for name in ("tiny", "copied"):
            await page.get_by_label(f"Compare {name}").check()
        await page.get_by_role("button", name="Compare").click()
        await page.get_by_role("heading", name="Compare 2 runs").wait_for()
        await expect(page.locator("figure canvas")).to_have_count(4)  # drawn, not only told
        samples = [step.metrics["data/samples"] for step in steps]
        spans = {"steps": 5.0, "samples trained": sum(samples), "seconds since the first step": newest.time_s - steps[0].time_s}
        for over, last in spans.items():
            await page.get_by_label("Over", exact=True).select_option(over)
            assert (await numbers(page))["Reward: tiny"] == newest.reward_mean
            figure = page.locator("figure", has=page.get_by_text("Reward", exact=True))
            await figure.get_by_text("Values").click()
            newest_row = (await rows_of_table(page, "Reward: the newest 6"))[0]
            assert [float(cell) for cell in newest_row] == [last, newest.reward_mean, newest.reward_mean], over
        await page.get_by_label("Seeds as one line, with their range").check()  # the copy has the same settings
        shown = await numbers(page)
        assert [shown[f"Reward: tiny and 1 more{which}"] for which in ("", ", least", ", most")] == [newest.reward_mean] * 3
    assert before == {path: path.stat().st_mtime_ns for path in before}


async def test_the_timeline_tells_what_the_spans_tell_and_moves_by_keyboard(page, real):
    spans = list(read_spans(real))
    first, last = spans[0].start_s, max(span.end_s for span in spans)
    async with viewed(page, real):
        await page.get_by_role("link", name="tiny").click()
        await page.get_by_role("link", name="timeline").click()
        told = {}
        for process, what, _why, times, seconds, versions in await rows_of_table(page, "What is in the window"):
            before = told.setdefault((process, what), [0, 0.0, set()])
            told[process, what] = [before[0] + int(times), before[1] + float(seconds), before[2] | {versions}]
        for process, names, what in (
            ("generator-0", {"generate"}, "generates"), ("learner", {"step"}, "trains"),
            ("generator-0", {"swap"}, "swaps weights"),
            ("learner", {"wait", "idle"}, "waits"), ("generator-0", {"wait", "idle"}, "waits"),
        ):  # fmt: skip
            own = [span for span in spans if span.process == process and span.name in names]
            assert told[process, what][0] == len(own)
            assert told[process, what][1] == pytest.approx(sum(span.end_s - max(span.start_s, first) for span in own), rel=1e-6)
        assert told["generator-0", "swaps weights"][2] == {"0 to 6"}
        await page.get_by_text("Every one of").click()
        every = await rows_of_table(page, "Every span of the window")
        assert len(every) == len(spans)
        assert [float(row[3]) for row in every] == sorted(span.start_s - first for span in spans)
        canvas, said = page.get_by_role("application"), page.locator("#said")
        await expect(said).to_have_text(f"Seconds 0.000 to {last - first:.3f} of {last - first:.3f}.")
        await canvas.focus()
        for key, fewer in (("+", True), ("+", True), ("ArrowRight", True), ("-", True), ("Home", False)):
            before = await said.text_content()
            await page.keyboard.press(key)
            await expect(said).not_to_have_text(before)
            assert (len(await rows_of_table(page, "Every span of the window")) < len(spans)) == fewer
        await page.mouse.move(700, 500)
        await page.mouse.wheel(0, -400)
        await expect(said).not_to_have_text(before)


async def test_a_million_spans_do_not_hold_the_timeline(page, recorded):
    with (recorded / SPANS_FILE).open("wb") as file:
        for i in range(1_000_000):
            file.write(b'{"name":"generate","start_s":%d.%02d,"end_s":%d.%02d,"process":"generator-%d","attributes":{"newest_version":%d}}\n'
                       % (1000 + i // 100, i % 100, 1000 + (i + 50) // 100, (i + 50) % 100, i % 4, i // 100_000))  # fmt: skip
        for i in range(10):
            file.write(b'{"name":"swap","start_s":%d,"end_s":%d,"process":"generator-0","attributes":{"version":%d}}\n'
                       % (1000 + 1000 * i, 1001 + 1000 * i, i))  # fmt: skip
    async with viewed(page, recorded):
        await page.get_by_role("link", name="tiny").click()
        await page.get_by_role("link", name="timeline").click()
        found = {(row[0], row[1]): row[3:] for row in await rows_of_table(page, "What is in the window")}
        assert found["generator-2", "generates"][0] == "250000"
        assert float(found["generator-2", "generates"][1]) == pytest.approx(125_000)
        assert found["generator-0", "swaps weights"] == ["10", "10", "0 to 9"]
        frames = await page.evaluate("""async () => {
            const times = [];
            for (let i = 0; i < 9; i += 1) {
                const began = performance.now();
                const answer = await fetch(`/v1/runs/tiny/timeline?from=${i * 900}&to=9999&bins=900`);
                times.push([performance.now() - began, (await answer.text()).length]);
            }
            return times;
        }""")
        print("1,000,000 spans: ms and bytes a frame", frames)  # noqa: T201
        assert max(size for _, size in frames) < 1 << 17
        await page.get_by_role("application").focus()
        for _ in range(13):
            await page.keyboard.press("+")
        await page.get_by_text("Every one of").wait_for()


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """The folder of a run of 6 steps on the fake engine, ended."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "config.toml").write_text(dump_config(parse_config(tiny_settings(folder, num_steps=6, generate__engine=NO_MODEL))))
    subprocess.run([sys.executable, "-m", "asyncrl", "run", folder / "config.toml"], check=True, capture_output=True)
    return folder / "tiny"


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
        for colour in ("ratio", "advantage", "clipped"):
            await page.get_by_label("Colour by").select_option(colour)
            assert "shade" in await page.locator(".tokens span").first.get_attribute("class")
        ledger = LedgerReader(real)
        members = ledger.group(group).samples
        assert [float(row[2]) for row in await rows_of_table(page, "Rewards of its group")] == [one.reward for one in members]


async def test_ten_thousand_steps_and_hostile_text_do_not_hold_the_page(page, recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "long", ignore=shutil.ignore_patterns("samples.jsonl"))
    newest, encoder = files.read_steps(recorded)[-1], msgspec.json.Encoder()
    more = {f"reward_part/{number}": number / 7 for number in range(NUM_SERIES - len(newest.metrics))}
    newest = msgspec.structs.replace(newest, metrics=newest.metrics | more)
    with (folder / "steps.jsonl").open("ab") as file:
        for step in range(6, NUM_STEPS):
            file.write(encoder.encode(msgspec.structs.replace(newest, step=step, version=step + 1, reward_mean=step / 7)) + b"\n")
    rows, written = [next(sampled.read_samples(recorded)) for _ in range(2)], files.JsonLines(folder / sampled.TOKENS_FILE)
    rows[0] = msgspec.structs.replace(rows[0], text=HOSTILE, prompt=HOSTILE, prompt_id=HOSTILE, parts={HOSTILE: 1.0})
    rows[1] = msgspec.structs.replace(rows[1], index=rows[0].index + 1, text="long " * 100_000)
    (folder / "samples.jsonl").write_bytes(b"".join(encoder.encode(row) + b"\n" for row in rows))
    for row, num_tokens in zip(rows, (3, 100_000), strict=True):
        for first in range(0, num_tokens, sampled.MOST_ROW_TOKENS):
            size = min(sampled.MOST_ROW_TOKENS, num_tokens - first)
            ids, floats = np.ones(size, "<i4").tobytes(), [np.full(size, -0.5, "<f4").tobytes()] * 5
            texts = (HOSTILE,) * size
            written.write(sampled.TokenRow(row.step, row.group_id, row.index, 1.0, first, ids, ids, *floats, b"\3" * size, texts))
    written.close()
    (folder / "logs" / "learner.log").write_text(HOSTILE)
    async with viewed(page, folder):
        await page.get_by_role("link", name="long").click()
        await page.get_by_text(f"Every value of step {NUM_STEPS - 1}").wait_for()
        took_ms = await page.evaluate("() => performance.now()")
        assert (await numbers(page))["Reward: mean"] == (NUM_STEPS - 1) / 7
        for summary in await page.locator("summary").all():
            await summary.click()
        devtools = await page.context.new_cdp_session(page)
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
    devtools = await page.context.new_cdp_session(page)
    async with viewed(page, recorded, shutil.copytree(recorded, tmp_path / "copied")):
        await page.get_by_role("link", name="tiny").wait_for()
        for path, heading in HEADINGS.items():
            await go(page, path)
            await expect(page.locator("h1")).to_have_text(heading)
            await expect(page.locator("main")).to_be_focused()
            if path == "/":
                await page.get_by_role("link", name="tiny").wait_for()
            if path == "/run/tiny":
                await page.get_by_role("heading", name="Over seconds").wait_for()
            wanted = await page.locator(REACHABLE).count()
            await page.evaluate("() => { document.activeElement?.blur(); scrollTo(0, 0); window.reached = new Set() }")
            for _ in range(wanted + 2):
                await page.keyboard.press("Tab")
                await page.evaluate("() => reached.add(document.activeElement)")
            jumps = await page.evaluate("""() => [...reached].filter((one) => one !== document.body).filter((one, i, all) => i > 0
                && one.id !== "skip" && all[i - 1].compareDocumentPosition(one) & Node.DOCUMENT_POSITION_PRECEDING).length""")
            assert jumps == 0, path  # the focus goes as the page reads
            missed = await page.eval_on_selector_all(
                REACHABLE, "all => all.filter(one => !reached.has(one) && one.checkVisibility()).map(one => one.outerHTML)"
            )
            assert missed == [], path
            unnamed = await page.eval_on_selector_all(
                REACHABLE, "all => all.filter(one => !(one.labels?.length || one.ariaLabel || one.textContent)).length"
            )
            assert not unnamed, path
            told = [node for node in (await devtools.send("Accessibility.getFullAXTree"))["nodes"] if not node["ignored"]]
            unnamed = [node for node in told if node["role"]["value"] in NAMED_ROLES and not node.get("name", {}).get("value")]
            assert not unnamed, path
            assert {"main", "navigation", "banner"} <= {node["role"]["value"] for node in told}, path
            levels = [
                int(each.removeprefix("H"))
                for each in await page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => one.tagName)")
            ]
            assert levels.count(1) == 1, path
            assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), path
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                await page.screenshot(path=SCREENSHOTS / f"{heading.replace(': ', '-')}-{scheme}.png", full_page=True)
                assert await page.evaluate(FAINT) == [], (path, scheme)
