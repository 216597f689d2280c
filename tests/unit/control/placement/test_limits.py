"""What a control group leaves to this process, and what generation's share of a device means in cores."""

import os
import subprocess
import sys

import psutil
import pytest

from asyncrl.control.placement import limits
from asyncrl.errors import ConfigError

GIB = 1 << 30
HELD = """
import os
from asyncrl.config.load import parse_config
from asyncrl.control.placement.limits import keep_to_own_cores
keep_to_own_cores(parse_config({"placement": {"kind": "async_hybrid"}}))
print(len(os.sched_getaffinity(0)))
"""


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Write files of the root group, which is that of this process in a container."""
    monkeypatch.setattr(limits, "CONTROL_GROUPS", tmp_path)

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("_", ".", 1)).write_text(text + "\n")

    return write


def test_a_container_s_limits_count_and_its_cached_files_are_free(group):
    group(
        memory_max=str(2 * GIB), memory_current=str(GIB), memory_stat=f"anon 1\ninactive_file {GIB // 4}", cpu_max="150000 100000"
    )
    assert limits.total_memory() == 2 * GIB
    assert limits.available_memory() == GIB + GIB // 4
    assert limits.core_quota() == 1.5


def test_without_a_limit_the_numbers_are_the_machine_s(group):
    for files in ({}, {"memory_max": "max", "memory_current": "1", "cpu_max": "max 100000"}, {"memory_max": "", "cpu_max": ""}):
        group(**files)
        assert limits.total_memory() == psutil.virtual_memory().total
        assert limits.available_memory() > 0
        assert limits.core_quota() == float("inf")


def test_the_least_of_a_group_and_those_above_it_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CONTROL_GROUPS", tmp_path)
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setattr(limits, "_control_groups", lambda: [inner, inner.parent, tmp_path])
    for folder, limit in ((inner, 3 * GIB), (inner.parent, GIB)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("0\n")
    assert limits.total_memory() == GIB


# -- generation's share --------------------------------------------------------------------------------------------------


def test_a_share_is_rounded_down_to_whole_cores():
    assert limits.own_cores(0.5, {4, 7}) == limits.own_cores(0.99, {4, 7}) == {7}
    assert limits.own_cores(0.5, range(64), quota=2.0) == {63}  # a container that may use two cores' time
    for share in (0.25, 0.3):
        with pytest.raises(ConfigError, match=rf"{share:g} of 2 cores is .* at least 0.50"):
            limits.own_cores(share, {4, 7})


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="half of one core is no core")
def test_a_generator_is_held_to_its_cores():
    told = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(told) == len(os.sched_getaffinity(0)) // 2
