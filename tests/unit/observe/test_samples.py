"""Samples that people can read: which are kept, where, and how many."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from asyncrl.observe.samples import SAMPLES_FILE, find_sample, read_samples, rows_of
from asyncrl.observe.sink_tensorboard import TensorBoardSink
from asyncrl.observe.steps import JsonLines
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample
from tests.builders import make_sample


def group_of(group_id: int, size: int = 3) -> ScoredGroup:
    members = tuple(
        ScoredSample(
            make_sample(group_id, index, versions=[4, 5 + index], text=f"answer {index} | x"),
            0.5,
            {"exact": 1.0},
        )
        for index in range(size)
    )
    return ScoredGroup(group_id, Prompt(f"p{group_id}", text="1+1="), members)


def test_every_group_has_a_row_before_any_has_two():
    rows = rows_of(7, [group_of(group_id) for group_id in range(4)], most=6)
    assert [(row.group_id, row.index) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]
    assert (rows[-1].step, rows[-1].oldest_version, rows[-1].newest_version) == (7, 4, 6)
    assert (rows[0].prompt, rows[0].text, rows[0].reward, rows[0].parts) == ("1+1=", "answer 0 | x", 0.5, {"exact": 1.0})


def test_the_file_is_bounded_and_recent_samples_are_found(tmp_path):
    file = JsonLines(tmp_path / SAMPLES_FILE, most_bytes=4000)
    for step in range(100):
        file.write(*rows_of(step, [group_of(step)], most=3))
    file.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 5000
    assert (tmp_path / "samples.old.jsonl").exists()
    assert [row.step for row in read_samples(tmp_path)][-3:] == [99, 99, 99]
    found = find_sample(tmp_path, 99, 2)
    assert found is not None
    assert found.name == "g99.2"
    assert find_sample(tmp_path, 0, 0) is None


def test_tensorboard_gets_a_table(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write_samples(3, 1.0, rows_of(3, [group_of(1)], most=2))
    sink.close()
    (file,) = tmp_path.iterdir()
    (event,) = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    text = event.summary.value[0].tensor.string_val[0].decode()
    assert event.step == 4
    assert "| g1.0 | 1+1= | answer 0 \\| x | 0.5 |" in text
