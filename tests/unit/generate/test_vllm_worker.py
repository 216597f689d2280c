import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLLOWING = """
import os, sys, time
from asyncrl.generate.vllm.worker_extension import WeightsExtension
sockets, owner, *cores = sys.argv[1:]
WeightsExtension().asyncrl_follow(int(owner), [int(core) for core in cores] or [os.getpid()], sockets)
print("following", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("has_core", [True, False], ids=["worker-below-a-core", "core-that-is-its-worker"])
def test_workers_and_cores_end_with_the_process_that_owns_them_and_take_their_sockets_along(
    has_core: bool, tmp_path: Path
) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    (sockets / "one").touch()
    owner, core = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    worker = subprocess.Popen(
        [sys.executable, "-c", FOLLOWING, str(sockets), str(owner.pid), *([str(core.pid)] if has_core else [])],
        stdout=subprocess.PIPE,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"following\n"
        assert sockets.exists()
        owner.kill()
        assert worker.wait(30) == -signal.SIGKILL
        assert not sockets.exists()
        if has_core:
            assert core.wait(30) == -signal.SIGKILL
    finally:
        for process in (owner, core, worker):
            process.kill()
            process.wait()
        worker.stdout.close()
