"""A damaged ledger: whatever is changed on the disk is a LedgerError with table and row, is harmless, or is never trained."""

import contextlib
import resource
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.buffer.open import open_buffer
from asyncrl.config.load import parse_config
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Samples, logprobs_to_bytes
from tests.builders import make_sample, score_of

CONFIG = parse_config({"algorithm": {"groups_per_step": 1, "group_size": 2}, "buffer": {"max_staleness": 7}})
LONG = 600
"""Tokens of each sample: enough that payloads are compressed."""
TRAINED_COLUMNS = [
    ("samples", "file"), ("samples", "start"), ("samples", "size"), ("samples", "checksum"),
    ("groups", "prompt"), ("groups", "prompt_id"),
    ("groups", "size"), ("groups", "checksum"), ("scores", "members"), ("scores", "checksum"),
    ("scores", "reference"), ("steps", "group_ids"), ("steps", "params"), ("steps", "checksum"),
]  # fmt: skip
OTHER_COLUMNS = [
    ("groups", "version"), ("groups", "attempt"), ("groups", "state"), ("groups", "retries"), ("groups", "returns"),
    ("groups", "cursor"), ("groups", "issued_s"), ("samples", "members"), ("samples", "newest"), ("steps", "state"),
    ("steps", "step"), ("steps", "max_staleness"), ("meta", "value"), ("scores", "worker"), ("groups", "generator"),
]  # fmt: skip
VALUES = st.sampled_from([
    None, -1, 10**9, 2**62, 1.5, float("inf"), "", "text", "[1, 2", '{"a": "b"}', b"", b"\xff" * 9, "ready",
])  # fmt: skip


def fill(folder):
    """Leave groups in every state: trained, taken, ready, scoring, running."""
    buffer = open_buffer(CONFIG, folder)
    buffer.learner_restarted(0, 0.0)
    for group_id in range(5):
        buffer.issue(Prompt(f"p{group_id}", text="1+1="), "g0", version=0, group_size=2, now=0.0, cursor=group_id + 1)
        for index in range(2 if group_id < 4 else 1):
            buffer.add_samples([Samples.of([make_sample(group_id, index, [5] * LONG)])], 1.0)
            if group_id < 3:
                reference = logprobs_to_bytes([-0.25] * LONG)
                buffer.add_scores([score_of(group_id, index, 1.0 + index, {"a": 0.5}, reference_logprobs=reference)], 2.0)
    buffer.take(0, 3.0)
    buffer.mark_trained(0, 3.0)
    buffer.take(1, 3.0)
    buffer.close()


def damage(folder, table, column, value, row):
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
        rows = [each for (each,) in connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid")]
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, rows[row % len(rows)]))


def read_all(folder):
    """Resume, train again what a learner from version 0 repeats, and take what is ready; return what would be trained."""
    buffer = open_buffer(CONFIG, folder)
    try:
        buffer.learner_restarted(0, 4.0)
        return [buffer.take(step, 4.0).groups for step in range(3)]
    finally:
        buffer.close()


def same_or_refused(folder, before):
    """Check that what comes back is what was written, or one LedgerError."""
    with contextlib.suppress(LedgerError):
        assert read_all(folder) == before
    with contextlib.suppress(LedgerError):
        reader = LedgerReader(folder)
        reader.counts()
        reader.steps()
        reader.sample(0, 0)


class Whole(tuple):
    """A ledger's files, and what is trained from it."""

    def __repr__(self):
        return "the whole ledger"

    def put(self, folder, flipped_bit=None):
        """Make `folder` hold the ledger and nothing else, with one bit flipped."""
        for leftover in folder.iterdir():
            leftover.unlink()
        for name, content in self[0].items():
            damaged = bytearray(content)
            if flipped_bit is not None and 0 <= flipped_bit < 8 * len(content):
                damaged[flipped_bit // 8] ^= 1 << flipped_bit % 8
            if flipped_bit is not None:
                flipped_bit -= 8 * len(content)
            (folder / name).write_bytes(damaged)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fill(folder)
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("ledger.sqlite*"))}
    assert len(files) == 3, "the ledger, its lock and one file of payloads"
    return Whole((files, read_all(folder)))


@pytest.mark.parametrize(("table", "column"), TRAINED_COLUMNS, ids=lambda value: value)
def test_a_changed_value_that_is_trained_is_a_ledger_error_with_table_and_row(tmp_path, whole, table, column):
    whole.put(tmp_path)
    damage(tmp_path, table, column, {"file": 9, "start": 7, "size": 10**9, "checksum": 1}.get(column, "[9]"), row=0)
    with pytest.raises(LedgerError, match=f"table ({table}|samples), row .*(the checksum is|; the file is damaged there)"):
        read_all(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(TRAINED_COLUMNS + OTHER_COLUMNS), value=VALUES, row=st.integers(0, 9))
def test_any_value_anywhere_is_the_same_content_or_a_ledger_error(tmp_path, whole, place, value, row):
    whole.put(tmp_path)
    with contextlib.suppress(sqlite3.IntegrityError):
        damage(tmp_path, *place, value, row)
    if place in OTHER_COLUMNS:
        with contextlib.suppress(LedgerError):  # such a change is not content: it may be another, consistent history
            read_all(tmp_path)
    else:
        same_or_refused(tmp_path, whole[1])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0.0, 0.999999))
def test_a_single_flipped_bit_is_never_trained(tmp_path, whole, place):
    whole.put(tmp_path, flipped_bit=int(place * 8 * sum(map(len, whole[0].values()))))
    try:
        after = read_all(tmp_path)
    except LedgerError:
        return
    written = {group.group_id: group for groups in whole[1] for group in groups}
    for groups in after:
        for group in groups:
            assert group == written[group.group_id]


def test_a_forged_size_allocates_nothing(tmp_path, whole):
    whole.put(tmp_path)
    damage(tmp_path, "groups", "size", 10**9, row=4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LedgerError, match="table groups, row 4"):
        read_all(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
