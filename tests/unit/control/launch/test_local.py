"""Real processes: tied to their parent, in a session of their own, gone with everything they started.

A process under test holds the writing end of a named pipe: what it says arrives there, and however it ends, that is end of file.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TextIO

from asyncrl.control.launch.local import LocalLauncher, LocalProcess, ProcessSpec, child_environment

SAY = "import os, subprocess, sys, time\nlife = open(sys.argv[1], 'w')\ndef say(*words): print(*words, file=life, flush=True)\n"
LEAVE_ONE_BEHIND = (
    "os.set_inheritable(life.fileno(), True)\n"
    "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], close_fds=False)\nsay('up')\n"
)


def spec(folder: Path, program: str, *arguments: str, **env: str) -> ProcessSpec:
    command = (sys.executable, "-c", program, *arguments)
    return ProcessSpec("child-0", "generator", 1, command, folder / "logs" / "child-0.log", 2, env)


async def next_line(pipe: TextIO) -> str:
    async with asyncio.timeout(20):
        return (await asyncio.to_thread(pipe.readline)).strip()


async def end_of(pipe: TextIO) -> None:
    """Return once every process that held the pipe is gone."""
    async with asyncio.timeout(20):
        await asyncio.to_thread(pipe.read)


@contextlib.asynccontextmanager
async def speaking(folder: Path, program: str) -> AsyncIterator[tuple[LocalProcess, TextIO]]:
    fifo = folder / "life"
    os.mkfifo(fifo)
    process = await LocalLauncher().start(spec(folder, SAY + program, str(fifo)))
    pipe = await asyncio.to_thread(open, fifo)
    try:
        yield process, pipe
    finally:
        pipe.close()
        process.kill()
        await process.wait()


async def test_child_leads_its_own_session_and_stdin_stays_open(tmp_path: Path) -> None:
    async with speaking(tmp_path, "say(os.getsid(0)); sys.stdin.read(); say('end of input')") as (process, pipe):
        assert await next_line(pipe) == str(process.pid)
        assert os.getsid(0) != process.pid
        process.terminate()
        assert await process.wait() == -signal.SIGTERM
        assert not await next_line(pipe)


async def test_kill_takes_the_whole_process_group(tmp_path: Path) -> None:
    async with speaking(tmp_path, LEAVE_ONE_BEHIND + "time.sleep(600)") as (process, pipe):
        assert await next_line(pipe) == "up"
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        await end_of(pipe)


def test_environment_gives_each_process_its_share_of_cores(tmp_path: Path) -> None:
    environment = child_environment({"HOME": "/somewhere", "OMP_NUM_THREADS": "64"}, spec(tmp_path, "", EXTRA="1"))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert "x86_non_temporal_threshold" in environment["GLIBC_TUNABLES"]
    assert child_environment({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, spec(tmp_path, ""))["GLIBC_TUNABLES"].endswith("=1")
    assert (environment["HOME"], environment["EXTRA"]) == ("/somewhere", "1")
