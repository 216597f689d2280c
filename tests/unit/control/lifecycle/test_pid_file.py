import itertools
import os

import msgspec

from asyncrl.control.lifecycle.pid_file import PidFile, PidRecord, PidTable, read_pids

LEARNER = PidRecord("learner", "learner", 42, 1, 1.5)
AGAIN = PidRecord("learner", "learner", 43, 2, 3.5)
GENERATOR = PidRecord("generator-0", "generator", 44, 1, 1.5)


def ended(record):
    return msgspec.structs.replace(record, ended_s=9.0)


def test_starts_and_ends_add_up_to_who_lives(tmp_path):
    file = PidFile(tmp_path)
    for record in (LEARNER, GENERATOR, ended(LEARNER), AGAIN, ended(GENERATOR)):
        file.note(record)
    assert read_pids(tmp_path) == PidTable(os.getpid(), {"learner": AGAIN})


def test_a_controller_begins_anew(tmp_path):
    PidFile(tmp_path).note(LEARNER)
    PidFile(tmp_path).note(GENERATOR)
    assert read_pids(tmp_path).processes == {"generator-0": GENERATOR}


def test_a_start_writes_one_line_however_many_live(tmp_path):
    file, path, sizes = PidFile(tmp_path), tmp_path / "pids.jsonl", []
    for number in range(1000, 1100):
        file.note(PidRecord(f"generator-{number}", "generator", number, 1, 1.5))
        sizes.append(path.stat().st_size)
    assert len({after - before for before, after in itertools.pairwise(sizes)}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["pids.jsonl"]


def test_a_line_cut_short_by_a_crash_is_not_read(tmp_path):
    PidFile(tmp_path).note(LEARNER)
    with (tmp_path / "pids.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(GENERATOR)[:-3])
    assert read_pids(tmp_path).processes == {"learner": LEARNER}
