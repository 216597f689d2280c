import signal
import subprocess
import sys

import pytest

FOLLOWING = """
import os, sys, time
from asyncrl.generate.vllm_worker import WeightsExtension
owner, *cores = map(int, sys.argv[1:])
WeightsExtension().asyncrl_follow(owner, cores or [os.getpid()])
print("following", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("has_core", [True, False], ids=["worker-below-a-core", "core-that-is-its-worker"])
def test_workers_and_cores_end_with_the_process_that_owns_them(has_core: bool) -> None:
    owner, core = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    worker = subprocess.Popen(
        [sys.executable, "-c", FOLLOWING, str(owner.pid), *([str(core.pid)] if has_core else [])], stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"following\n"
        owner.kill()
        assert worker.wait(10) == -signal.SIGKILL
        if has_core:
            assert core.wait(10) == -signal.SIGKILL
    finally:
        for process in (owner, core, worker):
            process.kill()
            process.wait()
        worker.stdout.close()
