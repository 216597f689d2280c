"""The tables of the ledger file, and the conversion of records to rows. docs/buffer.md describes each column.

Members that finished together are one row of `samples`; members that were scored together are one row of `scores`. The key of a
row is that of its first member. Every record that a resume or a repeat reads has a checksum (63 bits of xxh3) over its key and
content, computed when the row is written.
"""

from __future__ import annotations

import itertools
import sqlite3
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import xxhash

import asyncrl.buffer.ledger.records as rec
from asyncrl.buffer.group import count_reason
from asyncrl.schema.samples import Samples

SCHEMA_VERSION = 5
MAX_MEMBERS = 1 << 20
"""Above the number of members of any group; (group_id, index) is one integer key, so that rows of a group are adjacent."""
ROWS_PER_STATEMENT = (32, 8, 1)

Place = tuple[int, int, int]
"""Location of a payload: number of the file, offset, bytes."""
Append = Callable[[Sequence[bytes]], list[Place]]
"""Writes payloads, in order, and returns the location of each."""

# No index besides the primary keys: each would add a page to nearly every commit, and queries that need one are rare.
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


class Ended(msgspec.Struct, frozen=True):
    """Dropped and failed groups with an id under `before`; if stored in `meta`, no group under that id is live or repeated."""

    before: int = 0
    dropped: dict[str, int] = {}
    """Counts by reason; the same for failed groups."""
    failed: dict[str, int] = {}


_EVENT = "INSERT INTO events (at_s, group_id, what, detail) VALUES {rows}"
_OF_GROUPS = " WHERE group_id IN (SELECT value FROM json_each(?))"
_SET_META = "INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)"

_encoder = msgspec.msgpack.Encoder()


def sample_key(group_id: int, index: int) -> int:
    """Return the row key of a member; keys of one group are consecutive."""
    return group_id * MAX_MEMBERS + index


def rows_of(connection: sqlite3.Connection, table: str, columns: str, group_id: int) -> list[tuple[Any, ...]]:
    """Return these columns of a group's rows, in order of their keys."""
    statement = f"SELECT {columns} FROM {table} WHERE key >= ? AND key < ? ORDER BY key"  # noqa: S608 - our own words
    return connection.execute(statement, keys_of(group_id)).fetchall()


def keys_of(group_id: int) -> tuple[int, int]:
    """Return the first key of a group, and the first key after it."""
    return sample_key(group_id, 0), sample_key(group_id + 1, 0)


def _text(value: object) -> str:
    """Return a value as JSON, the form of a text column."""
    return msgspec.json.encode(value).decode()


def checksum(*parts: int | float | str | bytes) -> int:
    """Return 63 bits of the hash of a record's content; an int and the same float differ."""
    return xxhash.xxh3_64_intdigest(_encoder.encode(parts)) >> 1


def pack_samples(samples: Samples) -> bytes:
    """Return samples in stored form: one byte for the form of their versions, then the content.

    Usually all versions are equal: then one is stored (`u`). Otherwise they are compressed (`v`). Log-probabilities do not
    compress, and trying takes longer than writing them.
    """
    versions, one = samples.versions, samples.versions[:4]
    if versions == one * (len(versions) // 4):
        return b"u" + _encoder.encode(msgspec.structs.replace(samples, versions=one))
    return b"v" + _encoder.encode(msgspec.structs.replace(samples, versions=zlib.compress(versions, 1)))


def unpack_samples(stored: bytes) -> Samples:
    """Return samples from their stored form, whose checksum was verified before."""
    samples = msgspec.msgpack.decode(memoryview(stored)[1:], type=Samples)
    is_alike = stored[:1] == b"u"
    versions = samples.versions * (len(samples.token_ids) // 4) if is_alike else zlib.decompress(samples.versions)
    return msgspec.structs.replace(samples, versions=versions)


def insert(connection: sqlite3.Connection, records: Iterable[rec.Record], append: Append) -> None:
    """Write records inside the open transaction, and samples' bytes by `append`.

    Records of groups and members are written kind by kind, for speed, in an order in which rows exist before they are changed;
    records of steps change many rows at once, so everything before them is written first.
    """
    by_kind = defaultdict[type, list[Any]](list)
    for record in records:
        if isinstance(record, rec.WideRecord):
            _insert_by_kind(connection, by_kind, append)
            by_kind.clear()
            _insert_wide(connection, record)
        else:
            by_kind[type(record)].append(record)
    _insert_by_kind(connection, by_kind, append)


def _insert_by_kind(connection: sqlite3.Connection, by_kind: defaultdict[type, list[Any]], append: Append) -> None:
    rows = list[tuple[Any, ...]]()
    for issued in by_kind[rec.IssuedRecord]:
        content = (issued.group_id, issued.prompt.prompt_id, _encoder.encode(issued.prompt), issued.size)
        source = (issued.generator, issued.version, issued.retries, issued.replaces, issued.cursor, issued.external, issued.now)
        rows.append((*content, checksum(*content), *source, 0, "running", "", -1))
    _execute_for_all(
        connection,
        "INSERT INTO groups (group_id, prompt_id, prompt, size, checksum, generator, version, retries, replaces, cursor,"
        " external, issued_s, attempt, state, reason, returns) VALUES {rows}",
        rows,
    )
    placed: list[rec.PlacedRecord] = by_kind[rec.PlacedRecord]
    places = [(r.version, r.attempt, r.group_id) for r in placed]
    connection.executemany("UPDATE groups SET version = min(version, ?), attempt = ? WHERE group_id = ?", places)
    told = [(r.now, r.group_id, "issued again", f"{r.generator} v{r.version} attempt {r.attempt}") for r in placed]
    _execute_for_all(connection, _EVENT, told)
    if by_kind[rec.SamplesRecord]:
        _samples(connection, by_kind[rec.SamplesRecord], append)
    rows = []
    for record in by_kind[rec.ScoresRecord]:
        scores, logprobs = record.scores, [score.reference_logprobs for score in record.scores.scores]
        key, reference = sample_key(scores.group_id, scores.scores[0].index), _encoder.encode(logprobs) if any(logprobs) else b""
        members = _text([(score.index, float(score.reward), score.parts) for score in scores.scores])
        rows.append((key, scores.worker, members, record.now, checksum(key, members, reference), reference))
    statement = "INSERT OR IGNORE INTO scores (key, worker, members, settled_s, checksum, reference) VALUES {rows}"
    _execute_for_all(connection, statement, rows)
    failures = [(sample_key(r.group_id, r.index), r.attempt, r.stage, r.reason, r.now) for r in by_kind[rec.FailureRecord]]
    statement = "INSERT OR IGNORE INTO failures (key, attempt, stage, reason, settled_s) VALUES (?, ?, ?, ?, ?)"
    connection.executemany(statement, failures)
    _moved(connection, by_kind[rec.MovedRecord])


def _samples(connection: sqlite3.Connection, records: Sequence[rec.SamplesRecord], append: Append) -> None:
    bodies, rows = [pack_samples(record.samples) for record in records], []
    for record, body, place in zip(records, bodies, append(bodies), strict=True):
        made = record.samples
        key = sample_key(made.group_id, made.indices[0])
        told = [
            (index, counts[0][0], counts[-1][0], length, why)
            for index, counts, length, why in zip(
                made.indices, record.version_counts, made.lengths, made.finish_reasons, strict=True
            )
        ]
        times = (made.started_s, made.finished_s, record.now)
        members = _text(told)
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

    sqlite3 releases the GIL for every statement and may wait long for it if the event loop is busy: fewer statements cause fewer
    waits.
    """
    start = 0
    for size in ROWS_PER_STATEMENT:
        while len(rows) - start >= size:
            chosen = rows[start : start + size]
            places = ", ".join([f"({', '.join('?' * len(chosen[0]))})"] * size)
            connection.execute(statement.format(rows=places), list(itertools.chain.from_iterable(chosen)))
            start += size


def _moved(connection: sqlite3.Connection, records: Sequence[rec.MovedRecord]) -> None:
    # Equal moves at one time are one statement; the order is kept, since a group may move twice.
    for (after, reason, returns, now), alike in itertools.groupby(records, lambda r: (r.after, r.reason, r.returns, r.now)):
        ready_s = ", ready_s = ?" if after == "ready" else ""
        values = (after, reason, returns, *((now,) if ready_s else ()), _text([r.group_id for r in alike]))
        connection.execute(f"UPDATE groups SET state = ?, reason = ?, returns = ?{ready_s}{_OF_GROUPS}", values)  # noqa: S608
    ended = [r for r in records if r.after in {"dropped", "failed"}]
    _execute_for_all(connection, _EVENT, [(r.now, r.group_id, r.after, r.reason) for r in ended])
    _let_go(connection, [r.group_id for r in ended])


def _let_go(connection: sqlite3.Connection, group_ids: Iterable[int]) -> None:
    """Remove the payload references of these groups' samples; their rows stay."""
    ranges = [keys_of(group_id) for group_id in group_ids]
    connection.executemany("UPDATE samples SET file = NULL WHERE key >= ? AND key < ?", ranges)
    connection.executemany("UPDATE scores SET reference = NULL WHERE key >= ? AND key < ? AND reference <> x''", ranges)


def _insert_wide(connection: sqlite3.Connection, record: rec.Record) -> None:
    """Write a record that changes the rows of many groups."""
    events = list[tuple[Any, ...]]()
    match record:
        case rec.TakenRecord(step, group_ids, params):
            of_groups, of_params = _text(group_ids), _text(params)
            connection.execute(
                "INSERT INTO steps (step, group_ids, state, params, max_staleness, trained_before, taken_s, checksum)"
                " VALUES (?, ?, 'taken', ?, ?, 0, ?, ?)",
                (step, of_groups, of_params, record.max_staleness, record.now, checksum(of_groups, of_params)),
            )
            connection.execute(f"UPDATE groups SET state = 'taken', step = ?{_OF_GROUPS}", (step, of_groups))  # noqa: S608
        case rec.TrainedRecord(step, group_ids, now):
            connection.execute(
                "UPDATE steps SET state = 'trained', trained_before = 1, trained_s = ? WHERE step = ?", (now, step)
            )
            connection.execute(f"UPDATE groups SET state = 'trained'{_OF_GROUPS}", (_text(group_ids),))  # noqa: S608
        case rec.RestartedRecord(version, now):
            connection.execute("UPDATE steps SET state = 'trained', trained_before = 1 WHERE step < ?", (version,))
            since = ended(connection).before
            trained = "UPDATE groups SET state = 'trained' WHERE state = 'taken' AND step < ? AND group_id >= ?"
            connection.execute(trained, (version, since))
            connection.execute("UPDATE steps SET state = 'taken' WHERE step >= ?", (version,))
            taken = "UPDATE groups SET state = 'taken' WHERE state = 'trained' AND step >= ? AND group_id >= ?"
            connection.execute(taken, (version, since))
            events = [(now, None, "learner restarted", f"version {version}")]
        case rec.RescoreRecord(reference, now):
            before = connection.execute("SELECT value FROM meta WHERE name = 'reference'").fetchone() or (reference,)
            connection.execute(_SET_META, ("reference", reference))
            lacking = " AND reference = x''" if before == (reference,) else ""
            of_live = "SELECT group_id FROM groups WHERE state IN ('running', 'scoring', 'ready') AND group_id >= ?"
            live = connection.execute(of_live, (ended(connection).before,)).fetchall()
            unset = f"DELETE FROM scores WHERE key >= ? AND key < ?{lacking}"  # noqa: S608 - ours
            again = [group_id for (group_id,) in live if connection.execute(unset, keys_of(group_id)).rowcount]
            statement = f"UPDATE groups SET state = 'scoring', ready_s = NULL{_OF_GROUPS} AND state = 'ready'"  # noqa: S608
            connection.execute(statement, (_text(again),))
            events = [(now, group_id, "scored again", "for reference logprobs") for group_id in again]
        case rec.ForgetRecord(before_step, before_group):
            since = forgotten_before(connection)
            gone = connection.execute(
                "SELECT group_ids FROM steps WHERE state = 'trained' AND step < ? AND step >= ?", (before_step, since)
            ).fetchall()
            _let_go(connection, itertools.chain.from_iterable(msgspec.json.decode(ids, type=list[int]) for (ids,) in gone))
            connection.execute(_SET_META, ("forgotten_before", str(max(before_step, since))))
            connection.execute(_SET_META, ("ended", _text(count_ended(connection, before_group))))
        case rec.ChangedRecord(step, what, now):
            events = [(now, None, "changed", f"from step {step} on: {what}")]
        case rec.SetAsideRecord(step, group_ids, reason, now):
            dropped = f"UPDATE groups SET state = 'dropped', reason = ?, step = NULL, returns = -1{_OF_GROUPS}"  # noqa: S608
            connection.execute(dropped, (reason, _text(group_ids)))
            events = [(now, group_id, "dropped", reason) for group_id in group_ids]
            _let_go(connection, group_ids)
            connection.execute("DELETE FROM steps WHERE step = ?", (step,))
            # One at a time, in order: the previous update has freed the number for the next.
            for later in connection.execute("SELECT step FROM steps WHERE step > ? ORDER BY step", (step,)).fetchall():
                connection.execute("UPDATE steps SET step = step - 1 WHERE step = ?", later)
                connection.execute("UPDATE groups SET step = step - 1 WHERE step = ?", later)
    _execute_for_all(connection, _EVENT, events)


def forgotten_before(connection: sqlite3.Connection) -> int:
    """Return the step before which payloads have been removed."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'forgotten_before'").fetchone()
    return int(row[0]) if row else 0


def ended(connection: sqlite3.Connection) -> Ended:
    """Return the counts of the newest ForgetRecord: rows of groups under its id need not be read."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'ended'").fetchone()
    return msgspec.json.decode(row[0], type=Ended) if row else Ended()


def count_ended(connection: sqlite3.Connection, end: int) -> Ended:
    """Return the dropped and failed groups with an id under `end`: the stored counts plus a count of later groups."""
    noted, dropped, failed = ended(connection), Counter[str](), Counter[str]()
    of_reason = "SELECT reason, count(*) FROM groups WHERE state = ? AND group_id >= ? AND group_id < ? GROUP BY reason"
    for state, counts, before in (("dropped", dropped, noted.dropped), ("failed", failed, noted.failed)):
        counts.update(before)
        for reason, num_groups in connection.execute(of_reason, (state, noted.before, end)):
            count_reason(counts, reason, num_groups)
    return Ended(max(noted.before, end), dropped, failed)
