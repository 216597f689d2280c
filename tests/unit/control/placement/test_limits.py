"""What a control group leaves to this process, read from folders written as the kernel writes them."""

import psutil
import pytest

from asyncrl.control.placement import limits

GIB = 1 << 30


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
    assert limits.memory_limit() == limits.total_memory() == 2 * GIB
    assert limits.available_memory() == GIB + GIB // 4
    assert limits.core_quota() == 1.5


def test_without_a_limit_the_numbers_are_the_machine_s(group):
    for files in ({}, {"memory_max": "max", "memory_current": "1", "cpu_max": "max 100000"}, {"memory_max": "", "cpu_max": ""}):
        group(**files)
        assert limits.memory_limit() is None
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
    assert limits.memory_limit() == GIB
