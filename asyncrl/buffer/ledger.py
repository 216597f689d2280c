"""The books on disk: one SQLite file (WAL) in the run folder, written by one thread that commits in groups.

Whatever is queued when the thread comes round is one transaction, so the commit rate adapts to the load by itself. The file
is locked while a run has it open (an advisory lock on a file beside it, freed by the kernel whatever kills the process);
readers such as `asyncrl inspect` need no lock. `synchronous = NORMAL`: a commit is in the operating system's hands, so it
survives `kill -9` of any process; a power cut can lose the newest commits but never leaves half of one or a damaged file. See
docs/buffer.md.

Owns the thread and both files. Called by buffer/buffer.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.buffer.ledger_schema import MIGRATIONS, SCHEMA_VERSION, TABLES, insert, sample_key
from asyncrl.buffer.records import OnCommitted, Record
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample

CallSoon = Callable[[Callable[[], None]], object]
_Unit = tuple[Sequence[Record], OnCommitted | None]
# Text with half a surrogate pair is a ValueError, a number of more than 64 bits an OverflowError. An error that ended the thread
# unsaid would leave whoever waits for a commit waiting for ever.
_NOT_WRITTEN = (sqlite3.Error, msgspec.MsgspecError, ValueError, OverflowError, MemoryError)


class SqliteLedger:
    """An open ledger file.

    Args:
        path: The file; made when it is not there.
        identity: Names and values that must be the same each time the ledger is opened (B, G), written when it is made.
        call_soon: Runs a function on the event loop from another thread (`loop.call_soon_threadsafe`); None: callbacks run on the
            writer thread.
        on_failure: Called once, the same way, when a commit fails; every later call raises that error.
        max_queued: Records waiting to be committed before `write` waits.
        synchronous: `full` also survives a power cut, at one disk flush a commit.

    Raises:
        LedgerError: Another run has it open, it is of another schema or identity, or it is damaged.
    """

    def __init__(
        self,
        path: Path,
        *,
        identity: dict[str, str] | None = None,
        call_soon: CallSoon | None = None,
        on_failure: Callable[[LedgerError], None] | None = None,
        max_queued: int = 8192,
        synchronous: Literal["normal", "full"] = "normal",
    ) -> None:
        self.path = path
        self._lock_fd = _lock(path)
        try:
            self._connection = _open(path, identity or {}, synchronous)
        except sqlite3.Error as error:
            os.close(self._lock_fd)
            raise LedgerError(f"{path} cannot be opened: {error}; it is no ledger, it is damaged, or its disk is full") from error
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._call_soon = call_soon
        self._on_failure = on_failure
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._queue: list[_Unit] = []
        self._num_queued = 0
        self._busy = False
        self._closing = False
        self._error: LedgerError | None = None
        self._thread = threading.Thread(target=self._commit_until_closed, name="ledger", daemon=True)
        self._thread.start()

    def write(self, records: Sequence[Record], on_committed: OnCommitted | None = None) -> None:
        """Queue one unit; see `Ledger.write`."""
        with self._changed:
            while self._num_queued >= self._max_queued and self._error is None:
                self._changed.wait()
            self._raise_if_unusable()
            self._queue.append((records, on_committed))
            self._num_queued += len(records)
            if not self._busy:
                self._changed.notify_all()

    def sync(self, timeout_s: float = 60.0) -> None:
        """Wait until everything written is committed; see `Ledger.sync`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._error or not (self._queue or self._busy), timeout_s):
                raise LedgerError(
                    f"{self.path}: {self._num_queued} records not committed after {timeout_s} s; is the disk stuck?"
                )
            if self._error is not None:
                raise self._error

    def state_counts(self) -> dict[str, int]:
        """Return the number of groups per state, as committed."""
        with connect_read_only(self.path) as connection:
            return dict(connection.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())

    def load_groups(self, group_ids: Sequence[int]) -> list[ScoredGroup]:
        """Return scored groups with their payloads; see `Ledger.load_groups`."""
        self.sync()
        with connect_read_only(self.path) as connection:
            return [_load_group(connection, group_id) for group_id in group_ids]

    def close(self) -> None:
        """Commit what is queued, stop the thread, release file and lock. Safe to repeat."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._connection.close()
        os.close(self._lock_fd)

    def _commit_until_closed(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                units, self._queue = self._queue, []
                self._num_queued = 0
                self._busy = True
            try:
                self._commit(units)
            except _NOT_WRITTEN as error:
                self._fail(error)
                return
            self._deliver([on_committed for _, on_committed in units if on_committed is not None])

    def _commit(self, units: list[_Unit]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        insert(self._connection, (record for records, _ in units for record in records))
        self._connection.execute("COMMIT")

    def _deliver(self, callbacks: list[OnCommitted]) -> None:
        if not callbacks:
            return
        if self._call_soon is None:
            _run_all(callbacks)
            return
        # The loop may be closed by the time the last commits are done; nobody is there to be told then.
        with contextlib.suppress(RuntimeError):
            self._call_soon(lambda: _run_all(callbacks))

    def _fail(self, cause: Exception) -> None:
        error = LedgerError(
            f"{self.path}: commit failed: {cause}; nothing written since is safe, the run must stop; `asyncrl resume` goes on "
            "from what is committed"
        )
        with self._changed:
            self._error = error
            self._busy = False
            self._changed.notify_all()
        on_failure = self._on_failure
        if on_failure is not None:
            self._deliver([lambda: on_failure(error)])

    def _raise_if_unusable(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise LedgerError(f"{self.path} is closed")


@contextlib.contextmanager
def connect_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a ledger for reading, beside a run that writes it.

    Raises:
        LedgerError: There is no ledger at `path`, or what is there cannot be read.
    """
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}; name the folder of a run")
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30.0, isolation_level=None)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be read: {error}; it is no ledger, or it is damaged") from error


def _lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
        os.close(lock_fd)
        raise LedgerError(
            f"{path} is in use by another run (process {holder or 'unknown'}); stop it, or choose another name"
        ) from error
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, str(os.getpid()).encode(), 0)
    return lock_fd


def _open(path: Path, identity: dict[str, str], synchronous: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    try:
        _prepare(path, connection, identity, synchronous)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(path: Path, connection: sqlite3.Connection, identity: dict[str, str], synchronous: str) -> None:
    # Large pages keep a payload on one page; rare checkpoints (every 256 MB of log) wait for the disk less often.
    connection.execute("PRAGMA page_size = 65536")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA wal_autocheckpoint = 4000")
    connection.execute("PRAGMA journal_size_limit = 268435456")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not tables:
        _create(connection, identity)
    _migrate(connection)
    _check_identity(path, connection, identity)


def _create(connection: sqlite3.Connection, identity: dict[str, str]) -> None:
    connection.executescript(f"BEGIN IMMEDIATE;{TABLES}")
    meta = {**identity, "schema": str(SCHEMA_VERSION)}
    connection.executemany("INSERT INTO meta (name, value) VALUES (?, ?)", meta.items())
    connection.execute("COMMIT")


def _migrate(connection: sqlite3.Connection) -> None:
    """Bring a ledger of an older schema up to this one, in one transaction."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
    schema, added = row[0] if row else "", ""
    while schema in MIGRATIONS:
        added += MIGRATIONS[schema]
        schema = str(int(schema) + 1)
    if added:
        connection.executescript(f"BEGIN IMMEDIATE;{added}")
        connection.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (schema,))
        connection.execute("COMMIT")


def _check_identity(path: Path, connection: sqlite3.Connection, identity: dict[str, str]) -> None:
    stored = dict(connection.execute("SELECT name, value FROM meta").fetchall())
    for name, value in {**identity, "schema": str(SCHEMA_VERSION)}.items():
        if stored.get(name) != value:
            raise LedgerError(f"{path} was made with {name} = {stored.get(name)}, this run has {value}; resume with the same")


def _load_group(connection: sqlite3.Connection, group_id: int) -> ScoredGroup:
    row = connection.execute("SELECT prompt FROM groups WHERE group_id = ?", (group_id,)).fetchone()
    if row is None:
        raise LedgerError(f"group {group_id} is not in the ledger")
    rows = connection.execute(
        "SELECT s.reward, s.parts, p.body, r.body FROM samples s LEFT JOIN payloads p ON p.key = s.key"
        " LEFT JOIN reference_logprobs r ON r.key = s.key WHERE s.key >= ? AND s.key < ? AND s.state = 'scored' ORDER BY s.key",
        (sample_key(group_id, 0), sample_key(group_id + 1, 0)),
    ).fetchall()
    if any(body is None for _, _, body, _ in rows):
        raise LedgerError(f"the payloads of group {group_id} are gone: it was trained before the oldest checkpoint kept")
    members = tuple(
        ScoredSample(
            msgspec.msgpack.decode(body, type=Sample),
            reward,
            msgspec.json.decode(parts, type=dict[str, float]),
            reference or b"",
        )
        for reward, parts, body, reference in rows
    )
    return ScoredGroup(group_id, msgspec.msgpack.decode(row[0], type=Prompt), members)


def _run_all(callbacks: list[OnCommitted]) -> None:
    for callback in callbacks:
        callback()
