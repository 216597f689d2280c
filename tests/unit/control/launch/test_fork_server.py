"""Real processes: forked with what was imported, in a session of their own, gone with their server.

The fork server imports a module that puts a small program in place of a stage. What a child says arrives in a named pipe, and
however it ends, that is end of file.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from asyncrl.control.launch import fork_server
from asyncrl.control.launch.fork_server import ForkLauncher
from asyncrl.control.launch.processes import LocalProcess, ProcessSpec
from asyncrl.errors import LaunchError

STAGE = """
import json, os, subprocess, sys, time

async def stage(kind, name, folder, *, detached):
    with open(folder / "life", "w") as life:
        if name == "leaves-one-behind":
            os.set_inheritable(life.fileno(), True)
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], close_fds=False)
        said = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "kind": kind, "extra": os.getenv("EXTRA"),
                "threads": os.environ["OMP_NUM_THREADS"], "has_heavy": "heavy" in sys.modules}
        print("this is", name, flush=True)
        print(json.dumps(said), file=life, flush=True)
        if name.startswith("code-"):
            return int(name.removeprefix("code-"))
        time.sleep(600)

sys.modules["__main__"]._main = stage
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a space in its name, from which modules are imported."""
    site = tmp_path / "a run"
    site.mkdir()
    (site / "stage.py").write_text(STAGE)
    (site / "heavy.py").write_text("")
    (site / "broken.py").write_text("import nothing_of_that_name")
    (site / "slow.py").write_text(f"import time\nopen({str(site / 'begun')!r}, 'w').close()\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    os.mkfifo(site / "life")
    return site


@contextlib.asynccontextmanager
async def launching(folder: Path, *modules: str, timeout_s: float = 60.0) -> AsyncIterator[ForkLauncher]:
    launcher = ForkLauncher(folder, {"learner"}, modules, timeout_s)
    try:
        yield launcher
    finally:
        await launcher.close()


def spec(folder: Path, name: str) -> ProcessSpec:
    command = (sys.executable, "-P", "-m", "asyncrl.pipeline", "learner", name, str(folder), "1")
    return ProcessSpec(name, "learner", 1, command, folder / "logs" / f"{name}.log", 2, {"EXTRA": "here"})


async def start(launcher: ForkLauncher, folder: Path, name: str) -> tuple[LocalProcess, dict[str, object], TextIO]:
    process = await launcher.start(spec(folder, name))
    async with asyncio.timeout(20):
        pipe = await asyncio.to_thread(open, folder / "life")
        while not (said := await asyncio.to_thread(pipe.readline)):  # a child that is being killed had opened the fifo too
            await asyncio.sleep(0.01)
    return process, json.loads(said), pipe


async def ends_with(launcher: ForkLauncher, folder: Path, code: int) -> None:
    """See that a child can be started and that its exit code is told."""
    process, _, pipe = await start(launcher, folder, f"code-{code}")
    assert await process.wait() == code
    await end_of(pipe)


async def end_of(pipe: TextIO) -> None:
    """Return once every process that held the pipe is gone."""
    async with asyncio.timeout(20):
        await asyncio.to_thread(pipe.read)
    pipe.close()


async def test_a_child_is_what_a_process_of_its_own_would_be_listed_by_its_command_and_ends_at_a_signal(folder: Path) -> None:
    async with launching(folder, "broken", "stage", "heavy") as launcher:  # what cannot be imported is left to the child
        process, said, pipe = await start(launcher, folder, "sleeps")
        assert said["pid"] == said["session"] == process.pid
        assert said["parent"] not in {os.getpid(), process.pid}
        assert (said["kind"], said["threads"], said["extra"], said["has_heavy"]) == ("learner", "2", "here", True)
        assert f" -m asyncrl.pipeline learner sleeps {folder} 1" in " ".join(psutil.Process(process.pid).cmdline())
        process.terminate()
        assert [await process.wait(), await process.wait()] == [-signal.SIGTERM, -signal.SIGTERM]
        assert (folder / "logs" / "sleeps.log").read_text() == "this is sleeps\n"
        await end_of(pipe)
        process.kill()


async def test_kill_takes_the_group_and_children_go_with_their_server_and_the_next_start_has_a_new_one(folder: Path) -> None:
    async with launching(folder, "stage") as launcher:
        process, said, pipe = await start(launcher, folder, "leaves-one-behind")
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        await end_of(pipe)
        process, _, pipe = await start(launcher, folder, "leaves-one-behind")
        os.kill(int(str(said["parent"])), signal.SIGKILL)
        async with asyncio.timeout(20):
            assert await process.wait() == -signal.SIGKILL
        await end_of(pipe)
        process, again, pipe = await start(launcher, folder, "sleeps")
        assert again["parent"] != said["parent"]
    await end_of(pipe)  # closing ends what is left
    assert not psutil.pid_exists(int(str(again["parent"])))
    assert await process.wait() == -signal.SIGKILL


async def test_a_start_that_is_given_up_leaves_nothing_while_the_server_imports_and_once_it_was_asked_for(folder: Path) -> None:
    async with launching(folder, "slow") as launcher, asyncio.TaskGroup() as group:
        starting = group.create_task(launcher.start(spec(folder, "sleeps")))
        async with asyncio.timeout(20):
            while not (folder / "begun").exists():
                await asyncio.sleep(0.01)
        starting.cancel()
    assert not (folder / "logs" / "sleeps.log").exists()
    async with launching(folder, "stage") as launcher:
        await ends_with(launcher, folder, 0)
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(launcher.start(spec(folder, "sleeps")))
            await asyncio.sleep(0)
            starting.cancel()
        await ends_with(launcher, folder, 4)  # the fifo is the first child's no more


async def test_a_server_that_answers_no_start_or_no_kill_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "TOLD_S", 0.2)
    async with launching(folder, "slow", timeout_s=0.5) as launcher:
        for _ in range(2):
            with pytest.raises(LaunchError, match=r"cannot start sleeps: .* within 0.5 s \(supervision.start_timeout_s\)"):
                await launcher.start(spec(folder, "sleeps"))
    assert not (folder / "logs" / "sleeps.log").exists()
    async with launching(folder, "stage") as launcher:
        process, said, pipe = await start(launcher, folder, "sleeps")
        os.kill(int(str(said["parent"])), signal.SIGSTOP)
        process.kill()
        async with asyncio.timeout(20):
            assert await process.wait() == -signal.SIGKILL
        await end_of(pipe)
        await ends_with(launcher, folder, 0)
    assert not psutil.pid_exists(int(str(said["parent"])))


async def test_a_killed_process_that_ends_slowly_does_not_cost_the_others_their_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "TOLD_S", 1.0)
    async with launching(folder, "stage") as launcher:
        process, said, pipe = await start(launcher, folder, "sleeps")
        process.on_kill(process.code)  # what kill does after the signal, which a process in a call of the kernel does not heed
        await asyncio.sleep(2.5 * fork_server.TOLD_S)
        assert not process.code.done()
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        await end_of(pipe)
        process, again, pipe = await start(launcher, folder, "sleeps")
        assert again["parent"] == said["parent"]
    await end_of(pipe)


async def test_a_log_that_cannot_be_opened_is_an_error_that_names_it(folder: Path) -> None:
    (folder / "logs" / "sleeps.log").mkdir(parents=True)
    async with launching(folder, "stage") as launcher:
        with pytest.raises(LaunchError, match=r"Is a directory: .*sleeps\.log"):
            await launcher.start(spec(folder, "sleeps"))
        await ends_with(launcher, folder, 0)


async def test_every_end_is_told_also_of_a_child_that_ends_at_once(folder: Path) -> None:
    (folder / "quick.py").write_text("import os, sys\nsys.modules['__main__']._main = lambda *_, **__: os._exit(7)\n")
    async with launching(folder, "quick") as launcher:
        children = [await launcher.start(spec(folder, "quick")) for _ in range(50)]
        async with asyncio.timeout(60):
            assert {await child.wait() for child in children} == {7}
