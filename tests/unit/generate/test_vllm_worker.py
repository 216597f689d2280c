import signal
import subprocess
import sys
from pathlib import Path

FOLLOWING = """
import sys, time
from asyncrl.generate.vllm.worker_extension import WeightsExtension
sockets, owner = sys.argv[1:]
WeightsExtension().asyncrl_follow(int(owner), sockets)
print("following", flush=True)
time.sleep(60)
"""
CORE = """
import subprocess, sys
print(subprocess.Popen([sys.executable, *sys.argv[1:]]).pid, flush=True)
sys.stdin.read()
"""


def test_a_worker_and_its_core_end_with_the_process_that_owns_them_and_take_their_sockets_along(tmp_path: Path) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    (sockets / "one").touch()
    owner = subprocess.Popen(["sleep", "60"])
    worker = ["-c", FOLLOWING, str(sockets), str(owner.pid)]
    core = subprocess.Popen([sys.executable, "-c", CORE, *worker], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        core.stdout.readline()
        assert core.stdout.readline() == b"following\n"
        owner.kill()
        assert core.wait(30) == -signal.SIGKILL
        assert core.stdout.read() == b"", "the worker, which has its output open too, is gone"
        assert not sockets.exists()
    finally:
        for process in (owner, core):
            process.kill()
            process.wait()
        core.stdout.close()
        core.stdin.close()
