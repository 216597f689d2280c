"""The environment of a process that is started, and a real one: gone with everything it started."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.control.launch import processes

LEAVE_ONE_BEHIND = """
import os, subprocess, sys, time
life = open(sys.argv[1], "w")
os.set_inheritable(life.fileno(), True)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], close_fds=False)
print("up", file=life, flush=True)
time.sleep(600)
"""


def spec(folder: Path, *arguments: str, **env: str) -> processes.ProcessSpec:
    command = (sys.executable, "-c", *arguments)
    return processes.ProcessSpec("child-0", "generator", 1, command, folder / "logs" / "child-0.log", 2, env)


async def test_kill_takes_the_whole_process_group(tmp_path: Path) -> None:
    """What a process says arrives in a named pipe, and once all that hold it are gone, that is end of file."""
    fifo = tmp_path / "life"
    os.mkfifo(fifo)
    process = await processes.LocalLauncher().start(spec(tmp_path, LEAVE_ONE_BEHIND, str(fifo)))
    async with asyncio.timeout(20):
        with await asyncio.to_thread(open, fifo) as pipe:
            assert await asyncio.to_thread(pipe.readline) == "up\n"
            process.kill()
            assert await process.wait() == -signal.SIGKILL
            assert await asyncio.to_thread(pipe.read) == ""


def test_a_detached_controller_that_nobody_reaps_is_gone_all_the_same(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as zombie:
        (tmp_path / processes.PID_FILE).write_text(str(zombie.pid))
        asyncio.run(asyncio.wait_for(processes.ControllerProcess(tmp_path)._until_gone(), 20))


async def test_all_nodes_together_have_one_time_to_say_whether_they_see_the_run_s_folder(caplog) -> None:
    refusals_of = pytest.importorskip("asyncrl.control.launch.ray").refusals_of
    asked = {name: asyncio.get_running_loop().create_future() for name in ("blind", "sees", "broken", "hangs", "hangs too")}
    asked["blind"].set_result("node blind does not see the folder")
    asked["sees"].set_result("")
    asked["broken"].set_exception(OSError("no such node"))
    async with asyncio.timeout(30):
        assert await refusals_of(asked, 0.2) == ["node blind does not see the folder"]
    said = [message.rpartition("folder: ")[2] for message in caplog.messages]
    assert said == ["no such node", "no answer within 0.2 s", "no answer within 0.2 s"]


def test_environment_gives_each_process_its_share_of_cores(tmp_path: Path) -> None:
    base = {"HOME": "/somewhere", "OMP_NUM_THREADS": "64", "GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    environment = processes.child_environment(base, spec(tmp_path, EXTRA="1"))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
    assert [environment[name] for name in ("HOME", "EXTRA", "GLIBC_TUNABLES")] == ["/somewhere", "1", base["GLIBC_TUNABLES"]]
