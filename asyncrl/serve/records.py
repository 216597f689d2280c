"""The daemon's database (runs, tokens, events) in server.sqlite, a copy of each record in its run's folder, and access control.

Invariants: everything that was answered to a client is committed. A damaged database is moved aside, and the runs are found again
from their folders; tokens and events are then lost, and a new admin token is written.

A browser may send the page's cookie to another server at the same address, so every request's Host must be one of the daemon's
names, and its Origin, if given, must be the daemon's. Programs send a bearer token, the page a cookie. The cookie is not a token:
it is signed with the daemon's key and the token's hash, and is invalid after SESSION_S, or once the token is removed. With a
cookie, every request except GET must have the daemon's Origin. Only hashes of tokens are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from asyncrl.clock import Clock, SystemClock
from asyncrl.errors import AsyncRLError, ConfigError, LaunchError

log = logging.getLogger(__name__)

DATABASE = "server.sqlite"
TOKEN_FILE = "admin.token"  # noqa: S105 - its name
SESSION_KEY_FILE = "session.key"
OWN_FILES = frozenset({TOKEN_FILE, SESSION_KEY_FILE})
"""Files in the daemon's folder, beside the database, that no run may read."""
LOCK_FILE = "server.lock"
"""In the daemon's folder: held while a daemon serves it."""
RUNS = "runs"
"""Name of the folder, in the daemon's folder, with one folder per run."""
RECORD_FILE = "served.json"
"""In a run's folder: its record."""
SUBMITTED_FILE = "submitted.toml"
"""In a run's folder: its config as it was accepted."""
PRIVATE = frozenset({"keys", "api.json", "api.json.partial", "endpoint", "owner.sock"})
"""Names in a run's folder that are never readable over HTTP."""
MOST_EVENTS = 100_000

Role = Literal["viewer", "operator", "submitter", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "submitter", "admin")
"""Each role may do everything that the roles before it may do."""
State = Literal["queued", "starting", "live", "ended"]
Outcome = Literal["", "done", "failed", "stopped", "cancelled"]


class Demand(msgspec.Struct, frozen=True):
    """Resources that a run needs."""

    gpus: int = 0
    cores: int = 1
    memory_bytes: int = 0


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run as the daemon knows it."""

    id: str
    """Its name."""
    number: int
    """Order of submission."""
    state: State = "queued"
    outcome: Outcome = ""
    reason: str = ""
    """Why it ended, or why it waits."""
    priority: int = 0
    """Higher goes first."""
    project: str = ""
    tags: tuple[str, ...] = ()
    submitted_by: str = ""
    demand: Demand = Demand()
    gpus: tuple[str, ...] = ()
    """GPUs that the run was given."""
    attempts: int = 0
    """Number of controllers that were started for it."""
    events_before: int = 0
    """Number of the run's newest event when its last controller was started."""
    events_told: int = 0
    """Number of the run's newest event that the daemon has recorded too."""
    drains: bool = False
    """Whether it was told to end, so that it is not resumed."""
    parent: str = ""
    """The checkpoint it was forked from, RUN/checkpoints/NAME."""
    queued_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    version: int = -1
    num_steps: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None


class TokenRecord(msgspec.Struct, frozen=True):
    """A token; only its hash is kept."""

    name: str
    role: Role
    digest: str
    """SHA-256, hex."""
    created_s: float


class ServerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at the daemon."""

    seq: int
    time_s: float
    run: str = ""
    kind: str
    """`submitted`, `started`, `adopted`, `resumed`, `ended`, `asked`, or the kind of a run's own event: `phase`, `death`, ..."""
    text: str = ""
    who: str = ""
    """Name of the token of the request."""


class Answered(msgspec.Struct, frozen=True):
    """The run and request that belong to an idempotency key."""

    body_digest: str
    run: str


T = TypeVar("T")
_TABLES = """
CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS tokens (name TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL) STRICT;
"""


class Records:
    """The daemon's database. Used on one thread; every write is committed when it returns.

    Raises:
        sqlite3.Error: On any call, for example if the disk is full; the call has then no effect.
    """

    def __init__(self, folder: Path, timeout_s: float = 10.0) -> None:
        self._folder = folder
        self.elsewhere: dict[str, Path] = {}
        """Folders of viewed runs outside the daemon's folder (`asyncrl view`)."""
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        path = folder / DATABASE
        try:
            self._db = _open(path, timeout_s)
            self.runs = {record.id: record for record in self._read("runs", RunRecord)}
            self.tokens = {record.name: record for record in self._read("tokens", TokenRecord)}
        except (sqlite3.Error, msgspec.DecodeError) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
                raise LaunchError(f"{path} cannot be opened: {error}") from error  # a full disk or a lock damages nothing
            aside = path.with_suffix(".damaged")
            log.error("%s is damaged (%s): it is kept as %s, and the runs are found again from their folders", path, error, aside)  # noqa: TRY400
            for suffix in ("", "-wal", "-shm"):
                part = path.with_name(path.name + suffix)
                if part.exists():
                    part.replace(aside.with_name(aside.name + suffix))
            self._db = _open(path, timeout_s)
            self.runs, self.tokens = {}, {}
        for copy in sorted((folder / RUNS).glob(f"*/{RECORD_FILE}")):
            try:
                record = msgspec.json.decode(copy.read_bytes(), type=RunRecord)
            except (OSError, msgspec.DecodeError) as error:
                log.error("%s is damaged and its run is not listed: %s", copy, error)  # noqa: TRY400
                continue
            if record.id == copy.parent.name and record.id not in self.runs:
                self.put_run(record)

    def run_folder(self, run: str) -> Path:
        """Return a run's folder."""
        return self.elsewhere.get(run) or self._folder / RUNS / run

    def config_file(self, run: str) -> Path:
        """Return the file of a run's current config, or before its first start that of the submitted config."""
        path = self.run_folder(run) / "config.toml"
        return path if path.exists() else path.with_name(SUBMITTED_FILE)

    def put_run(self, record: RunRecord, answers: tuple[str, Answered] | None = None) -> None:
        """Store a run's record, here and in its folder (unless that is gone), together with its idempotency key."""
        folder = self.run_folder(record.id)
        if record.id not in self.runs:
            folder.mkdir(mode=0o700, exist_ok=True)
        aside = folder / f"{RECORD_FILE}.partial"
        if has_folder := folder.is_dir():
            aside.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        with self._db:
            self._put("runs", "id", record.id, record)
            if answers is not None:
                self._put("keys", "key", *answers)
        if has_folder:
            aside.replace(folder / RECORD_FILE)  # behind the commit: a run that is found by it alone has lost its key
        self.runs[record.id] = record

    def put_token(self, record: TokenRecord) -> None:
        """Store a token."""
        with self._db:
            self._put("tokens", "name", record.name, record)
        self.tokens[record.name] = record

    def forget_token(self, name: str) -> None:
        """Delete a token."""
        with self._db:
            self._db.execute("DELETE FROM tokens WHERE name = ?", (name,))
        self.tokens.pop(name, None)

    def answer(self, key: str) -> Answered | None:
        """Return the record of an idempotency key."""
        row = self._db.execute("SELECT record FROM keys WHERE key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Answered)

    def add_event(
        self, now: float, kind: str, run: str = "", text: str = "", who: str = "", record: RunRecord | None = None
    ) -> None:  # fmt: skip
        """Store an event; `record`, the changed record of its run, is stored in the same transaction."""
        with self._db:
            if record is not None:
                self._put("runs", "id", record.id, record)
            body = msgspec.json.encode({"time_s": now, "run": run, "kind": kind, "text": text, "who": who})
            seq = self._db.execute("INSERT INTO events (record) VALUES (?)", (body,)).lastrowid or 0
            self._db.execute("DELETE FROM events WHERE seq <= ?", (seq - MOST_EVENTS,))
        if record is not None:
            self.runs[record.id] = record

    def events(self, after: int) -> list[ServerEvent]:
        """Return events after number `after`, oldest first, at most 1,000."""
        rows = self._db.execute("SELECT seq, record FROM events WHERE seq > ? ORDER BY seq LIMIT 1000", (after,))
        found = []
        for seq, body in rows:
            try:
                found.append(msgspec.convert({**msgspec.json.decode(body), "seq": seq}, ServerEvent))
            except (msgspec.DecodeError, UnicodeDecodeError, TypeError):  # one row; who reads the others goes on behind it
                found.append(ServerEvent(seq=seq, time_s=0.0, kind="damaged", text=f"row {seq} of {DATABASE}"))
        return found

    def fault(self) -> str:
        """Return why the database cannot be written; empty if it can."""
        try:
            self._db.execute("PRAGMA user_version = 1")  # the number has no meaning, but is written each time
        except sqlite3.Error as error:
            return f"the daemon cannot write its records: {error}"
        return ""

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _put(self, table: str, column: str, key: str, record: Any) -> None:  # noqa: ANN401 - any struct
        statement = f"INSERT INTO {table} ({column}, record) VALUES (?, ?) ON CONFLICT DO UPDATE SET record = excluded.record"  # noqa: S608 - names of ours
        self._db.execute(statement, (key, msgspec.json.encode(record)))

    def _read(self, table: str, kind: type[T]) -> list[T]:
        return [msgspec.json.decode(row[0], type=kind) for row in self._db.execute(f"SELECT record FROM {table}")]  # noqa: S608 - ours


def _open(path: Path, timeout_s: float) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=timeout_s)
    path.chmod(0o600)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.executescript(_TABLES)
    if (fault := database.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(fault)
    return database


# -- who may ask -------------------------------------------------------------------------------------------------------

WHO = web.RequestKey("who", TokenRecord)
OPEN = "open"
"""Used instead of a role, for routes that need no token."""
ANYBODY = TokenRecord("anybody", "viewer", "", 0.0)
MOST_TOKENS = 1000
SESSION_S = 12 * 3600


class ForbiddenError(AsyncRLError):
    """The request is refused, with a given HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def new_token(records: Records, name: str, role: str, clock: Clock) -> str:
    """Make a token and return it; it cannot be read again later.

    Raises:
        ConfigError: The role does not exist, or a token with that name exists already.
    """
    if role not in ROLES:
        raise ConfigError(f"the role must be one of {', '.join(ROLES)}, got {role!r}")
    if not (0 < len(name) <= 64 and name.isprintable()):
        raise ConfigError(f"the name of a token has 1 to 64 printable characters, got {name!r}")
    if name in records.tokens:
        raise ConfigError(f"there is a token {name!r}; remove it first, or take another name")
    if len(records.tokens) >= MOST_TOKENS:
        raise ConfigError(f"there are {MOST_TOKENS} tokens; remove some first")
    token = secrets.token_urlsafe(32)
    records.put_token(TokenRecord(name, role, hashlib.sha256(token.encode()).hexdigest(), clock.now()))  # type: ignore[arg-type]
    return token


class Guard:
    """Accepts requests, or returns why not.

    Args:
        records: Has the tokens.
        names: Host names that requests may use.
        clock: Ends the page's sessions.
        key: Signs the page's cookies; not given: a new key, which only this object has.
    """

    def __init__(self, records: Records, names: Collection[str], clock: Clock | None = None, key: bytes = b"") -> None:
        self._records, self._names = records, {name.lower() for name in names}
        self._clock, self._key = clock or SystemClock(), key or secrets.token_bytes(32)

    def check(self, request: web.Request, least: Role | str) -> TokenRecord:
        """Return the token that a request comes from.

        Raises:
            ForbiddenError: Host, Origin, token or role is wrong.
        """
        host = request.headers.get("Host", "").lower()
        if host.removesuffix(f":{host.rpartition(':')[2]}") not in self._names and host not in self._names:
            raise ForbiddenError(403, "this host name is not the daemon's; name it with serve --allow-host")
        origin = request.headers.get("Origin", "")
        if origin and origin.partition("://")[2].lower() != host:
            raise ForbiddenError(403, "the request comes from a page of another origin")
        if least == OPEN:
            return ANYBODY
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        by_cookie = not scheme and (request.method == "GET" or bool(origin))
        who = self.by_cookie(request) if by_cookie else self.by_token(given if scheme.lower() == "bearer" else "")
        if who is None:
            wrong = "this is no token of the daemon: it is wrong, or was removed" if scheme else "a bearer token is needed"
            raise ForbiddenError(401, f"{wrong}; an admin makes one by POST /v1/tokens")
        if ROLES.index(who.role) < ROLES.index(least):  # type: ignore[arg-type]
            raise ForbiddenError(403, f"{who.name} has the role {who.role}, and this needs at least the role {least}")
        return who

    def by_token(self, token: str) -> TokenRecord | None:
        """Return the record of a bearer token."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
        return next((one for one in self._records.tokens.values() if hmac.compare_digest(one.digest, digest)), None)

    def by_cookie(self, request: web.Request) -> TokenRecord | None:
        """Return the token record behind a page's cookie."""
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in {"same-origin", "none"}:
            return None  # another port of this machine is another origin, and gets the cookie all the same
        given = request.cookies.get(cookie_name(request), "")
        ends = given.partition(".")[0]
        if not (ends.isascii() and ends.isdecimal()) or len(ends) > 12 or int(ends) < self._clock.now():
            return None
        signed = ((one, self._signed(int(ends), one).encode()) for one in self._records.tokens.values())
        return next((one for one, right in signed if hmac.compare_digest(right, given.encode("utf-8", "surrogateescape"))), None)

    def cookie(self, who: TokenRecord) -> str:
        """Return the cookie for a page that has given a token."""
        return self._signed(int(self._clock.now()) + SESSION_S, who)

    def _signed(self, ends: int, who: TokenRecord) -> str:
        return f"{ends}.{hmac.new(self._key, f'{ends}.{who.name}.{who.digest}'.encode(), 'sha256').hexdigest()}"


def cookie_name(request: web.Request) -> str:
    """Return the name of the page's cookie: browsers send cookies of one port to all ports of a host."""
    port = request.headers.get("Host", "").rpartition(":")[2]
    return f"asyncrl-{port}" if port.isdecimal() else "asyncrl"
