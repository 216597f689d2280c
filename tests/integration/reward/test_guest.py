"""What is left of a program that runs without a sandbox."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.integration.conftest import assert_gone

SCORING = """
import sys
from asyncrl.config.reward import CodeExecReward
from asyncrl.reward.sandbox.bubblewrap import open_sandbox
from asyncrl.reward.sandbox.code_exec import CodeTest, run_tests

code = f"import time; open({sys.argv[1]!r}, 'w').close(); time.sleep(600)"
run_tests(open_sandbox(CodeExecReward(sandbox="none", wall_s=600)), code, [CodeTest(stdout="")])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_sleeping_program_without_a_sandbox_ends_with_its_driver_and_that_with_the_scoring_process(tmp_path):
    begun = tmp_path / "begun"
    scoring = subprocess.Popen([sys.executable, "-c", SCORING, str(begun)])
    try:
        while not begun.exists():
            time.sleep(0.01)
        below = set(psutil.Process(scoring.pid).children(recursive=True))
        assert len(below) == 2
    finally:
        scoring.kill()
        scoring.wait()
    assert_gone(below)
