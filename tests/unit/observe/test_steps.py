"""steps.jsonl and eval.jsonl: what is written is read, whatever happened to the writer."""

from pathlib import Path

from asyncrl.observe.steps import MOST_READ_BYTES, STEPS_FILE, StepReport, Tail, read_steps
from tests.builders import write_rows


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
    assert read_steps(tmp_path) == [report(0), report(2)]


async def test_rows_behind_a_long_history_are_found_in_one_look_by_each_reader(tmp_path: Path) -> None:
    path, many = tmp_path / STEPS_FILE, 2000
    write_rows(path, *(report(step) for step in range(many)))
    assert path.stat().st_size > 3 * MOST_READ_BYTES
    tails = [Tail(path, "step", "step", many - 3) for _ in range(2)]
    for tail in tails:
        assert [number for number, _, _ in await tail.rows()] == [many - 2, many - 1]
        assert await tail.rows() == []
    write_rows(path, report(many))
    assert [[number for number, _, _ in await tail.rows()] for tail in tails] == [[many], [many]]
