"""The page of a daemon in a real browser: it follows runs, says who waits for whom, and takes orders of who may order."""

import contextlib
import json
import re

import msgspec
import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.load import dump_config, load_config, parse_config
from asyncrl.observe import steps as files
from asyncrl.schema.status import FailureSeen, ProcessStatus, RunStatus
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.machine import Machine, waits
from asyncrl.serve.records import Demand, Guard, Records, RunRecord, new_token
from asyncrl.serve.routes import Service
from tests.builders import write_rows
from tests.integration.conftest import NO_MODEL, tiny_settings
from tests.integration.service.browser import (
    MARKS,
    answering,
    assert_accessible,
    expect,
    go,
    log_in,
    numbers,
    opened,
    rows_of_table,
    values_of_table,
)
from tests.integration.service.test_serve import settings

pytestmark = MARKS
GIB = 1 << 30
FAILED = "Failed to load resource: the server responded with a status of "
NOT_LOADED = "Failed to load resource: net::ERR_"
GONE = {
    "/v1/runs/one/live: " + NOT_LOADED + "INCOMPLETE_CHUNKED_ENCODING", "/v1/runs/one/live: " + NOT_LOADED + "CONNECTION_REFUSED",
    "/v1/runs/one: " + NOT_LOADED + "CONNECTION_REFUSED",
}  # fmt: skip
"""What it says while there is no daemon."""
REFUSED = {"/v1/login: " + FAILED + "401 (Unauthorized)", "/v1/runs/one/config: " + FAILED + "422 (Unprocessable Entity)"}
"""What Chromium itself says of the wrong token and of the wrong value."""
SAYS_WHO_WAITS = """async () => {
    const { waiting } = await (await fetch("/v1/runs/one/status")).json();
    return document.getElementById("waiting").textContent === (waiting || "Nobody waits: everything moves.");
}"""
WAITS = "learner waits for the batch of step 3 (0.4 s) <- generator-0 waits for weights of version 3 (0.2 s)"


async def reached(page, version: int) -> None:
    """Wait until the page shows that version."""
    await page.wait_for_function(
        "least => Number(/(\\d+) of 5000/.exec(document.querySelector('main').textContent)?.[1] ?? -1) >= least", arg=version
    )


async def ordered(page, what: str, said: str | re.Pattern[str] = "") -> None:
    """Give an order, which asks once."""
    before = len(page.asked)
    await page.get_by_role("button", name=what).click()
    if said:
        await page.get_by_text(said).wait_for()
    assert [text.partition("?")[0] for text in page.asked[before:]] == [f"{what} one"]


async def test_a_live_run_is_followed_and_takes_orders(page, daemon, tmp_path):
    folder = daemon.folder / "runs" / "one"
    async with await daemon.start() as server:
        slow = {**NO_MODEL, "token_latency_s": 0.05}
        await server.submit(settings(tmp_path, num_steps=5000, generate__engine=slow), name="one", tags=["night"])
        url, token = (daemon.folder / "server.url").read_text(), (daemon.folder / "admin.token").read_text().strip()
        await opened(page, url)
        await log_in(page, "wrong")
        await page.get_by_text("This is no token of the daemon.").wait_for()
        await log_in(page, token)
        await page.get_by_role("link", name="one", exact=True).click()
        await reached(page, 3)
        await page.get_by_role("heading", name="Over seconds, since").wait_for()
        await page.locator("figure", has=page.get_by_text("Reward", exact=True)).get_by_text("Values").click()
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
        asked = "Change learner.learning_rate to 0.002, buffer.max_staleness to {}?"
        assert page.asked == [asked.format(-1), asked.format(1)]
        assert load_config(folder / "config.toml").buffer.max_staleness == 1
        change = next(event for event in files.read_events(folder) if event.kind == "change")
        first = int(change.text.removeprefix("from step ").partition(" ")[0])
        await reached(page, first + 2)
        await ordered(page, "Checkpoint", re.compile("Checkpoint: done, .*step-"))
        await ordered(page, "Pause", "Pause: done")
        await page.get_by_role("cell", name="paused", exact=True).wait_for()
        newest = files.read_steps(folder)[-1]
        await page.get_by_text(f"Every value of step {newest.step}").wait_for()
        assert (await numbers(page))["Reward: mean"] == newest.reward_mean
        await page.locator("figure", has=page.get_by_text("Staleness, versions", exact=True)).get_by_text("Values").click()
        for step, *_, bound in await values_of_table(page, f"Staleness, versions: the newest {min(newest.version, 200)}"):
            assert bound == (2 if step < first else 1), step  # the one that held, though the config has the new one
        assert "generator-0" in [row[0] for row in await rows_of_table(page, "Who waits for whom")]
        await page.wait_for_function(SAYS_WHO_WAITS)
        assert set(page.troubles) == REFUSED
        await daemon.kill()  # the page finds the next daemon, with the same cookie
        await expect(page.locator("#connection")).to_have_text("not connected")
        async with await daemon.start("--port", url.rpartition(":")[2]):
            await expect(page.locator("#connection")).to_have_text("live")
            await ordered(page, "Resume", "Resume: done")
            await reached(page, newest.version + 2)
            await ordered(page, "Drain", "Drain: done")
            await page.get_by_role("cell", name="stopped", exact=True).first.wait_for()
            steps = files.read_steps(folder)
            assert [step.step for step in steps] == list(range(len(steps)))
            shown = steps[-200:]
            await expect(page.get_by_role("region", name=f"Reward: the newest {len(shown)}")).to_be_visible()
            assert await values_of_table(page, f"Reward: the newest {len(shown)}") == [
                [step.step, step.reward_mean, step.reward_std] for step in reversed(shown)
            ]  # over the daemon's death, each once
            await ordered(page, "Resume")
            await reached(page, len(steps) + 2)
            await ordered(page, "Stop", "Stop: done")
            await page.get_by_role("cell", name="stopped", exact=True).first.wait_for()
            told = ["change", "checkpoint", "pause", "resume", "drain", "resume", "stop"]
            assert await orders(server, len(told)) == [(what, "admin") for what in told]
            await page.get_by_role("button", name="Log out").click()
            await page.get_by_label("Token", exact=True).wait_for()
            assert not await page.context.cookies()
            assert set(page.troubles) - REFUSED <= GONE
            page.troubles.clear()


async def orders(server, most: int) -> list[tuple[str, str]]:
    """What the run was asked, and by whom."""
    found: list[tuple[str, str]] = []
    async with server._http.get(f"{server._url}/v1/events") as answer:
        while len(found) < most:
            event = json.loads(await answer.content.readline())
            found += [(event["text"], event["who"])] if event["kind"] == "asked" else []
    return found


@pytest.fixture
def service(tmp_path):
    """A daemon's service with a live run and two that are queued, which nobody starts."""
    clock = SystemClock()
    with contextlib.closing(Records(tmp_path)) as records:
        keeper = Keeper(records, Machine(("GPU-a", "GPU-b"), 8, 64 * GIB), clock)
        keeper.settled.set()
        for number, (name, state, demand, priority) in enumerate([
            ("busy", "live", Demand(1, 6, 10 * GIB), 0), ("late", "queued", Demand(0, 1, GIB), 0),
            ("soon", "queued", Demand(2, 4, 60 * GIB), 3),
        ], start=1):  # fmt: skip
            gpus = ("GPU-a",) if state == "live" else ()
            records.put_run(
                RunRecord(id=name, number=number, state=state, demand=demand, priority=priority, gpus=gpus, num_steps=9)
            )
        folder = records.run_folder("busy")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(dump_config(parse_config(tiny_settings(tmp_path, name="busy"))))
        for step in range(3):
            write_rows(folder / files.STEPS_FILE, files.StepReport(
                step=step, version=step + 1, time_s=1e9 + step, reward_mean=step / 7, staleness_mean=step / 3,
                staleness_max=step, learner_idle=step / 11, generators_idle=step / 13,
            ))  # fmt: skip
        processes = (
            ProcessStatus("learner", "learner", 71, "ready", 0, "the batch of step 3", 0.42),
            ProcessStatus("generator-0", "generator", 72, "ready", 2, "weights of version 3", 0.18, joined=True),
            ProcessStatus("reward-0", "reward", 73, "restarting", 1),
        )
        failures = (FailureSeen("TypeError at rewards.py:3", "reward", 4, "'int' object is not <b>iterable</b>"),)
        keeper.statuses["busy"] = RunStatus(
            name="busy", run_folder=str(folder), phase="running", version=3, num_steps=9, waiting=WAITS, processes=processes,
            failures=failures,
        )  # fmt: skip
        yield Service(records, keeper, Guard(records, {"127.0.0.1"}, clock), clock)


async def test_queue_and_waits_are_what_the_daemon_knows_and_only_an_operator_may_order(page, service):
    records, keeper = service.records, service.keeper
    tokens = {role: new_token(records, role, role, SystemClock()) for role in ("viewer", "operator")}
    async with answering(page, service) as url:
        await opened(page, url)
        await page.get_by_role("heading", name="Log in").wait_for()
        await assert_accessible(page, "login")
        await log_in(page, tokens["operator"])
        machine = "This machine: 2 GPUs (1 in use), 8 cores (6 asked for by live runs), 64.0 GiB."
        await page.get_by_text(machine).wait_for()
        assert await rows_of_table(page, "Queue: 2") == [
            ["1", "soon", "3", "2 GPUs (1 free), 4 cores (2 free), 60 GiB (54 free)"], ["2", "late", "0", "1 before it"]
        ]  # fmt: skip
        assert [row[3] for row in await rows_of_table(page, "Queue: 2")] == waits(keeper.machine, records.runs.values())
        steps = files.read_steps(records.run_folder("busy"))
        (row,) = [row for row in await values_of_table(page, "3 of 3 runs, newest first") if row[1] == "busy"]
        newest = steps[-1]
        assert row[5:10] == [
            newest.reward_mean, newest.staleness_mean, newest.staleness_max, newest.learner_idle, newest.generators_idle
        ]  # fmt: skip
        await assert_accessible(page, "queue")
        records.put_run(msgspec.structs.replace(records.runs["soon"], state="ended", outcome="cancelled"))
        assert await rows_of_table(page, "Queue: 1") == [["1", "late", "0", "its start"]]

        await page.get_by_role("link", name="busy").click()
        status = keeper.statuses["busy"]
        await expect(page.locator("#waiting")).to_have_text(WAITS)
        assert await values_of_table(page, "Who waits for whom") == [
            [one.name + " (joined)" * one.joined, one.kind, one.pid, one.state, one.deaths, one.waiting_for,
             round(one.waiting_s, 1) if one.waiting_for else None]
            for one in status.processes
        ]  # fmt: skip
        assert await values_of_table(page, "By kind") == [[one.kind, one.stage, one.count, one.reason] for one in status.failures]
        await page.get_by_text("Every value of step 2").wait_for()
        await assert_accessible(page, "live")
        keeper.statuses["busy"] = msgspec.structs.replace(status, waiting="")
        await expect(page.locator("#waiting")).to_have_text("Nobody waits: everything moves.")

        page.answers_yes = False
        page.orders.clear()
        for number, what in enumerate(("Pause", "Checkpoint", "Drain", "Stop"), start=1):
            await page.get_by_role("button", name=what).click()
            assert [len(page.asked), page.asked[-1].partition("?")[0]] == [number, f"{what} busy"]
        await page.get_by_role("button", name="Change").click()
        await page.get_by_role("dialog").get_by_label("buffer.max_staleness").fill("5")
        await assert_accessible(page, "change")
        await page.get_by_role("dialog").get_by_label("buffer.max_staleness").press("Enter")
        assert page.asked[-1] == "Change buffer.max_staleness to 5?"
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert page.orders == []

        await page.get_by_role("button", name="Log out").click()
        await log_in(page, tokens["viewer"])
        await page.get_by_text("viewer (viewer)").wait_for()
        await expect(page.locator("#waiting")).to_have_text("Nobody waits: everything moves.")
        assert [await one.text_content() for one in await page.get_by_role("button").all()] == ["Log out"]
        for view in ("samples", "logs"):
            async with page.expect_console_message(lambda said: "403" in said.text):
                await go(page, f"/run/busy/{view}")
            await page.get_by_text("this needs at least the role operator").wait_for()
            await expect(page.locator("main table, main article, main pre")).to_have_count(0)
        paths = ("samples", "files/logs")
        assert page.troubles == [f"/v1/runs/busy/{path}: {FAILED}403 (Forbidden)" for path in paths]
        page.troubles.clear()
