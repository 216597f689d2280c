import os

import msgspec

from asyncrl.control.lifecycle.pid_file import PidRecord, PidTable, begin_pids, note_pid, read_pids

LEARNER = PidRecord("learner", "learner", 42, 1, 1.5)
AGAIN = PidRecord("learner", "learner", 43, 2, 3.5)
GENERATOR = PidRecord("generator-0", "generator", 44, 1, 1.5)


def test_starts_and_ends_add_up_to_who_lives_and_a_controller_begins_anew(tmp_path):
    begin_pids(tmp_path, 1.0)
    ended = [msgspec.structs.replace(record, ended_s=9.0) for record in (LEARNER, GENERATOR)]
    for record in (LEARNER, GENERATOR, ended[0], AGAIN, ended[1]):
        note_pid(tmp_path, record)
    assert read_pids(tmp_path) == PidTable(os.getpid(), {"learner": AGAIN})
    with (tmp_path / "pids.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(GENERATOR)[:-3])  # cut short by a crash
    assert read_pids(tmp_path).processes == {"learner": AGAIN}
    begin_pids(tmp_path, 2.0)
    assert read_pids(tmp_path).processes == {}
