"""The ledger file: what is acknowledged survives, what is not is whole or absent, and nobody else may write it."""

import contextlib
import errno
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from asyncrl.buffer.ledger import records as rec
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.buffer.ledger.store import SqliteLedger, reading
from asyncrl.errors import LedgerError
from asyncrl.schema.codec import encode
from asyncrl.schema.samples import Prompt, Samples, Score, Scores
from tests.builders import make_sample

PARAMS = rec.StepParams(0, 4096, 1.0)


def _sample(group_id, index=0):
    return make_sample(group_id, index, [group_id, index, 7])


def _ready(group_id, now=1.0, samples=()):
    """Everything that is written of a group until it is ready; it has one sample where none are given."""
    samples = samples or [_sample(group_id)]
    scores = Scores(group_id, 0, tuple(Score(sample.index, 0.5, {"exact": 0.5}) for sample in samples), "r0")
    return [
        rec.IssuedRecord(group_id, Prompt(f"p{group_id}", text="1+1="), "g0", 0, len(samples), now),
        rec.SamplesRecord(Samples.of(samples), tuple(((0, sample.num_tokens),) for sample in samples), now),
        rec.ScoresRecord(scores, now),
        rec.MovedRecord(group_id, "scoring", "", now),
        rec.MovedRecord(group_id, "ready", "", now),
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path):
    with contextlib.closing(SqliteLedger(path, identity={"group_size": "1"})) as ledger:
        yield ledger


def test_a_ledger_that_is_gone_beside_its_payloads_is_not_replaced_by_a_new_one(ledger, path):
    ledger.write(_ready(0))
    ledger.close()
    for take_away in (lambda: path.write_bytes(b""), path.unlink):
        take_away()
        with pytest.raises(LedgerError, match=r"missing or empty, .* put it back .*, or start a new run"):
            SqliteLedger(path)
    assert not path.exists()


def test_a_ledger_that_is_removed_while_a_run_writes_it_ends_the_run(ledger, path):
    path.unlink()
    ledger.write(_ready(0))
    with pytest.raises(LedgerError, match=r"it was removed while the run used it; .* start a new run from a checkpoint"):
        ledger.sync()


def test_a_full_queue_makes_the_writer_wait_and_loses_nothing(path):
    ledger, committed = SqliteLedger(path, max_queued=5), []
    for group_id in range(20):
        ledger.write(_ready(group_id), lambda group_id=group_id: committed.append(group_id))
    ledger.close()
    assert committed == list(range(20))
    assert LedgerReader(path).counts()[0].groups == 20


def test_forgotten_payloads_are_gone_their_file_too_once_no_row_points_into_it_and_their_rows_stay(path, monkeypatch):
    monkeypatch.setattr("asyncrl.buffer.ledger.store.FILE_BYTES", 1)
    ledger = SqliteLedger(path)
    for group_id in range(3):
        ledger.write(_ready(group_id))
        ledger.sync()
    ledger.write([rec.TakenRecord(0, (0,), PARAMS, 0, 2.0), rec.TrainedRecord(0, (0,), 3.0), rec.ForgetRecord(1)])
    with pytest.raises(LedgerError, match="payloads of group 0 are gone"):
        ledger.load_groups([0])
    ledger.close()
    story = LedgerReader(path).sample(0, 0)
    assert (story.sample, story.row.reward, story.group.step) == (None, 0.5, 0)
    assert [file.name[-1] for file in sorted(path.parent.glob("ledger.sqlite.payloads-*"))] == ["2", "3"]
    with contextlib.closing(SqliteLedger(path)) as again:
        again.write(_ready(3))
        assert [group.members[0].sample for group in again.load_groups([1, 2, 3])] == [_sample(1), _sample(2), _sample(3)]
        again.write([rec.TakenRecord(1, (1,), PARAMS, 0, 4.0), rec.TrainedRecord(1, (1,), 5.0), rec.ForgetRecord(2, 2)])
        again.sync()
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE samples SET file = 3 WHERE key = 0")  # were that row looked at, the file would stay
        again.write([rec.TakenRecord(2, (2,), PARAMS, 0, 6.0), rec.TrainedRecord(2, (2,), 7.0), rec.ForgetRecord(3, 3)])
        again.sync()
    assert [file.name[-1] for file in path.parent.glob("ledger.sqlite.payloads-*")] == ["4"]


def _written_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


def test_a_step_of_short_samples_writes_a_megabyte_at_most_and_the_log_stays_short(path):
    """The quickstart's shape: 64 groups of 4 samples of 4 tokens a step, committed far more often than a run does."""
    ledger, num_steps, longest = SqliteLedger(path), 80, 0
    before = _written_bytes()
    for step in range(num_steps):
        group_ids = tuple(range(64 * step, 64 * step + 64))
        for group_id in group_ids:
            ledger.write(_ready(group_id, samples=[make_sample(group_id, index, [5, 6, 7, 8]) for index in range(4)]))
            if group_id % 2:
                ledger.sync()
        ledger.write([rec.TakenRecord(step, group_ids, PARAMS, 0, 1.0), rec.TrainedRecord(step, group_ids, 1.0)])
        longest = max(longest, path.with_name(f"{path.name}-wal").stat().st_size)
    ledger.close()
    assert (_written_bytes() - before) / num_steps <= 1e6
    assert longest <= 32 << 20


def test_long_samples_are_written_twice_at_most(path):
    ledger, payload, before = SqliteLedger(path), 0, _written_bytes()
    for group_id in range(50):
        members = Samples.of([make_sample(group_id, index, range(1000)) for index in range(8)])
        payload += len(encode(members))
        issued = rec.IssuedRecord(group_id, Prompt(f"p{group_id}"), "g0", 0, 8, 1.0)
        ledger.write([issued, rec.SamplesRecord(members, (((0, 1000),),) * 8, 1.0)])
        ledger.sync()
    ledger.close()
    assert _written_bytes() - before <= 2 * payload


def test_a_second_run_on_the_same_folder_and_one_of_another_config_are_refused(path, ledger):
    with pytest.raises(LedgerError, match=r"in use by another run \(process \d+\)"):
        SqliteLedger(path)
    ledger.close()
    with pytest.raises(LedgerError, match="made with group_size = 1, this run has 4"):
        SqliteLedger(path, identity={"group_size": "4"})
    SqliteLedger(path, identity={"group_size": "1"}).close()


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(path):
    path.write_bytes(b"something else entirely, long enough to be looked at" * 50)
    with pytest.raises(LedgerError, match="damaged"):
        SqliteLedger(path)
    assert path.read_bytes().startswith(b"something else")


def test_on_a_full_disk_a_commit_fails_whole_and_what_was_committed_is_there_once_there_is_room(path):
    told, committed = threading.Event(), []
    ledger = SqliteLedger(path, on_failure=lambda _: told.set())
    ledger.write(_ready(0), lambda: committed.append(0))
    ledger.sync()  # else all of what follows may be gathered into the one commit that fails
    (num_pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
    ledger._connection.execute(f"PRAGMA max_page_count = {num_pages + 4}")  # to SQLite this is a full disk
    for group_id in range(1, 10_000):
        with contextlib.suppress(LedgerError):
            ledger.write(_ready(group_id), lambda group_id=group_id: committed.append(group_id))
    assert told.wait(30.0)
    with pytest.raises(LedgerError, match=r"database or disk is full; .*`asyncrl resume` goes on"):
        ledger.sync()
    ledger.close()
    with contextlib.closing(SqliteLedger(path)) as again:
        assert committed == list(range(len(committed)))
        assert again.state_counts().get("ready", 0) == len(committed) > 0
        again.write(_ready(len(committed)))
        again.sync()
        assert again.state_counts() == {"ready": len(committed) + 1}


@pytest.mark.parametrize("record", [
    rec.TakenRecord(0, (), PARAMS, 0, 1.0),
    rec.IssuedRecord(0, Prompt("p", text="half a surrogate pair: \ud800"), "g0", 0, 1, 1.0),
    rec.FailureRecord(0, 0, 2**64, "generate", "no such attempt", 1.0),
], ids=["a step twice", "text", "number"])  # fmt: skip
def test_what_cannot_be_written_is_told_once_every_later_call_says_so_and_nobody_waits_for_it(path, record):
    failures, told = [], threading.Event()
    ledger = SqliteLedger(path, on_failure=lambda error: (failures.append(error), told.set()), max_queued=1)
    ledger.write([record, record], lambda: pytest.fail("never committed"))
    assert told.wait(30.0)
    for call in (lambda: ledger.write(_ready(1)), ledger.sync):
        with pytest.raises(LedgerError, match="commit failed"):
            call()
    ledger.close()
    assert len(failures) == 1
    with contextlib.closing(SqliteLedger(path)) as again:
        assert again.state_counts() == {}


CHILD = """
import sys
from pathlib import Path
from asyncrl.buffer.ledger.store import SqliteLedger
from tests.builders import make_sample
from tests.unit.buffer.test_ledger import _ready
ledger = SqliteLedger(Path(sys.argv[1]))
for group_id in range(1_000_000):
    records = _ready(group_id, samples=[make_sample(group_id, 0, [7] * 1024)])
    ledger.write(records, lambda group_id=group_id: print(group_id, flush=True))
"""


def test_killed_outright_it_holds_everything_acknowledged_and_only_whole_units(path):
    root = Path(__file__).resolve().parents[3]
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, cwd=root)
    acknowledged = [int(child.stdout.readline()) for _ in range(300)]
    child.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in child.stdout.read().split(b"\n")[:-1]]
    child.stdout.close()
    assert child.wait(60.0) == -signal.SIGKILL

    SqliteLedger(path).close()
    with sqlite3.connect(path) as connection:
        groups = {row[0] for row in connection.execute("SELECT group_id FROM groups")}
        ready = "SELECT g.group_id FROM groups g JOIN samples s ON s.key = g.group_id << 20 WHERE g.state = 'ready'"
        whole = {row[0] for row in connection.execute(ready)}
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    assert acknowledged == sorted(acknowledged)
    assert set(acknowledged) <= groups
    assert groups == whole == set(range(len(groups)))


def test_the_log_of_a_killed_run_is_read_where_nothing_can_be_written_or_the_error_says_what_to_do(path, monkeypatch):
    root = Path(__file__).resolve().parents[3]
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, cwd=root)
    assert child.stdout.readline() == b"0\n"
    child.kill()
    child.communicate()
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    assert LedgerReader(path).counts()[0].groups > 0
    index = path.with_name(f"{path.name}-shm")
    index.unlink()
    index.symlink_to("no folder/none")  # nor can SQLite make it
    with pytest.raises(LedgerError, match=r"CANTOPEN.*cannot be written; copy the folder$"):
        LedgerReader(path).counts()


def test_on_a_file_system_without_locks_the_error_says_so(path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(LedgerError, match=r"no locks \(No locks available\).*on a local disk"):
        SqliteLedger(path)


def test_a_reader_answers_while_a_run_writes(path, ledger):
    for group_id in range(3):
        ledger.write(_ready(group_id, now=float(group_id)))
    ledger.write([rec.IssuedRecord(3, Prompt("p0"), "g1", 2, 2, 5.0, replaces=0, cursor=4)])
    ledger.write([rec.FailureRecord(3, 1, 0, "reward", "raised", 6.0), rec.TakenRecord(0, (0, 1), PARAMS, 1, 7.0)])
    ledger.sync()
    reader = LedgerReader(path.parent)
    assert {count.state: count.groups for count in reader.counts()} == {"ready": 1, "running": 1, "taken": 2}
    prompts = reader.prompts()
    assert (prompts[0].prompt_id, prompts[0].groups, prompts[0].mean_reward, prompts[0].mean_tokens) == ("p0", 2, 0.5, 3.0)
    assert [(v.version, v.samples, v.tokens, v.mean_reward) for v in reader.versions()] == [(0, 3, 9, 0.5)]
    assert [(s.step, s.state, s.group_ids, s.max_staleness) for s in reader.steps()] == [(0, "taken", (0, 1), 1)]
    story = reader.sample(0, 0)
    assert [event.what for event in story.group.events] == ["issued", "ready", "taken"]
    assert (story.group.replaced_by, story.row.reward_worker, story.sample) == (3, "r0", _sample(0))
    assert reader.sample(3, 1).row.failure == "reward: raised"
    with pytest.raises(LedgerError, match="no group 9; 4 were issued"):
        reader.group(9)
    with pytest.raises(LedgerError, match="neither sample nor failure yet"):
        reader.sample(3, 0)


def test_groups_of_trained_steps_are_counted_in_the_time_that_there_is(path, ledger):
    assert LedgerReader(path).trained_in_steps() == 0
    count = "WITH RECURSIVE count(step) AS (SELECT 0 UNION ALL SELECT step + 1 FROM count LIMIT 20000)"
    steps = "INSERT INTO steps SELECT step, '[1, 2]', 'trained', '{}', 1, 0, 0.0, 0.0, 0 FROM count"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"{count} {steps}")
        connection.execute("UPDATE steps SET state = 'taken' WHERE step >= 19990")
    assert LedgerReader(path).trained_in_steps() == 2 * 19990
    with pytest.raises(LedgerError, match="takes over 0 s to count; `asyncrl inspect"):
        LedgerReader(path, limit_s=0.0).trained_in_steps()


def test_reading_the_ledger_of_a_run_that_has_ended_leaves_no_file_beside_it(path, ledger):
    ledger.write(_ready(0))
    ledger.close()
    there = sorted(path.parent.iterdir())
    reader = LedgerReader(path)
    assert reader.counts()[0].groups == 1
    assert reader.group(0).state == "ready"
    assert sorted(path.parent.iterdir()) == there


@pytest.mark.parametrize("content", [b"", b"something else entirely, long enough to be looked at" * 50], ids=["empty", "other"])
def test_reading_what_is_no_ledger_says_so(path, content):
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"cannot be read: .*it is no ledger, or the file is damaged"):
        LedgerReader(path).counts()


def test_a_file_of_another_user_is_not_said_to_be_damaged(tmp_path):
    with (
        pytest.raises(LedgerError, match=r"Permission denied; give this user .* \(chown -R\)") as refused,
        reading(tmp_path, "t", 1),
    ):
        raise PermissionError(13, "Permission denied")
    assert "damaged" not in str(refused.value)
