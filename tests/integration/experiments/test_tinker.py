"""tinker_cases.py in a process of its own: the SDK leaves connections open, and Python would warn of them in later tests."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("tinker_cases.py")
WARNINGS = ("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.timeout(3000)
def test_the_sdk_runs_against_our_server():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *WARNINGS, CASES]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
