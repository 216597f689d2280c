"""The ledger on disk: one SQLite file (WAL) in the run folder, written by one thread that commits in groups.

The thread commits all queued records in one transaction. It does so at most every `COMMIT_EVERY_S`, unless much is queued or a
caller waits (a batch to be sent, `sync`): each commit writes every page it touched, and fewer commits write fewer pages. The file
is locked while a run has it open (an advisory lock on a file beside it, which the kernel frees when the process ends); readers
such as `asyncrl inspect` need no lock. `synchronous = NORMAL`: the operating system has the commit, so it survives `kill -9` of
any process. A power failure can lose the newest commits but never leaves a partial commit or a damaged file. See docs/buffer.md.

The samples' payloads are in append-only files beside it; each file is removed when no row points into it. A payload is written
once, with one call per commit, before the row with its location is committed. So a reader that sees the row can read the payload,
and a payload that a crash left without a row is never read. SQLite would write every payload twice, page by page: to the log and
to the file. Each start of a run begins a new file.

A write is atomic: all of its records are committed, or none. Writes are committed in order. `on_committed` runs after the commit,
so an acknowledgement sent from it confirms that the records are on disk.

Every record that is read for training has a checksum (schema.py). Damage raises a LedgerError with the table, the row and what to
do. Owns the thread and all of these files.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.buffer.ledger.records import ForgetRecord, OnCommitted, Record, SamplesRecord, TakenRecord
from asyncrl.buffer.ledger.schema import (
    SCHEMA_VERSION,
    TABLES,
    Place,
    checksum,
    ended,
    insert,
    rows_of,
    sample_key,
    unpack_samples,
)
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Samples, ScoredGroup, ScoredSample

COMMIT_EVERY_S = 0.05
COMMIT_SOON_BYTES = 256 << 10
"""Bytes of queued payload that cause an immediate commit: beside so many bytes, a commit's page writes are cheap."""
COMMIT_BYTES = 8 << 20
"""Maximum payload bytes of one transaction."""
PAGE_BYTES = 4096
FILE_BYTES = 16 << 20
"""Size at which a payload file is full."""
WAL_BYTES = 16 << 20
"""Size at which the write-ahead log is copied into the file; the bound is twice that, since one transaction may be added."""
REMEDY = "the file is damaged there; restore the run's folder from a copy, or start a new run from its newest checkpoint"

CallSoon = Callable[[Callable[[], None]], object]
_Unit = tuple[Sequence[Record], OnCommitted | None, int]
"""A unit with the approximate bytes of its samples' token ids, log-probabilities and texts."""
# Text with half a surrogate pair is a ValueError, a number of more than 64 bits an OverflowError. If an error ended the thread
# without a report, callers would wait for a commit for ever.
_NOT_WRITTEN = (sqlite3.Error, OSError, msgspec.MsgspecError, ValueError, OverflowError, MemoryError)


@dataclass(eq=False)
class SqliteLedger:
    """An open ledger file.

    Raises:
        LedgerError: Another run has it open, its schema or identity differs, or it is damaged.
    """

    path: Path
    """The file; created if it does not exist."""
    identity: dict[str, str] = field(default_factory=dict)
    """Names and values that must be the same at each opening of the ledger (B, G), written at its creation."""
    call_soon: CallSoon | None = None
    """Runs a callback on the event loop from another thread (`loop.call_soon_threadsafe`); None: run it on the writer's."""
    on_failure: Callable[[LedgerError], None] | None = None
    """Called once, in the same way, when a commit fails; every later method call raises that error."""
    max_queued: int = 8192
    """Number of queued records at which `write` waits."""

    def __post_init__(self) -> None:
        self._lock_fd = _lock(self.path)
        try:
            self._connection = _open(self.path, self.identity)
        except BaseException as error:
            os.close(self._lock_fd)
            if not isinstance(error, sqlite3.Error):
                raise
            reason = f"{error}; it is no ledger, it is damaged, or its disk is full"
            raise LedgerError(f"{self.path} cannot be opened: {reason}") from error
        self._payloads = PayloadFiles(self.path)
        self._changed = threading.Condition(threading.Lock())
        self._queue: list[_Unit] = []
        self._num_queued = 0
        self._queued_bytes = 0
        self._busy = False
        self._is_urgent = False
        self._closing = False
        self._error: LedgerError | None = None
        self._thread = threading.Thread(target=self._commit_until_closed, name="ledger", daemon=True)
        self._thread.start()

    def write(self, records: Sequence[Record], on_committed: OnCommitted | None = None) -> None:
        """Queue one unit; wait while too many are queued. Without records, `on_committed` runs once all before it is committed.

        Raises:
            LedgerError: The ledger is closed, or an earlier commit failed.
        """
        with self._changed:
            while self._num_queued >= self.max_queued and self._error is None:
                self._changed.wait()
            if self._error is not None or self._closing:
                raise self._error or LedgerError(f"{self.path} is closed")
            has_work = bool(records or self._queue or self._busy)
            if has_work:
                num_bytes = sum(3 * len(record.samples.token_ids) for record in records if type(record) is SamplesRecord)
                self._queue.append((records, on_committed, num_bytes))
                self._num_queued += len(records)
                self._queued_bytes += num_bytes
                self._is_urgent = self._is_urgent or any(type(record) is TakenRecord for record in records)
                if not self._busy and (len(self._queue) == 1 or self._is_worth_a_commit()):
                    self._changed.notify_all()
        if not has_work and on_committed is not None:
            self._deliver([on_committed])

    def sync(self, timeout_s: float = 60.0) -> None:
        """Return once everything written so far is committed.

        Raises:
            LedgerError: It took longer than `timeout_s`, or a commit failed.
        """
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._error or not (self._queue or self._busy), timeout_s):
                raise LedgerError(
                    f"{self.path}: {self._num_queued} records not committed after {timeout_s} s; is the disk stuck?"
                )
            if self._error is not None:
                raise self._error

    def state_counts(self) -> dict[str, int]:
        """Return the committed number of groups per state; call `sync` first."""
        with connect_read_only(self.path) as connection:
            return dict(connection.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())

    def load_groups(self, group_ids: Sequence[int]) -> list[ScoredGroup]:
        """Return scored groups with their payloads, in the given order.

        Raises:
            LedgerError: A payload is missing or damaged.
        """
        self.sync()
        groups, query = [], "SELECT prompt_id, prompt, size, checksum FROM groups WHERE group_id = ?"
        with connect_read_only(self.path) as connection:
            for group_id in group_ids:
                row = connection.execute(query, (group_id,)).fetchone()
                if row is None:
                    raise LedgerError(f"{self.path}: table groups has no row {group_id}; {REMEDY}")
                prompt, scores = read_prompt(self.path, group_id, *row), read_scores(self.path, connection, group_id)
                made = [samples for _, samples in read_samples(self.path, connection, group_id)]
                samples = {sample.index: sample for each in made for sample in each.members()}
                with reading(self.path, "scores", group_id):
                    members = tuple(ScoredSample(samples[index], *scores[index]) for index in sorted(scores))
                groups.append(ScoredGroup(group_id, prompt, members))
        return groups

    def close(self) -> None:
        """Commit what is queued, stop the thread, release file and lock. Safe to repeat."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._connection.close()
        self._payloads.close()
        os.close(self._lock_fd)

    def _commit_until_closed(self) -> None:
        committed_s = 0.0
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing)
                wait_s = committed_s + COMMIT_EVERY_S - time.monotonic()
                self._changed.wait_for(lambda: self._closing or self._is_worth_a_commit(), max(wait_s, 0.0))
                if not self._queue:
                    return
                units = self._next_units()
                self._busy = True
            try:
                if not self.path.exists():  # SQLite would go on with the file that has no name
                    raise FileNotFoundError("it was removed while the run used it")
                self._connection.execute("BEGIN IMMEDIATE")
                records = [record for unit in units for record in unit[0]]
                insert(self._connection, records, self._payloads.append)
                self._connection.execute("COMMIT")
                if any(type(record) is ForgetRecord for record in records):
                    first = sample_key(ended(self._connection).before, 0)
                    pointed_into = "SELECT DISTINCT file FROM samples WHERE file IS NOT NULL AND key >= ?"
                    used = self._connection.execute(pointed_into, (first,)).fetchall()
                    self._payloads.remove_all_but({number for (number,) in used})
            except _NOT_WRITTEN as cause:
                resumes = "`asyncrl resume` goes on from the last commit"
                remedy = resumes if self.path.exists() else "start a new run from a checkpoint of this one"
                error = LedgerError(
                    f"{self.path}: commit failed: {cause}; later records are not stored, so the run must stop; {remedy}"
                )
                with self._changed:
                    self._error, self._busy = error, False
                    self._changed.notify_all()
                if self.on_failure is not None:
                    self._deliver([functools.partial(self.on_failure, error)])
                return
            committed_s = time.monotonic()
            self._deliver([on_committed for _, on_committed, _ in units if on_committed is not None])

    def _is_worth_a_commit(self) -> bool:
        return self._is_urgent or self._queued_bytes >= COMMIT_SOON_BYTES or self._num_queued >= self.max_queued

    def _next_units(self) -> list[_Unit]:
        """Take the units of the next transaction from the queue."""
        num_bytes = num_units = 0
        while num_units < len(self._queue) and num_bytes <= COMMIT_BYTES:
            num_bytes += self._queue[num_units][2]
            num_units += 1
        units, self._queue = self._queue[:num_units], self._queue[num_units:]
        self._num_queued -= sum(len(unit[0]) for unit in units)
        self._queued_bytes -= num_bytes
        self._is_urgent = self._is_urgent and bool(self._queue)
        return units

    def _deliver(self, callbacks: list[OnCommitted]) -> None:
        def run_all() -> None:
            for callback in callbacks:
                callback()

        if self.call_soon is None:
            run_all()
        elif callbacks:
            # The loop may be closed when the last commits are done; then there is no callback to run.
            with contextlib.suppress(RuntimeError):
                self.call_soon(run_all)


class MemoryLedger:
    """A ledger that stores nothing and reports each commit at once. For benchmarks and simulation."""

    def write(self, records: Sequence[Record], on_committed: OnCommitted | None = None) -> None:  # noqa: ARG002 - as SqliteLedger
        """Call `on_committed` at once."""
        if on_committed is not None:
            on_committed()

    def sync(self, timeout_s: float = 60.0) -> None:
        """Do nothing: everything is committed."""

    def state_counts(self) -> None:
        """Return None: nothing is counted."""

    def load_groups(self, group_ids: Sequence[int]) -> list[ScoredGroup]:
        """Raise LedgerError: trained groups are not stored."""
        raise LedgerError(
            f"groups {list(group_ids)[:4]}... cannot be repeated: buffer.ledger is 'memory'; use 'disk' for runs that may restart"
        )

    def close(self) -> None:
        """Do nothing."""


Ledger = SqliteLedger | MemoryLedger
"""The ledger of a run, on disk or in memory."""


class PayloadFiles:
    """The writing end of the payload files of the ledger at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = max(_payload_numbers(path), default=0)
        self._fd = -1
        self._end = 0

    def append(self, bodies: Sequence[bytes]) -> list[Place]:
        """Write these payloads and return the location of each.

        Raises:
            OSError: The disk is full or broken.
        """
        if self._fd < 0 or self._end >= FILE_BYTES:
            self.close()
            self._number, self._end = self._number + 1, 0
            self._fd = os.open(_payload_at(self._path, self._number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        places = []
        for body in bodies:
            places.append((self._number, self._end, len(body)))
            self._end += len(body)
        rest = memoryview(b"".join(bodies))
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        return places

    def remove_all_but(self, used: Collection[int]) -> None:
        """Delete all payload files but those in `used` and the current one."""
        for number in _payload_numbers(self._path).difference(used, [self._number] if self._fd >= 0 else []):
            _payload_at(self._path, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the current file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _payload_at(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.payloads-{number:06d}")


def _payload_numbers(path: Path) -> set[int]:
    named = re.compile(re.escape(path.name) + r"\.payloads-(\d{6,})")
    return {int(found[1]) for each in path.parent.iterdir() if (found := named.fullmatch(each.name))}


@contextlib.contextmanager
def connect_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a ledger for reading while a run may write it; all reads see one snapshot.

    Raises:
        LedgerError: There is no ledger at `path`, or it cannot be read.
    """
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}; name the folder of a run")
    is_writable, has_log = os.access(path.parent, os.W_OK), False
    with contextlib.suppress(FileNotFoundError):
        has_log = path.with_name(f"{path.name}-wal").stat().st_size > 0 or is_writable
    try:
        # Without a log `immutable` keeps SQLite from making an empty one and its index; with a log it would ignore it.
        uri = f"{path.absolute().as_uri()}?mode=ro{'' if has_log else '&immutable=1'}"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30.0, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            yield connection
    except sqlite3.Error as error:
        name, reason = getattr(error, "sqlite_errorname", ""), f"it is no ledger, or {REMEDY}"
        if name == "SQLITE_CANTOPEN" and has_log and not is_writable:
            reason = "its log cannot be read in a folder that cannot be written; copy the folder"
        raise LedgerError(f"{path} cannot be read: {error} ({name}); {reason}") from error


def _lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
        os.close(lock_fd)
        if not isinstance(error, BlockingIOError):
            reason = f"its file system has no locks ({error.strerror}), which SQLite needs too"
            raise LedgerError(f"{path}: {reason}; put the run's folder on a local disk") from error
        raise LedgerError(
            f"{path} is in use by another run (process {holder or 'unknown'}); stop it, or choose another name"
        ) from error
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, str(os.getpid()).encode(), 0)
    return lock_fd


def _open(path: Path, identity: dict[str, str]) -> sqlite3.Connection:
    if _payload_numbers(path) and not (path.exists() and path.stat().st_size):
        raise LedgerError(
            f"{path} is missing or empty, and the files of its payloads are there: put it back from a copy, or start a new run "
            "from a checkpoint of this one"
        )
    with contextlib.ExitStack() as undo:
        connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        undo.callback(connection.close)
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_BYTES // PAGE_BYTES}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            connection.executescript(f"BEGIN IMMEDIATE;{TABLES}")
            meta = {**identity, "schema": str(SCHEMA_VERSION)}
            connection.executemany("INSERT INTO meta (name, value) VALUES (?, ?)", meta.items())
            connection.execute("COMMIT")
        stored = dict(connection.execute("SELECT name, value FROM meta").fetchall())
        if stored.get("schema") != str(SCHEMA_VERSION):
            raise LedgerError(
                f"{path} has the form {stored.get('schema')} of another version of asyncrl, this one reads {SCHEMA_VERSION}: "
                "use that version, or start a new run"
            )
        for name, value in identity.items():
            if stored.get(name) != value:
                raise LedgerError(f"{path} was made with {name} = {stored.get(name)}, this run has {value}; resume with the same")
        undo.pop_all()
    return connection


@contextlib.contextmanager
def reading(path: Path, table: str, row: object) -> Iterator[None]:
    """Convert any error from damaged content into a LedgerError that names the table and row."""
    try:
        yield
    except LedgerError:
        raise
    except PermissionError as error:
        raise LedgerError(f"{path}: {error}; give this user the run's folder and all files in it (chown -R)") from error
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, OSError, zlib.error) as error:
        raise LedgerError(f"{path}: table {table}, row {row}: {error}; {REMEDY}") from error


def check_sum(stored: object, *content: int | float | str | bytes) -> None:
    """Raise ValueError if a record differs from what was written."""
    if stored != (found := checksum(*content)):
        raise ValueError(f"the checksum is {found}, but {stored} was written")


Scored = tuple[float, dict[str, float], bytes]
"""Reward, its parts and the reference log-probabilities of a member."""


def read_samples(path: Path, connection: sqlite3.Connection, group_id: int) -> Iterator[tuple[int, Samples]]:
    """Yield the rows of a group's samples with their payloads; checks each checksum.

    Raises:
        LedgerError: A payload is damaged or was removed.
    """
    for key, stored, file, start, size in rows_of(connection, "samples", "key, checksum, file, start, size", group_id):
        if file is None:
            raise LedgerError(f"the payloads of group {group_id} are gone: it was trained before the oldest checkpoint kept")
        with reading(path, "samples", key):
            with _payload_at(path, file).open("rb") as payloads:
                if not 0 <= start <= start + size <= os.fstat(payloads.fileno()).st_size:
                    raise ValueError(f"{size} bytes at {start} do not lie in {payloads.name}")
                body = os.pread(payloads.fileno(), size, start)
            check_sum(stored, key, body)
            samples = unpack_samples(body)
            if sample_key(samples.group_id, samples.indices[0]) != key:
                raise ValueError(f"it holds g{samples.group_id}.{samples.indices[0]}")
        yield key, samples


def read_scores(path: Path, connection: sqlite3.Connection, group_id: int) -> dict[int, Scored]:
    """Return the scores of a group's members; checks their checksums."""
    scores = dict[int, Scored]()
    for key, stored, told, reference in rows_of(connection, "scores", "key, checksum, members, reference", group_id):
        with reading(path, "scores", key):
            check_sum(stored, key, told, reference)
            members = msgspec.json.decode(told, type=list[tuple[int, float, dict[str, float]]])
            logprobs = msgspec.msgpack.decode(reference, type=list[bytes]) if reference else [b""] * len(members)
            scores.update((index, (reward, parts, own)) for (index, reward, parts), own in zip(members, logprobs, strict=True))
    return scores


def read_prompt(path: Path, group_id: int, prompt_id: str, prompt: bytes, size: int, stored: object) -> Prompt:
    """Return a group's prompt; checks the group's checksum."""
    with reading(path, "groups", group_id):
        check_sum(stored, group_id, prompt_id, prompt, size)
        return msgspec.msgpack.decode(prompt, type=Prompt)
