"""A Chromium for the tests of the page, cut off from every other host; what it says and asks is kept. Checks of any page."""

import asyncio
import contextlib
import itertools
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from asyncrl.serve.daemon import view_runs
from asyncrl.serve.routes import Service

BROWSER = os.environ.get("ASYNCRL_CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
expect = playwright.expect
MOST_WAIT_MS = 100_000
"""What is waited for is there sooner, but on a machine that is loaded."""
expect.set_options(timeout=MOST_WAIT_MS)
MARKS = [
    pytest.mark.skipif(
        not BROWSER, reason="there is no chromium: apt-get install chromium-headless-shell, or set ASYNCRL_CHROMIUM"
    ),
]
OPTIONS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
ELSEWHERE = re.compile(r"^(?!http://127\.0\.0\.1:\d+/)")
SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
"""Every page, light and dark, for whoever wants to look at them: no test compares pictures."""
REACHABLE = "a, button:enabled, input, select, summary, [tabindex='0']"
NAMED_ROLES = {"button", "link", "textbox", "searchbox", "spinbutton", "combobox", "checkbox", "listbox", "application", "image",
               "region", "table", "dialog", "navigation"}  # fmt: skip
"""What a screen reader announces needs a name."""
WATCH = """
    window.reached = new Set();
    document.addEventListener("focusin", ({ target }) => reached.add(target), true);
"""
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
    const known = new Map();
    const ratioOf = (colour, grounds) => {
        const key = [colour, ...grounds].join(" ");
        if (!known.has(key)) {
            const [a, b] = [light(over(["#fff", ...grounds])), light(over([colour]))];
            known.set(key, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
        }
        return known.get(key);
    };
    const found = new Map();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const isOff = element.closest(":disabled, noscript, option");
        if (!walker.currentNode.textContent.trim() || isOff || !element.checkVisibility()) continue;
        const grounds = [];
        for (let one = element; one; one = one.parentElement) grounds.unshift(getComputedStyle(one).backgroundColor);
        const ratio = ratioOf(getComputedStyle(element).color, grounds);
        if (ratio < 4.5) found.set(`${element.tagName}.${element.className}`, ratio.toFixed(2));
    }
    return [...found];
}"""
"""Texts whose contrast to what is behind them is under 4.5 to 1."""
JUMPS = """(reachable) => [...reached].filter((one) => one.matches(reachable)).flatMap((one, i, all) => i > 0 && one.id !== "skip"
    && all[i - 1].compareDocumentPosition(one) & Node.DOCUMENT_POSITION_PRECEDING ? [all[i - 1].outerHTML, one.outerHTML] : [])"""
TABLES = "all => all.map(row => [...row.cells].map(cell => cell.textContent))"


@contextlib.asynccontextmanager
async def new_page() -> AsyncIterator[Any]:
    """Yield a page of a browser; the test fails where the page says an error, or asks another host for something.

    `troubles` has what the console says, `elsewhere` each request to another host, `asked` the text of each dialog, which is
    answered by `answers_yes`, and `orders` each request that is no GET.
    """
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=BROWSER, args=OPTIONS, timeout=MOST_WAIT_MS)
        one = await browser.new_page(viewport={"width": 1300, "height": 900})
        one.set_default_timeout(MOST_WAIT_MS)
        one.troubles, one.elsewhere, one.asked, one.orders, one.answers_yes = [], [], [], [], True

        def heard(said: Any) -> None:
            if said.type in {"error", "warning"}:
                one.troubles.append(f"{urlsplit(said.location['url']).path}: {said.text}")

        def sent(request: Any) -> None:
            if request.method != "GET":
                one.orders.append(f"{request.method} {urlsplit(request.url).path}")

        async def refuse(route: Any) -> None:
            one.elsewhere.append(route.request.url)
            await route.abort()

        async def answer(dialog: Any) -> None:
            one.asked.append(dialog.message)
            await (dialog.accept if one.answers_yes else dialog.dismiss)()

        one.on("console", heard)
        one.on("pageerror", lambda error: one.troubles.append(str(error)))
        one.on("request", sent)
        one.on("dialog", answer)
        await one.route(ELSEWHERE, refuse)
        await one.add_init_script(WATCH)
        yield one
        await browser.close()
    assert not one.troubles
    assert not one.elsewhere


async def opened(page: Any, url: str) -> None:
    """Open the page of a server; it runs no script that does not come in a file of its own."""
    answer = await page.goto(url)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy


@contextlib.asynccontextmanager
async def viewed(page: Any, *folders: Path) -> AsyncIterator[None]:
    """Look at runs where they lie, as `asyncrl view` does; the page is at their list."""
    said = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        viewing = group.create_task(view_runs(folders, 0, said.set_result))
        try:
            await opened(page, await said)
            yield
        finally:
            await page.goto("about:blank")
            viewing.cancel()


@contextlib.asynccontextmanager
async def answering(page: Any, service: Service) -> AsyncIterator[str]:
    """Have a service answer in this process; yield its address."""
    runner = service.runner()
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await page.goto("about:blank")
        service.draining = True
        await runner.cleanup()


async def go(page: Any, path: str) -> None:
    await page.evaluate("path => { location.hash = path }", path)


async def log_in(page: Any, token: str) -> None:
    await page.get_by_label("Token", exact=True).fill(token)
    await page.keyboard.press("Enter")


async def numbers(page: Any) -> dict[str, float | None]:
    """The newest values beside the charts, by the chart's title and the series' label."""
    found = await page.eval_on_selector_all(
        "figure dd", "all => all.map(one => [one.closest('figure').firstChild.textContent, one.dataset.series, one.textContent])"
    )
    return {f"{title}: {label}": as_value(text) for title, label, text in found}


async def rows_of_table(page: Any, caption: str | re.Pattern[str]) -> list[list[str]]:
    found = page.get_by_role("region", name=caption).locator("tbody tr")
    await found.first.wait_for()
    return await found.evaluate_all(TABLES)


async def values_of_table(page: Any, caption: str) -> list[list[Any]]:
    """The rows of a table, with numbers for what are numbers."""
    return [[as_value(cell) for cell in row] for row in await rows_of_table(page, caption)]


def as_value(cell: Any) -> Any:
    """What a cell of a table says: a number, None, or a text."""
    try:
        return None if cell in (None, "\u2013") else float(cell)
    except ValueError:
        return cell


def as_values(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[as_value(cell) for cell in row] for row in rows]


async def assert_accessible(page: Any, name: str) -> None:
    """The keyboard reaches all that is on the page, in its order; all has a name and a contrast. Pictures are left."""
    for scheme in ("dark", "light"):
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await page.screenshot(path=SCREENSHOTS / f"{name}-{scheme}.png", full_page=True)
    within = "dialog " if await page.locator("dialog[open]").count() else ""  # what is behind a dialog cannot be reached
    reachable = ", ".join(within + one for one in REACHABLE.split(", "))
    await page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true })")
    await page.evaluate("() => new Promise(requestAnimationFrame)")  # they fill themselves
    wanted = await page.locator(reachable).count()
    await page.evaluate("() => { document.activeElement?.blur(); scrollTo(0, 0); reached.clear() }")
    if within:
        await page.locator(reachable).first.focus()
    for _ in range(wanted + 2):
        await page.keyboard.press("Tab")
    jumps = await page.evaluate(JUMPS, reachable)
    assert jumps == [], name  # the focus goes as the page reads
    missed = await page.eval_on_selector_all(
        reachable, "all => all.filter(one => !reached.has(one) && one.checkVisibility()).map(one => one.outerHTML)"
    )
    assert missed == [], name
    unnamed = await page.eval_on_selector_all(
        REACHABLE, "all => all.filter(one => !(one.labels?.length || one.ariaLabel || one.textContent)).length"
    )
    assert not unnamed, name
    devtools = await page.context.new_cdp_session(page)
    told = [node for node in (await devtools.send("Accessibility.getFullAXTree"))["nodes"] if not node["ignored"]]
    await devtools.detach()
    nameless = [node for node in told if node["role"]["value"] in NAMED_ROLES and not node.get("name", {}).get("value")]
    assert not nameless, name
    assert within or {"main", "navigation", "banner"} <= {node["role"]["value"] for node in told}, name
    headings = await page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => Number(one.tagName[1]))")
    assert headings.count(1) == 1, name
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings)), name
    dashes = await page.eval_on_selector_all(
        "figure",
        "all => all.map(one => [...one.querySelectorAll('.key line')].map(line => line.getAttribute('stroke-dasharray')))",
    )
    assert all(len(set(each)) == len(each) for each in dashes), name  # no series is told by its colour alone
    assert await page.evaluate("() => document.getAnimations().length") == 0, name
    for scheme in ("dark", "light"):
        await page.emulate_media(color_scheme=scheme)
        await page.evaluate("() => new Promise(requestAnimationFrame)")
        assert await page.evaluate(FAINT) == [], (name, scheme)
