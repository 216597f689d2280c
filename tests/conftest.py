"""What all tests share: how they are spread over processes, and a Hypothesis that does not measure the machine (no deadline, no
check of how long it takes to draw) and does not draw anew on each (`pytest --hypothesis-profile explore` does).

`make test` runs first, over four processes (real runs wait a lot) and file by file, whatever is not marked `timed`. A file stays
in one process, and so do all that start vLLM: they share engines, and two at a time would only wait for each other. Files of long
tests begin first, so that no process is left with one at the end. Then those that are, one by one over five: they wait most of
the time.

Torch has one thread in a process of tests: what is computed is tiny, and threads that wait for a core that another has cost ten
times what they save.

Collecting makes a million objects that stay: no garbage is looked for among them, neither meanwhile, which is a third of the
time, nor later.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from asyncrl.control.launch.process_main import imports_without_gc

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("explore", deadline=None)
settings.register_profile("asyncrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("asyncrl")

TESTS = Path(__file__).parent
WITH_VLLM = (
    "contract/engines/test_engine.py", "contract/engines/test_vllm_parallel.py", "contract/engines/test_vllm_engine.py",
    "contract/engines/test_vllm_server.py", "integration/run/test_vllm_run.py",
)  # fmt: skip
"""In this order: the last tests of a file may end the engine that those before it share."""
TIMED = ("contract/media/test_collective_faults.py", "gpu/")
"""`timed` as a whole: faults that must be noticed in time, and whatever has the accelerator."""
LONGEST = (
    *WITH_VLLM, "integration/machines/test_ray_cluster.py", "integration/service/test_serve.py",
    "adversarial/test_failures_seen.py", "integration/experiments/test_tinker.py", "integration/machines/test_networks.py",
    "integration/run/test_sweep.py", "integration/run/test_cli.py", "integration/run/test_alarms.py",
    "integration/reward/test_reward_pool.py", "adversarial/test_reward_programs.py", "integration/run/test_run.py",
    "contract/media/test_medium.py", "integration/ranks/test_rank_cases.py",
    "integration/placement/test_synchronous_equality.py", "integration/placement/test_switch_deaths.py",
    "integration/ranks/test_ranks.py", "integration/session/test_session.py", "integration/run/test_detached.py",
    "integration/run/test_data_path.py",
)  # fmt: skip


class ByFile(LoadFileScheduling):
    """A file at a time, those with vLLM as if they were one, and those with the accelerator."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if "tests/gpu/" in file:
            return "gpu"
        if self.config.getvalue("markexpr") == "timed":
            return nodeid
        return "vllm" if file.endswith(WITH_VLLM) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    with imports_without_gc():
        return (yield)


def pytest_collection_modifyitems(items):
    def rank(item):
        name = name_of(item)
        return LONGEST.index(name) if name in LONGEST else len(LONGEST) + (not name.startswith("integration/"))

    def name_of(item):
        return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""

    items.sort(key=rank)
    for item in items:
        if name_of(item).startswith(TIMED):
            item.add_marker(pytest.mark.timed)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """List what lies where folders for sockets are made; nobody else makes them there."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as parent:  # pytest's own names are too long for sockets
        monkeypatch.setattr(tempfile, "tempdir", parent)
        yield lambda: os.listdir(parent)
