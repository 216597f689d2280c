"""How soon the page shows what there is, in a real Chromium: figures of service.py.

A step is shown once the page's text names it or a later one; both clocks are the machine's wall clock.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from asyncio import create_subprocess_exec, subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.load import dump_config
from asyncrl.config.run import RunConfig
from asyncrl.observe.metrics import METRICS
from asyncrl.observe.spans import SPANS_FILE
from asyncrl.observe.steps import EVENTS_FILE, STEPS_FILE, JsonLines, RunEvent, StepReport, read_steps

BROWSER = os.environ.get("ASYNCRL_CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
NUM_SHOWN = 50
"""Steps that are waited for."""
LONG_RUN = 10_000
MANY_SPANS = 1_000_000
SHOWN = """const summaries = () => [...document.querySelectorAll("summary")].map((one) => one.textContent).join();
const shown = () => Number(/Every value of step (\\d+)/.exec(summaries())?.[1] ?? -1);
const frame = () => new Promise((drawn) => { requestAnimationFrame(drawn); });"""
NOTE = f"""async (most) => {{
  {SHOWN}
  const noted = [[shown(), Date.now() / 1000]];
  while (noted.at(-1)[0] <= noted[0][0] + most) {{
    await frame();
    if (shown() > noted.at(-1)[0]) noted.push([shown(), Date.now() / 1000]);
  }}
  return noted;
}}"""
"""Gives when which step was shown first."""
DRAWN = f"""async (step) => {{
  {SHOWN}
  while (shown() < step || !document.querySelector("figure canvas")) await frame();
  return performance.now() / 1000;
}}"""
"""Gives how long after the page's address its charts were there."""
FRAMES = """async (keys) => {
  const took = [];
  for (const key of keys) {
    const began = performance.now();
    const said = document.getElementById("said");
    const shown = new Promise((seen) => {
      new MutationObserver((_, watch) => { watch.disconnect(); seen(); }).observe(said, { childList: true });
    });
    document.querySelector(".timeline").dispatchEvent(new KeyboardEvent("keydown", { key }));
    await shown;
    await new Promise((drawn) => { requestAnimationFrame(drawn); });
    took.push(performance.now() - began);
  }
  return took;
}"""
"""Gives, for each key that moves a timeline, the ms from the key until its new window is drawn."""
MOVES = ["+", "ArrowRight", "ArrowRight", "+", "ArrowLeft", "-", "ArrowRight", "-", "Home"]
"""Keys; each window that they lead to, of many spans, is told as bins."""


def can_look() -> bool:
    """Return whether there is a browser, and what drives it."""
    try:
        import playwright.async_api  # noqa: F401 - no extra has it
    except ModuleNotFoundError:
        return False
    return bool(BROWSER)


@asynccontextmanager
async def browser_page() -> AsyncIterator[Any]:
    """Yield a page of a browser."""
    from playwright.async_api import async_playwright

    async with async_playwright() as started:
        browser = await started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            yield await browser.new_page()
        finally:
            await browser.close()


async def step_on_page_s(url: str, token: str, run_folder: Path) -> float:
    """Return how late 50 steps of a daemon's live run were on its page, as a median."""
    async with browser_page() as page:
        await page.goto(f"{url}/#token={token}")
        await page.get_by_role("link", name=run_folder.name, exact=True).click()
        await page.get_by_text("Every value of step").wait_for()
        noted: list[tuple[int, float]] = await page.evaluate(NOTE, NUM_SHOWN)
    done_s = {report.step: report.time_s for report in read_steps(run_folder)}
    steps = range(noted[0][0] + 1, noted[0][0] + 1 + NUM_SHOWN)
    return statistics.median(next(shown_s for shown, shown_s in noted if shown >= step) - done_s[step] for step in steps)


def write_long_run(folder: Path, config: RunConfig) -> None:
    """Make the folder of a run that has ended after 10,000 steps."""
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
    names = [name for name in METRICS if not name.endswith("/*")]
    steps: JsonLines[StepReport] = JsonLines(folder / STEPS_FILE)
    for step in range(LONG_RUN):
        metrics = {name: (step + place) / 7 for place, name in enumerate(names)}
        steps.write(StepReport(step=step, version=step + 1, time_s=step / 8, reward_mean=step / 7, metrics=metrics))
    steps.close()
    ended = RunEvent(seq=1, time_s=LONG_RUN / 8, kind="phase", subject="stopped", version=LONG_RUN)
    (folder / EVENTS_FILE).write_bytes(msgspec.json.encode(ended) + b"\n")


def write_many_spans(folder: Path) -> None:
    """Give a run's folder a timeline of 10,000 s: a million samples by four generators, and ten swaps."""
    times, about = b'"start_s":%d.%02d,"end_s":%d.%02d,', b'"process":"generator-%d","attributes":{"newest_version":%d}}\n'
    sample = b'{"name":"generate",' + times + about
    swap = b'{"name":"swap","start_s":%d,"end_s":%d,"process":"generator-0","attributes":{"version":%d}}\n'
    with (folder / SPANS_FILE).open("wb") as file:
        for i in range(MANY_SPANS):
            file.write(sample % (1000 + i // 100, i % 100, 1000 + (i + 50) // 100, (i + 50) % 100, i % 4, i // 100_000))
        for i in range(10):
            file.write(swap % (1000 + 1000 * i, 1001 + 1000 * i, i))


async def first_chart_s(folder: Path, rounds: int) -> float:
    """Return how long the page of that run takes from its address to its charts, as a median."""
    took_s = list[float]()
    async with _viewed(folder) as (page, url):
        for _ in range(rounds):
            await page.goto("about:blank")
            await page.goto(f"{url}#/run/{folder.name}", wait_until="commit")
            took_s.append(await page.evaluate(DRAWN, LONG_RUN - 1))
    return statistics.median(took_s)


async def timeline_frame_ms(folder: Path, rounds: int) -> float:
    """Return how long the timeline of that run takes from a key to the window drawn, as a median."""
    took_ms = list[float]()
    async with _viewed(folder) as (page, url):
        await page.goto(f"{url}#/run/{folder.name}/timeline")
        await page.get_by_role("application").wait_for()
        for _ in range(rounds):
            took_ms += await page.evaluate(FRAMES, MOVES)
    return statistics.median(took_ms)


@asynccontextmanager
async def _viewed(folder: Path) -> AsyncIterator[tuple[Any, str]]:
    """Yield a page that is logged in at a viewer of a run, and the viewer's address."""
    command = [sys.executable, "-m", "asyncrl", "view", str(folder)]
    viewer = await create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert viewer.stdout is not None
        url = (await viewer.stdout.readline()).decode().strip()
        async with browser_page() as page:
            await page.goto(url)
            await page.get_by_role("link", name=folder.name, exact=True).wait_for()
            yield page, url.partition("#")[0]
    finally:
        viewer.terminate()
        await viewer.wait()
