"""What the daemon remembers outlives it, and a damaged database costs no run."""

import contextlib
import sqlite3

import pytest

from asyncrl.errors import LaunchError
from asyncrl.serve.records import DATABASE, Answered, Records, RunRecord, TokenRecord


@pytest.fixture
def folder(tmp_path):
    records = Records(tmp_path)
    records.put_run(RunRecord(id="a", number=1, state="live", tags=("x",)), ("key", Answered("digest", "a")))
    records.put_token(TokenRecord("me", "viewer", "0" * 64, 1.0))
    records.add_event(1.0, "started", "a")
    records.close()
    return tmp_path


@pytest.mark.parametrize("damage", [b"", b"not a database" * 1000, None])
def test_runs_are_found_again_from_their_folders(folder, damage, caplog):
    path = folder / DATABASE
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100) if damage is None else damage)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    with contextlib.closing(Records(folder)) as records:
        assert records.runs["a"].state == "live"
    if damage != b"":
        assert "damaged" in caplog.text
        assert (folder / "server.damaged").exists()


def test_a_database_that_is_only_in_the_way_is_not_taken_for_a_damaged_one(folder):
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LaunchError, match="locked"):
            Records(folder, timeout_s=0.0)
    with contextlib.closing(Records(folder)) as records:
        assert set(records.tokens) == {"me"}
        assert not (folder / "server.damaged").exists()


def test_a_run_whose_record_is_damaged_too_is_named(folder, caplog):
    (folder / DATABASE).write_bytes(b"x" * 5000)
    (folder / "runs" / "a" / "served.json").write_bytes(b"{")
    with contextlib.closing(Records(folder)) as records:
        assert records.runs == {}
        assert "served.json" in caplog.text


def test_a_run_that_is_not_in_the_database_is_not_found_again_by_its_folder(folder):
    """As where the daemon is killed between the two: the client has no answer, and asks again with its key."""
    records = Records(folder)
    records.close()
    with pytest.raises(sqlite3.Error):
        records.put_run(RunRecord(id="b", number=2), ("key-b", Answered("digest", "b")))
    records = Records(folder)
    assert set(records.runs) == {"a"}
    records.close()


def test_an_event_that_is_damaged_is_told_as_one_and_the_others_are_read(folder):
    bodies = (b"[]", b'{"time_s": 1', b'{"time_s": 1, "kind": "ph\xe1se"}', b'{"time_s": 1, "kind": 5}')
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as other, other:
        other.executemany("INSERT INTO events (record) VALUES (?)", [(body,) for body in bodies])
    with contextlib.closing(Records(folder)) as records:
        records.add_event(2.0, "ended")
        told = [(event.seq, event.kind) for event in records.events(1)]
    assert told == [*((seq, "damaged") for seq in range(2, 6)), (6, "ended")]
