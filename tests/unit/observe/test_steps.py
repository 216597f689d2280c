"""steps.jsonl and eval.jsonl: what is written is read, whatever happened to the writer."""

import contextlib
import resource
from pathlib import Path

import msgspec
import pytest

from asyncrl.observe.steps import (
    AT_ONCE_BYTES,
    MOST_READ_BYTES,
    STEPS_FILE,
    JsonLines,
    StepReport,
    Tail,
    newest_row,
    read_steps,
)
from tests.builders import bytes_read, write_rows


def report(step: int, reward: float = 0.5) -> StepReport:
    return StepReport(step=step, version=step + 1, time_s=float(step), reward_mean=reward, dropped={"too_old": 2})


def test_a_repeated_step_counts_the_last_time_and_behind_a_torn_line_a_writer_starts_its_own(tmp_path: Path) -> None:
    path = tmp_path / STEPS_FILE
    write_rows(path, report(0), report(1, 0.1))
    with path.open("ab") as file:
        file.write(b'{"step": 1, "vers')
    write_rows(path, report(1, 0.9), report(2))
    assert read_steps(tmp_path) == [report(0), report(1, 0.9), report(2)]
    first, *_, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:17] + second + third)  # a line that went on behind a torn one is left out
    with path.open("ab") as file:
        file.write(msgspec.json.encode(report(3)))  # all but the end of its line: a writer cuts it off
    assert read_steps(tmp_path) == [report(0), report(2)]
    assert newest_row(path, StepReport) == report(2)


def test_a_line_that_a_disk_took_a_part_of_is_an_error_and_the_next_one_is_not_lost(tmp_path: Path) -> None:
    """No file may become larger than some: the write stops half-way, as on a disk without room."""
    path = tmp_path / STEPS_FILE
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(JsonLines[StepReport](path)) as file:
        file.write(report(0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                file.write(report(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        file.write(report(2))
    assert path.read_bytes().count(b"\n") == 2
    assert read_steps(tmp_path) == [report(0), report(2)]


async def test_rows_behind_a_long_history_are_found_in_one_look_by_each_reader(tmp_path: Path) -> None:
    path, many = tmp_path / STEPS_FILE, 2000
    write_rows(path, *(report(step) for step in range(many)))
    assert path.stat().st_size > 3 * MOST_READ_BYTES
    before = bytes_read()
    assert await Tail(path, "step", "step", 1 << 60).rows() == []  # who waits for the end wants no step
    tails = [Tail(path, "step", "step", many - 3) for _ in range(2)]
    for tail in tails:
        assert [number for number, _, _ in await tail.rows()] == [many - 2, many - 1]
        assert await tail.rows() == []
    assert bytes_read() - before < 6 * AT_ONCE_BYTES
    write_rows(path, report(many))
    assert [[number for number, _, _ in await tail.rows()] for tail in tails] == [[many], [many]]
