"""Runs that outlive whoever started them: real processes, real signals."""

import asyncio
import os
import shlex
import signal
import stat
import sys
from asyncio.subprocess import DEVNULL, PIPE

import psutil
import pytest

import asyncrl
from asyncrl.control.launch.processes import is_live, read_endpoint
from asyncrl.observe.steps import read_events, read_steps
from asyncrl.schema.status import ENDED
from tests.integration.conftest import ASYNCRL, NO_EVALUATION, NO_MODEL, NO_MODELS, reached, recorded_pids, written

TERMINAL = """
import pty, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be under nohup
pty.spawn(['sh', '-c', sys.argv[1]])
"""
"""A window of a terminal: what is killed with it gets SIGHUP."""
SLOW = NO_MODELS | NO_EVALUATION | {"generate__engine": {**NO_MODEL, "token_latency_s": 0.1}, "num_steps": 500}


async def gone(folder, within_s=60.0):
    """Wait until the run's controller and all its processes are gone."""
    pids = recorded_pids(folder).values()
    async with asyncio.timeout(within_s):
        while is_live(folder) or any(psutil.pid_exists(pid) for pid in pids):
            await asyncio.sleep(0.05)


async def test_a_detached_run_goes_on_without_its_terminal_and_is_followed_and_drained_from_another(tiny, tmp_path):
    config, folder = written(tiny(**SLOW, owner__absent="go_on", owner__grace_s=0.2), tmp_path / "c.toml"), tmp_path / "tiny"
    command = f"{shlex.join(ASYNCRL)} run {config} --detach && sleep 1000"
    terminal = await asyncio.create_subprocess_exec(sys.executable, "-c", TERMINAL, command, stdin=DEVNULL, stdout=PIPE)
    async with asyncio.timeout(100):
        while f"asyncrl attach {folder}".encode() not in (line := await terminal.stdout.readline()):
            assert line
        terminal.kill()
        await terminal.wait()
        while "nobody is attached to the run; it goes on" not in (folder / "logs" / "controller.log").read_text():
            await asyncio.sleep(0.05)
        reached = len(read_steps(folder))
        while len(read_steps(folder)) < reached + 2:
            await asyncio.sleep(0.05)
    assert stat.S_IMODE(os.stat(folder / "owner.sock").st_mode) == 0o600
    attach = [sys.executable, "-m", "asyncrl", "attach", str(folder), "--plain"]
    following = await asyncio.create_subprocess_exec(*attach, stdout=PIPE)
    left = await asyncio.create_subprocess_exec(*attach, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(100):
        for one in (left, following):
            while b"step " not in await one.stdout.readline():
                pass
    left.send_signal(signal.SIGINT)  # Ctrl-C
    assert b"left; `asyncrl attach" in (await left.communicate())[1]
    assert left.returncode == 0
    async with asyncrl.connect(folder) as run:
        status = await run.drain()
    assert status.phase == "stopped"
    said = (await following.communicate())[0].decode()
    assert "stopped" in said
    assert following.returncode == 3
    await gone(folder)
    assert not (folder / "owner.sock").exists()


async def test_a_program_leaves_a_run_and_comes_back(tiny):
    settings = SLOW | {"learner__kind": "external", "learner__fake_step_s": None}
    async with asyncrl.Run(tiny(**settings), detached=True, environment={"FROM_HERE": "yes"}) as run:
        folder = run.run_folder
    endpoint = read_endpoint(folder)
    assert psutil.Process(endpoint.pid).environ()["FROM_HERE"] == "yes"
    async with asyncrl.connect(endpoint.url, token=endpoint.token) as run:  # as from another machine
        assert run.run_folder == folder
        assert (await run.stop()).phase == "stopped"
    await gone(folder)


async def test_runs_that_nobody_is_attached_to_end_as_their_configs_say(tiny):
    folders = {}
    for then in ("drain", "stop"):
        async with asyncrl.Run(tiny(**SLOW, name=then, owner__absent=then, owner__grace_s=0.5), detached=True) as run:
            await reached(run, 1)
            assert (await run.status()).phase not in ENDED
        folders[then] = run.run_folder
    for then, folder in folders.items():
        await gone(folder)
        events = [event.text for event in read_events(folder) if event.kind == "phase"]
        assert any("nobody was attached" in text for text in events), events
        assert ("draining" in (folder / "logs" / "controller.log").read_text()) == (then == "drain")


async def test_what_is_no_url_of_a_run_is_said():
    for url in ("http://", "ftp://nowhere", "http://127.0.0.1:9/v1/runs/x"):
        with pytest.raises(asyncrl.LaunchError):
            async with asyncrl.connect(url, token="x"):
                pass
