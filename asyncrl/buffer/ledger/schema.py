"""The tables of the ledger file, and how each kind of record becomes rows. See docs/buffer.md for what each column is for.

Members that finished together are one row of `samples`, members that were scored together one row of `scores`; the key of both is
that of the first of them. Every record that a resume or a repeat reads carries a checksum (64 bits, xxh3) over its key and
content, made when the row is.
"""

from __future__ import annotations

import itertools
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import xxhash

import asyncrl.buffer.ledger.records as rec
from asyncrl.schema.samples import Samples

SCHEMA_VERSION = 5
MAX_MEMBERS = 1 << 20
"""More than any group has; (group_id, index) is one integer key, so that rows of a group lie together."""
ROWS_PER_STATEMENT = (32, 8, 1)

Place = tuple[int, int, int]
"""Of a payload: number of the file, offset, bytes."""
Append = Callable[[Sequence[bytes]], list[Place]]
"""Writes payloads, in order, and returns where each lies."""

# No index besides the primary keys: each would add a page to nearly every commit, and what would use them is asked rarely.
# `prompt` comes last: a scan of the other columns does not read its pages.
TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, generator TEXT NOT NULL,
    version INTEGER NOT NULL, attempt INTEGER NOT NULL, size INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    step INTEGER, retries INTEGER NOT NULL, replaces INTEGER, returns INTEGER NOT NULL, cursor INTEGER NOT NULL,
    external INTEGER NOT NULL, issued_s REAL NOT NULL, ready_s REAL, checksum INTEGER NOT NULL, prompt BLOB NOT NULL);
CREATE TABLE samples (
    key INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, generator TEXT NOT NULL, newest INTEGER NOT NULL, members TEXT NOT NULL,
    started_s REAL NOT NULL, finished_s REAL NOT NULL, stored_s REAL NOT NULL, checksum INTEGER NOT NULL, file INTEGER,
    start INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE TABLE scores (
    key INTEGER PRIMARY KEY, worker TEXT NOT NULL, members TEXT NOT NULL, settled_s REAL NOT NULL, checksum INTEGER NOT NULL,
    reference BLOB);
CREATE TABLE failures (
    key INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, stage TEXT NOT NULL, reason TEXT NOT NULL, settled_s REAL NOT NULL);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, group_ids TEXT NOT NULL, state TEXT NOT NULL, params TEXT NOT NULL, max_staleness INTEGER NOT NULL,
    trained_before INTEGER NOT NULL, taken_s REAL NOT NULL, trained_s REAL, checksum INTEGER NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY, at_s REAL NOT NULL, group_id INTEGER, what TEXT NOT NULL, detail TEXT NOT NULL);
"""

_EVENT = "INSERT INTO events (at_s, group_id, what, detail) VALUES {rows}"
_OF_GROUPS = " WHERE group_id IN (SELECT value FROM json_each(?))"

_encoder = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()


def sample_key(group_id: int, index: int) -> int:
    """Return the row key of a member; keys of one group are consecutive."""
    return group_id * MAX_MEMBERS + index


def rows_of(connection: sqlite3.Connection, table: str, columns: str, group_id: int) -> list[tuple[Any, ...]]:
    """Return these columns of a group's rows, in order of their keys."""
    statement = f"SELECT {columns} FROM {table} WHERE key >= ? AND key < ? ORDER BY key"  # noqa: S608 - our own words
    return connection.execute(statement, keys_of(group_id)).fetchall()


def keys_of(group_id: int) -> tuple[int, int]:
    """Return the first key of a group, and the first behind it."""
    return sample_key(group_id, 0), sample_key(group_id + 1, 0)


def checksum(*parts: int | float | str | bytes) -> int:
    """Return 63 bits of the hash of a record's content; an int and the same float differ."""
    return xxhash.xxh3_64_intdigest(_encoder.encode(parts)) >> 1


def pack_samples(samples: Samples) -> bytes:
    """Return samples as they are stored: one byte for the form of their versions, then the content.

    Versions are nearly always all alike: then one is stored (`u`). Others are compressed (`v`). Log-probabilities do not get
    smaller, and trying takes longer than writing them.
    """
    versions, one = samples.versions, samples.versions[:4]
    if versions == one * (len(versions) // 4):
        return b"u" + _encoder.encode(msgspec.structs.replace(samples, versions=one))
    return b"v" + _encoder.encode(msgspec.structs.replace(samples, versions=zlib.compress(versions, 1)))


def unpack_samples(stored: bytes) -> Samples:
    """Return samples from their stored form, once its checksum was right."""
    samples = msgspec.msgpack.decode(memoryview(stored)[1:], type=Samples)
    is_alike = stored[:1] == b"u"
    versions = samples.versions * (len(samples.token_ids) // 4) if is_alike else zlib.decompress(samples.versions)
    return msgspec.structs.replace(samples, versions=versions)


def insert(connection: sqlite3.Connection, records: Iterable[rec.Record], append: Append) -> None:
    """Write records inside the open transaction, and samples' bytes by `append`.

    Records of groups and members are written kind by kind, for speed, in an order in which rows exist before they are changed;
    records of steps change many rows at once, so everything before them is written first.
    """
    by_kind: dict[type, list[Any]] = {}
    for record in records:
        if type(record) in _STEP_WRITERS:
            _insert_by_kind(connection, by_kind, append)
            by_kind = {}
            _STEP_WRITERS[type(record)](connection, record)
        else:
            by_kind.setdefault(type(record), []).append(record)
    _insert_by_kind(connection, by_kind, append)


def _insert_by_kind(connection: sqlite3.Connection, by_kind: dict[type, list[Any]], append: Append) -> None:
    if samples := by_kind.pop(rec.SamplesRecord, None):
        bodies = [pack_samples(record.samples) for record in samples]
        by_kind[rec.SamplesRecord] = list(zip(samples, bodies, append(bodies), strict=True))
    for kind, writer in _WRITERS:
        if of_kind := by_kind.get(kind):
            writer(connection, of_kind)


def _issued(connection: sqlite3.Connection, records: Sequence[rec.IssuedRecord]) -> None:
    rows = []
    for r in records:
        prompt = _encoder.encode(r.prompt)
        content = (r.group_id, r.prompt.prompt_id, prompt, r.size)
        rows.append((*content, checksum(*content), r.generator, r.version, r.retries, r.replaces, r.cursor, r.external, r.now))
    _execute_for_all(
        connection,
        "INSERT INTO groups (group_id, prompt_id, prompt, size, checksum, generator, version, retries, replaces, cursor,"
        " external, issued_s, attempt, state, reason, returns) VALUES {rows}",
        [(*row, 0, "running", "", -1) for row in rows],
    )


def _placed(connection: sqlite3.Connection, records: Sequence[rec.PlacedRecord]) -> None:
    connection.executemany(
        "UPDATE groups SET version = min(version, ?), attempt = ? WHERE group_id = ?",
        [(r.version, r.attempt, r.group_id) for r in records],
    )
    events = [(r.now, r.group_id, "issued again", f"{r.generator} v{r.version} attempt {r.attempt}") for r in records]
    _execute_for_all(connection, _EVENT, events)


def _samples(connection: sqlite3.Connection, written: Sequence[tuple[rec.SamplesRecord, bytes, Place]]) -> None:
    rows = []
    for record, body, place in written:
        made = record.samples
        key = sample_key(made.group_id, made.indices[0])
        told = [
            (index, counts[0][0], counts[-1][0], length, why)
            for index, counts, length, why in zip(
                made.indices, record.version_counts, made.lengths, made.finish_reasons, strict=True
            )
        ]
        times = (made.started_s, made.finished_s, record.now)
        members = _json.encode(told).decode()
        newest = max(counts[-1][0] for counts in record.version_counts)
        rows.append((key, made.attempt, made.generator, newest, members, *times, checksum(key, body), *place))
    _execute_for_all(
        connection,
        "INSERT OR IGNORE INTO samples (key, attempt, generator, newest, members, started_s, finished_s, stored_s, checksum,"
        " file, start, size) VALUES {rows}",
        rows,
    )


def _execute_for_all(connection: sqlite3.Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Execute a statement for all rows, many at a time, with their places at `{rows}`.

    sqlite3 lets go of the interpreter's lock for every statement and may wait long to get it back from a busy event loop:
    fewer statements, fewer such waits.
    """
    start = 0
    for size in ROWS_PER_STATEMENT:
        while len(rows) - start >= size:
            chosen = rows[start : start + size]
            places = ", ".join([f"({', '.join('?' * len(chosen[0]))})"] * size)
            connection.execute(statement.format(rows=places), list(itertools.chain.from_iterable(chosen)))
            start += size


def _scores(connection: sqlite3.Connection, records: Sequence[rec.ScoresRecord]) -> None:
    rows = []
    for record in records:
        scores = record.scores
        key = sample_key(scores.group_id, scores.scores[0].index)
        members = _json.encode([(score.index, float(score.reward), score.parts) for score in scores.scores]).decode()
        logprobs = [score.reference_logprobs for score in scores.scores]
        reference = _encoder.encode(logprobs) if any(logprobs) else b""
        rows.append((key, scores.worker, members, record.now, checksum(key, members, reference), reference))
    statement = "INSERT OR IGNORE INTO scores (key, worker, members, settled_s, checksum, reference) VALUES {rows}"
    _execute_for_all(connection, statement, rows)


def _failures(connection: sqlite3.Connection, records: Sequence[rec.FailureRecord]) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO failures (key, attempt, stage, reason, settled_s) VALUES (?, ?, ?, ?, ?)",
        [(sample_key(r.group_id, r.index), r.attempt, r.stage, r.reason, r.now) for r in records],
    )


def _moved(connection: sqlite3.Connection, records: Sequence[rec.MovedRecord]) -> None:
    # What moved at one time and alike is one statement; in order, since a group may move twice.
    for (after, reason, returns, now), alike in itertools.groupby(records, lambda r: (r.after, r.reason, r.returns, r.now)):
        ready_s = ", ready_s = ?" if after == "ready" else ""
        values = (after, reason, returns, *((now,) if ready_s else ()), _ids(r.group_id for r in alike))
        connection.execute(f"UPDATE groups SET state = ?, reason = ?, returns = ?{ready_s}{_OF_GROUPS}", values)  # noqa: S608
    ended = [r for r in records if r.after in {"dropped", "failed"}]
    _execute_for_all(connection, _EVENT, [(r.now, r.group_id, r.after, r.reason) for r in ended])
    _let_go(connection, [r.group_id for r in ended])


def _ids(group_ids: Iterable[int]) -> str:
    return _json.encode(list(group_ids)).decode()


def _let_go(connection: sqlite3.Connection, group_ids: Iterable[int]) -> None:
    """Forget what the samples of these groups hold; their rows stay."""
    ranges = [keys_of(group_id) for group_id in group_ids]
    connection.executemany("UPDATE samples SET file = NULL WHERE key >= ? AND key < ?", ranges)
    connection.executemany("UPDATE scores SET reference = NULL WHERE key >= ? AND key < ? AND reference <> x''", ranges)


def _taken(connection: sqlite3.Connection, r: rec.TakenRecord) -> None:
    group_ids, params = _json.encode(r.group_ids).decode(), _json.encode(r.params).decode()
    connection.execute(
        "INSERT INTO steps (step, group_ids, state, params, max_staleness, trained_before, taken_s, checksum)"
        " VALUES (?, ?, 'taken', ?, ?, 0, ?, ?)",
        (r.step, group_ids, params, r.max_staleness, r.now, checksum(group_ids, params)),
    )
    connection.execute(f"UPDATE groups SET state = 'taken', step = ?{_OF_GROUPS}", (r.step, group_ids))  # noqa: S608


def _trained(connection: sqlite3.Connection, r: rec.TrainedRecord) -> None:
    connection.execute("UPDATE steps SET state = 'trained', trained_before = 1, trained_s = ? WHERE step = ?", (r.now, r.step))
    connection.execute(f"UPDATE groups SET state = 'trained'{_OF_GROUPS}", (_ids(r.group_ids),))  # noqa: S608


def _restarted(connection: sqlite3.Connection, r: rec.RestartedRecord) -> None:
    connection.execute("UPDATE steps SET state = 'trained', trained_before = 1 WHERE step < ?", (r.version,))
    connection.execute("UPDATE groups SET state = 'trained' WHERE state = 'taken' AND step < ?", (r.version,))
    connection.execute("UPDATE steps SET state = 'taken' WHERE step >= ?", (r.version,))
    connection.execute("UPDATE groups SET state = 'taken' WHERE state = 'trained' AND step >= ?", (r.version,))
    _execute_for_all(connection, _EVENT, [(r.now, None, "learner restarted", f"version {r.version}")])


def _rescore(connection: sqlite3.Connection, r: rec.RescoreRecord) -> None:
    live = connection.execute("SELECT group_id FROM groups WHERE state IN ('running', 'scoring', 'ready')").fetchall()
    for (group_id,) in live:
        if connection.execute("DELETE FROM scores WHERE key >= ? AND key < ? AND reference = x''", keys_of(group_id)).rowcount:
            connection.execute(
                "UPDATE groups SET state = 'scoring', ready_s = NULL WHERE group_id = ? AND state = 'ready'", (group_id,)
            )
            _execute_for_all(connection, _EVENT, [(r.now, group_id, "scored again", "for reference logprobs")])


def _forget(connection: sqlite3.Connection, r: rec.ForgetRecord) -> None:
    before_step = max(r.before_step, forgotten_before(connection))
    gone = connection.execute(
        "SELECT group_ids FROM steps WHERE state = 'trained' AND step < ? AND step >= ?",
        (before_step, forgotten_before(connection)),
    ).fetchall()
    _let_go(connection, itertools.chain.from_iterable(msgspec.json.decode(group_ids, type=list[int]) for (group_ids,) in gone))
    connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('forgotten_before', ?)", (str(before_step),))


def _changed(connection: sqlite3.Connection, r: rec.ChangedRecord) -> None:
    _execute_for_all(connection, _EVENT, [(r.now, None, "changed", f"from step {r.step} on: {r.what}")])


def _set_aside(connection: sqlite3.Connection, r: rec.SetAsideRecord) -> None:
    dropped = f"UPDATE groups SET state = 'dropped', reason = ?, step = NULL, returns = -1{_OF_GROUPS}"  # noqa: S608
    connection.execute(dropped, (r.reason, _ids(r.group_ids)))
    _execute_for_all(connection, _EVENT, [(r.now, group_id, "dropped", r.reason) for group_id in r.group_ids])
    _let_go(connection, r.group_ids)
    connection.execute("DELETE FROM steps WHERE step = ?", (r.step,))
    # One after the other, in order: the step before has made room for each.
    for (step,) in connection.execute("SELECT step FROM steps WHERE step > ? ORDER BY step", (r.step,)).fetchall():
        connection.execute("UPDATE steps SET step = step - 1 WHERE step = ?", (step,))
        connection.execute("UPDATE groups SET step = step - 1 WHERE step = ?", (step,))


def forgotten_before(connection: sqlite3.Connection) -> int:
    """Return the step before which payloads are gone."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'forgotten_before'").fetchone()
    return int(row[0]) if row else 0


_WRITERS: tuple[tuple[type, Callable[[sqlite3.Connection, Any], None]], ...] = (
    (rec.IssuedRecord, _issued),
    (rec.PlacedRecord, _placed),
    (rec.SamplesRecord, _samples),
    (rec.ScoresRecord, _scores),
    (rec.FailureRecord, _failures),
    (rec.MovedRecord, _moved),
)
_STEP_WRITERS: dict[type, Callable[[sqlite3.Connection, Any], None]] = {
    rec.TakenRecord: _taken,
    rec.TrainedRecord: _trained,
    rec.RestartedRecord: _restarted,
    rec.RescoreRecord: _rescore,
    rec.ForgetRecord: _forget,
    rec.SetAsideRecord: _set_aside,
    rec.ChangedRecord: _changed,
}
