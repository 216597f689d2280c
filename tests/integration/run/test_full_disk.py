"""On a disk that is full a run ends, and goes on once there is room. Mounts a small disk."""

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

import asyncrl
from asyncrl.clock import SystemClock
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.machine import Machine
from asyncrl.serve.records import Guard, Records, RunRecord, new_token
from asyncrl.serve.routes import Service
from tests.integration.conftest import NO_EVALUATION, NO_MODELS, assert_balanced, said, tiny_settings, trained_groups


@pytest.fixture(params=["400m"])
def small_disk(request, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def filler_of(disk: Path) -> Path:
    return disk / "filler"


def fill(disk: Path) -> None:
    """Take all the room that is left."""
    with filler_of(disk).open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def config_of(folder: Path, **settings) -> dict:
    return tiny_settings(folder, num_steps=10_000, **NO_EVALUATION | NO_MODELS | settings)


async def until_it_fails(config: dict, *, full: Path, once: Callable[[], bool]) -> None:
    """Run, and leave no room on a disk as soon as it is so; nor where an old checkpoint is removed after that."""
    async with asyncrl.Run(config) as run:
        async for _ in run.steps():
            if filler_of(full).exists() or once():
                fill(full)


async def go_on(config: dict, run_folder: Path) -> None:
    """Resume, train a few more steps, and compare the books with those before."""
    before = trained_groups(run_folder)
    goal = len(before) // 4 + 4
    async with asyncrl.Run(config | {"num_steps": goal}, resume=run_folder) as run:
        async for _ in run.steps():
            pass
        status = await run.status()
    assert (status.phase, status.version) == ("stopped", goal), status.reason
    assert_balanced(status)
    trained = trained_groups(run_folder)
    assert trained[: len(before)] == before
    assert len(trained) == goal * 4


async def test_a_run_on_a_full_disk_says_so_and_goes_on_once_there_is_room(small_disk):
    run_folder, config = small_disk / "tiny", config_of(small_disk)
    with pytest.raises(asyncrl.RunError, match=r"make room.*, then `asyncrl resume"):
        await until_it_fails(config, full=small_disk, once=lambda: any(run_folder.glob("checkpoints/step-*")))
    fill(small_disk)
    with pytest.raises(asyncrl.LaunchError, match=r"cannot write .*config.toml: its disk is full"):
        await go_on(config, run_folder)
    filler_of(small_disk).unlink()
    await go_on(config, run_folder)


@pytest.mark.parametrize("small_disk", ["8g"], indirect=True)  # which the run itself would need a day to fill
async def test_a_disk_that_fills_up_is_told_an_hour_before_and_ends_as_there_is_room(small_disk, quick_looks):
    async with asyncrl.Run(config_of(small_disk)) as run, asyncio.timeout(200), asyncio.TaskGroup() as group:
        told = group.create_task(said(run, "disk.full", "make room, or keep less"))
        with filler_of(small_disk).open("wb", buffering=0) as file:
            while not told.done():
                file.write(bytes(1 << 20))
                await asyncio.sleep(0.05)
        filler_of(small_disk).unlink()
        await said(run, "disk.full", "is over")


async def test_a_checkpoint_that_finds_no_room_ends_the_run_and_the_one_before_stays(tmp_path, small_disk):
    run_folder, config = tmp_path / "tiny", config_of(tmp_path, learner__fake_step_s=None)
    run_folder.mkdir()
    (run_folder / "checkpoints").symlink_to(small_disk)
    with pytest.raises(asyncrl.RunError, match=r"step-\d{6} cannot be written: .*No space left.*; make room on its disk"):
        await until_it_fails(config, full=small_disk, once=lambda: any(small_disk.glob("step-*")))
    assert not list(small_disk.glob(".partial-*"))
    assert list(small_disk.glob("step-*/trainer/state.json"))


async def test_a_version_that_finds_no_room_ends_the_run_with_that_reason(tmp_path, small_disk):
    one_by_one = {"learner__fake_step_s": None, "buffer__max_staleness": 0, "supervision__max_deaths": 0}
    config = config_of(tmp_path, broadcast={"medium": {"kind": "files", "folder": str(small_disk)}}, **one_by_one)
    with pytest.raises(asyncrl.RunError, match=r"version \d+ was not published: .*No space left"):
        await until_it_fails(config, full=small_disk, once=lambda: True)


async def test_a_daemon_on_a_full_disk_refuses_work_in_words_forgets_nothing_and_takes_it_once_there_is_room(small_disk):
    with contextlib.closing(Records(small_disk)) as records:
        keeper, clock = Keeper(records, Machine(cores=2, memory_bytes=1 << 40), SystemClock()), SystemClock()
        keeper.settled.set()
        records.put_run(RunRecord(id="ended", number=1, state="ended", outcome="stopped", version=3, num_steps=5))
        orders = {"/v1/runs": {"name": "one"}, "/v1/runs/ended/fork": {"name": "two"}, "/v1/runs/ended/resume": {}}
        service = Service(records, keeper, Guard(records, {"127.0.0.1"}), clock)
        admin = {"Authorization": f"Bearer {new_token(records, 'admin', 'admin', clock)}"}
        async with TestClient(TestServer(service.app())) as client:
            fill(small_disk)
            assert (await client.get("/readyz")).status == 503
            for path, asked in orders.items():
                refused = await client.post(path, headers=admin, json=asked)
                reason = (await refused.json())["error"]
                assert refused.status == 503, path
                assert re.fullmatch(rf"the disk of {small_disk}/runs has \d+ MiB free: make room", reason)
            assert {run: record.state for run, record in records.runs.items()} == {"ended": "ended"}
            for number in range(1000):  # the log of the database has some room of its own
                answer = await client.post("/v1/tokens", headers=admin, json={"name": f"{number}-{'x' * 50}", "role": "viewer"})
                if answer.status != 201:
                    break
            assert (answer.status, "cannot write its records" in (await answer.json())["error"]) == (507, True)
            assert (await client.get("/v1/runs", headers=admin)).status == 200
            filler_of(small_disk).unlink()
            answers = {path: await client.post(path, headers=admin, json=asked) for path, asked in orders.items()}
            assert [answer.status for answer in answers.values()] == [201, 409, 200]
            assert "no checkpoint" in (await answers["/v1/runs/ended/fork"].json())["error"]
            kept = dict(records.tokens)
    with contextlib.closing(Records(small_disk)) as records:
        assert records.tokens == kept
        assert {run: record.state for run, record in records.runs.items()} == {"one": "queued", "ended": "queued"}
