"""The web page: its files, its session, and the routes only it uses. The page sends requests only to its own origin.

Numbers are sent as they are in the run's files. All data that grows with a run is read from the files, never from the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import math
import re
import tomllib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import re2  # type: ignore[import-untyped]
from aiohttp import web

from asyncrl.buffer.events import GroupState
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.config.live import OF_CONTROLLER, settings_of, value_at
from asyncrl.config.load import ALARMS, load_config
from asyncrl.config.run import AlarmRule
from asyncrl.control.api import read_body
from asyncrl.errors import LedgerError
from asyncrl.observe.alarms import RULES, raised_in
from asyncrl.observe.samples import CLIPPED, KEPT, TRAINED, SampleRow, TokenRow, read_samples, read_tokens
from asyncrl.observe.spans import MAX_BINS, Timeline
from asyncrl.observe.steps import (
    EVENTS_FILE,
    SECONDS_FILE,
    STEPS_FILE,
    RunEvent,
    SecondReport,
    StepReport,
    Tail,
    newest_rows,
    read_events,
    read_lines,
)
from asyncrl.reward.inputs import linear_pattern
from asyncrl.schema.samples import ids_from_bytes, logprobs_from_bytes
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.reading import StepSeen, json_response, last_event_id, number_of, stream
from asyncrl.serve.records import SESSION_S, ForbiddenError, Guard, Records, RunRecord, cookie_name

T = TypeVar("T")
FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".LICENSE": "text/plain"}
MOST_LOGIN_BYTES = 4096
MOST_RUNS = 500
"""Number of newest runs in the list; older ones are in it until they end."""
MOST_NAMES = 64
COUNT_LIMIT_S = 10.0
"""Time limit for counting one ledger."""
MOST_SECONDS = 3600
"""Maximum number of seconds in one answer; the newest are sent."""
MOST_LOG_LINES = 2000
MOST_LINE_CHARS = 2000
STAMP, STAMP_CHARS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "), 23
"""The time stamp at the start of a log line."""
BOUND_CHANGE = re.compile(r"from step (\d+) on: (?:.*, )?buffer\.max_staleness from (\d+) to (\d+)")
"""The text of an event of a live change that sets another staleness bound."""
MOST_TIMELINES = 4
"""Number of runs whose spans are kept in memory: 50 MB for a million spans."""
MOST_TOKENS = 2000
MOST_GROUPS = 100
"""Maximum number of groups in one answer."""


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/login."""

    token: str


def _beside(read: Callable[[Pages, web.Request], T]) -> Callable[[Pages, web.Request], Awaitable[T]]:
    """Run a handler on a thread, because it reads files that grow with a run."""

    @functools.wraps(read)
    def handler(page: Pages, request: web.Request) -> Awaitable[T]:
        return asyncio.to_thread(read, page, request)

    return handler


class Pages:
    """Handlers of the page's routes.

    Args:
        records: The runs.
        keeper: Has the newest status of every live run.
        guard: Makes cookies.
        is_over: Returns whether a run (or, without one, the daemon) will send nothing more.
        read_only: Whether orders are refused.
        behind_proxy: Whether browsers use TLS with a proxy, which this process cannot see.
    """

    def __init__(
        self, records: Records, keeper: Keeper, guard: Guard, is_over: Callable[[str], bool], *, read_only: bool,
        behind_proxy: bool = False,
    ) -> None:  # fmt: skip
        self._records, self._keeper, self._guard, self._is_over, self._read_only = records, keeper, guard, is_over, read_only
        self._behind_proxy = behind_proxy
        self._timelines: dict[str, Timeline] = {}
        self._newest: dict[str, tuple[int, str, StepSeen | None]] = {}
        """By run: version and state of its record, and its newest step at that time."""
        self._counting = ThreadPoolExecutor(1, "ledger")
        """A thread that counts ledgers, one at a time, because that takes seconds for a long run."""
        self._files = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.suffix in TYPES}

    def file(self, request: web.Request) -> web.FileResponse:
        """Return one of the page's files; without a name, the page itself."""
        name = request.match_info.get("file", "index.html")
        if name not in self._files:
            raise ForbiddenError(404, "the page has no such file")
        kind = f"{TYPES[self._files[name].suffix]}; charset=utf-8"
        return web.FileResponse(self._files[name], headers={"Content-Type": kind, "Cache-Control": "no-cache"})

    # -- the session -----------------------------------------------------------------------------------------------------

    async def login(self, request: web.Request) -> web.StreamResponse:
        """Return a cookie in exchange for a token."""
        who = self._guard.by_token(msgspec.json.decode(await read_body(request, MOST_LOGIN_BYTES), type=Login).token)
        if who is None:
            raise ForbiddenError(401, "this is no token of the daemon")
        response = json_response({"name": who.name, "role": who.role})
        name, cookie = cookie_name(request), self._guard.cookie(who)
        secure = request.secure or self._behind_proxy
        response.set_cookie(name, cookie, max_age=SESSION_S, httponly=True, samesite="Strict", secure=secure)
        return response

    def logout(self, request: web.Request) -> web.Response:
        """Delete the cookie."""
        response = json_response({})
        response.del_cookie(cookie_name(request))
        return response

    def session(self, request: web.Request) -> dict[str, object]:
        """Return the name and role of the logged-in user; the name is empty if nobody is logged in."""
        who = self._guard.by_cookie(request)
        return {"name": who.name if who else "", "role": who.role if who else "", "read_only": self._read_only}

    # -- what comes ------------------------------------------------------------------------------------------------------

    async def live_runs(self, request: web.Request) -> web.StreamResponse:
        """Stream records of the newest runs and of all that have not ended, with active alarms and the newest step.

        All are sent whenever one has changed.
        """
        sent, number = b"", 0

        async def rows() -> list[tuple[int, str, bytes]]:
            nonlocal sent, number
            runs = sorted(self._records.runs.values(), key=lambda run: -run.number)
            newest = [run for place, run in enumerate(runs) if place < MOST_RUNS or run.state != "ended"]
            statuses = [self._keeper.statuses.get(run.id) for run in newest]
            alarms = [[alarm.rule for alarm in status.alarms] if status else [] for status in statuses]
            steps = await asyncio.to_thread(self._newest_steps, newest)
            about = zip(newest, alarms, steps, strict=True)
            told = [{**msgspec.structs.asdict(run), "alarms": standing, "newest": step} for run, standing, step in about]
            if (now := msgspec.json.encode({"runs": told, "total": len(runs)})) == sent:
                return []
            sent, number = now, number + 1
            return [(number, "runs", now)]

        return await stream(request, rows, lambda: self._is_over(""))

    def _newest_steps(self, runs: Sequence[RunRecord]) -> list[StepSeen | None]:
        """Return the newest step of each run; it is read again when the run's version or state has changed."""
        for run in runs:
            if self._newest.get(run.id, ())[:2] != (run.version, run.state):
                step = next(newest_rows(self._records.run_folder(run.id) / STEPS_FILE, StepSeen), None)
                self._newest[run.id] = (run.version, run.state, step)
        return [self._newest[run.id][2] for run in runs]

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Stream a run's status, steps and events; each row has the number of the newest step."""
        run, newest = request.match_info["run"], last_event_id(request)
        folder = self._records.run_folder(run)
        steps = Tail(folder / STEPS_FILE, "step", "step", newest, number_of(request, "offset"))
        events = Tail(folder / EVENTS_FILE, "seq", "event", number_of(request, "events"))
        seconds = Tail(folder / SECONDS_FILE, "time_s", "second", -1, number_of(request, "seconds"))
        shown: Any = None

        async def rows() -> list[tuple[int, str, bytes]]:
            nonlocal newest, shown
            found = await steps.rows()
            newest = found[-1][0] if found else newest
            found += [(newest, kind, line) for _, kind, line in await events.rows()]
            found += [(newest, kind, line) for _, kind, line in await seconds.rows()]
            status, record = self._keeper.statuses.get(run), self._records.runs[run]
            if (status, record) != shown:
                shown = (status, record)
                found.append((newest, "status", msgspec.json.encode({"status": status, "record": record})))
            return found

        return await stream(request, rows, lambda: self._is_over(run))

    # -- what is there ---------------------------------------------------------------------------------------------------

    @_beside
    def series(self, request: web.Request) -> dict[str, Any]:
        """Return values over all steps (null if a step has none), the newest step, and the byte where reading ended.

        Return also the staleness bounds, each with the first step that it held for, and the number of the newest event seen.
        Only the requested values of each line are kept: a run may have 10,000 lines with 150 values each.
        """
        names = [name for name in request.query.get("names", "").split(",") if name]
        if len(names) > MOST_NAMES:
            raise ForbiddenError(400, f"names has at most {MOST_NAMES} names, got {len(names)}")
        decoder, rows, num_bytes = msgspec.json.Decoder(StepReport), dict[int, list[Any]](), 0
        newest, own = None, frozenset(StepReport.__struct_fields__) - {"metrics"}
        path, source = self._folder(request) / STEPS_FILE, self._folder(request) / "config.toml"
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            for line in file:
                num_bytes += len(line) if line.endswith(b"\n") else 0
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # torn by a writer that was killed
                    found = decoder.decode(line)
                    rows[found.step] = [getattr(found, name) if name in own else found.metrics.get(name) for name in names]
                    newest = found if newest is None or found.step >= newest.step else newest
        steps = sorted(rows)
        events = list(read_events(self._folder(request)))  # before the config, which a change replaces before its event
        buffer = tomllib.loads(source.read_text(encoding="utf-8")).get("buffer", {}) if source.exists() else {}
        return {
            "steps": steps,
            "columns": {name: [rows[step][place] for step in steps] for place, name in enumerate(names)},
            "newest": newest,
            "offset": num_bytes,
            "bounds": _bounds(events, buffer.get("max_staleness")),
            "events": events[-1].seq if events else 0,
        }

    @_beside
    def alarms(self, request: web.Request) -> dict[str, Any]:
        """Return the alarms that a run has raised, newest first, and the rules with the action for each."""
        folder, source = self._folder(request), self._records.config_file(request.match_info["run"])
        chosen = {str(rule): what for rule, what in load_config(source).observe.alarms.items()} if source.exists() else {}
        shown = ("name", "level", "meets", "needed", "of", "source", "advice")
        rules = [{**{field: getattr(rule, field) for field in shown}, "action": chosen.get(rule.name, "warn")} for rule in RULES]
        return {"alarms": raised_in(read_events(folder))[::-1], "rules": rules}

    @_beside
    def seconds(self, request: web.Request) -> dict[str, Any]:
        """Return a run's state in each of its newest seconds, and the byte where reading ended."""
        path = self._folder(request) / SECONDS_FILE
        num_bytes = path.stat().st_size if path.exists() else 0  # first: what comes meanwhile is said twice, and not left out
        return {"rows": list(deque(read_lines(path, SecondReport), MOST_SECONDS)), "offset": num_bytes}

    async def ledger(self, request: web.Request) -> dict[str, Any]:
        """Return counts of the ledger; the count is not started if the request was cancelled before."""
        return await asyncio.get_running_loop().run_in_executor(self._counting, self._counts, request)

    def _counts(self, request: web.Request) -> dict[str, Any]:
        reader = self._ledger(request)
        return {  # sums that the page compares are read one right after the other
            "issued": reader.issued(), "trained_in_steps": reader.trained_in_steps(), "states": reader.counts(),
            "prompts": reader.prompts(), "versions": reader.versions(), "steps": reader.steps(),
        }  # fmt: skip

    @_beside
    def groups(self, request: web.Request) -> list[dict[str, Any]]:
        """Return the newest groups in a state, with data of their members but no texts of completions."""
        state = request.query.get("state", "")
        if state not in get_args(GroupState):
            raise ForbiddenError(400, f"state is one of {', '.join(get_args(GroupState))}, got {state[:40]!r}")
        shown = ("group_id", "reason", "generator", "version", "attempt", "size")
        return [
            {
                **{name: getattr(group, name) for name in shown},
                "prompt_id": group.prompt.prompt_id,
                "rewards": [one.reward for one in group.samples if one.reward is not None],
                "tokens": [one.num_tokens for one in group.samples if one.num_tokens],
                "failures": sorted({one.failure for one in group.samples if one.failure}),
            }
            for group in self._ledger(request).groups(state, MOST_GROUPS)
        ]

    @_beside
    def samples(self, request: web.Request) -> dict[str, Any]:
        """Return the kept samples of a step (default: the newest), and the list of steps; of repeated steps the last is used."""
        folder, step = self._folder(request), number_of(request, "step", -1)
        steps: set[int] = set()
        rows: dict[tuple[int, int], SampleRow] = {}
        for row in read_samples(folder):
            if step < 0 and rows and row.step != next(iter(rows.values())).step:
                rows = {}
            steps.add(row.step)
            if row.step == step or step < 0:
                rows[row.group_id, row.index] = row
        step = next(iter(rows.values())).step if rows else step
        learned = {key: _columns(parts) for key, parts in read_tokens(folder, step).items()}
        prompts = {row.group_id: (row.prompt_id, row.prompt) for row in rows.values()}
        for key in learned.keys() - rows.keys():  # kept by the learner, for its ratios
            texts, reward, trained = learned[key]["text"], learned[key]["reward"], learned[key]["trained"]
            versions, about = learned[key]["version"][trained].tolist(), prompts.get(key[0], ("", ""))
            rows[key] = SampleRow(step, *key, *about, "".join(texts), reward, {}, min(versions), max(versions), len(texts), "")
        shown = []
        for key, row in rows.items():
            lag = step - row.oldest_version if row.oldest_version >= 0 else None
            ratios = learned[key]["ratio"][learned[key]["trained"]] if key in learned else ()
            p99 = float(np.quantile(ratios, 0.99)) if len(ratios) else None
            shown.append({**msgspec.structs.asdict(row), "lag": lag, "ratio_p99": p99})
        return {"steps": sorted(steps), "rows": shown}

    @_beside
    def tokens(self, request: web.Request) -> dict[str, Any]:
        """Return the learner's figures for up to MOST_TOKENS tokens of a sample, and its group's rewards; empty if not kept."""
        step, group, index, first = (number_of(request, name) for name in ("step", "group", "index", "first"))
        folder = self._folder(request)
        parts = read_tokens(folder, step).get((group, index))
        if parts is None:
            return {"num_tokens": 0}
        columns, rewards = _columns(parts), list[dict[str, Any]]()
        with contextlib.suppress(LedgerError):
            for one in LedgerReader(folder).group(group).samples:
                rewards.append({"index": one.index, "state": one.state, "reward": one.reward, "tokens": one.num_tokens})
        window = {
            name: [None if isinstance(value, float) and not math.isfinite(value) else value for value in column.tolist()]
            for name, values in columns.items() if isinstance(values, np.ndarray)
            for column in [values[first : first + MOST_TOKENS]]
        }  # fmt: skip
        texts = columns["text"]
        return {"num_tokens": len(texts), "first": first, **window, "text": texts[first : first + MOST_TOKENS], "group": rewards}

    @_beside
    def logs(self, request: web.Request) -> list[tuple[str, str]]:
        """Return the newest log lines of all processes, by time, that contain a text (ignoring case) or match a pattern."""
        wanted, pattern = request.query.get("q", "").lower(), request.query.get("pattern", "")
        try:
            found = linear_pattern(f"(?i){pattern}") if pattern else None
        except re2.error as error:
            raise ForbiddenError(400, f"{pattern[:100]!r} is not a valid RE2 pattern: {error}") from error

        def has(line: str) -> bool:
            if found is None:
                return wanted in line.lower()
            return next(found.finditer(line.encode("utf-8", "replace")), None) is not None

        rows: list[tuple[str, str, str]] = []
        for path in sorted((self._folder(request) / "logs").glob("*.log")):
            if path.is_symlink() or not path.is_file():
                continue
            stamp, newest = "", deque[tuple[str, str, str]](maxlen=MOST_LOG_LINES)
            with path.open(encoding="utf-8", errors="replace") as file:
                while line := file.readline(MOST_LINE_CHARS):
                    # A line without one goes on with what was before: a traceback, a message of several lines.
                    stamp = line[:STAMP_CHARS] if STAMP.match(line) else stamp
                    if has(line.rstrip("\n")):
                        newest.append((stamp, path.stem, line.rstrip("\n")))
            rows += newest
        rows.sort(key=lambda row: row[0])  # and lines of one moment as they are in their file
        return [(process, line) for _, process, line in rows[-MOST_LOG_LINES:]]

    def timeline(self, request: web.Request) -> Awaitable[dict[str, object]]:
        """Return the spans of a time window, in bins if there are many; times are seconds since the first span."""
        limits = [request.query.get(name, "") for name in ("from", "to")]
        try:
            from_s, to_s = (float(given or default) for given, default in zip(limits, ("-inf", "inf"), strict=True))
        except ValueError as error:
            raise ForbiddenError(400, f"from and to must be seconds, got {limits}") from error
        num_bins = number_of(request, "bins", 800)
        if not (from_s <= to_s and 1 <= num_bins <= MAX_BINS):
            raise ForbiddenError(400, f"from must not be after to, and bins must be from 1 to {MAX_BINS}")
        run = request.match_info["run"]
        known = self._timelines.pop(run, None) or Timeline(self._folder(request))
        self._timelines[run] = known  # the newest is the last
        if len(self._timelines) > MOST_TIMELINES:
            del self._timelines[next(iter(self._timelines))]
        return asyncio.to_thread(known.window, from_s, to_s, num_bins)

    def changeable(self, request: web.Request) -> dict[str, Any]:
        """Return the fields that can change during a run, with their current values."""
        config = load_config(self._folder(request) / "config.toml")
        alarms = {f"{ALARMS}{rule}": config.observe.alarms.get(rule, "warn") for rule in get_args(AlarmRule)}
        return {"fields": settings_of(config) | {name: value_at(config, name) for name in OF_CONTROLLER}, "alarms": alarms}

    def _folder(self, request: web.Request) -> Path:
        return self._records.run_folder(request.match_info["run"])

    def _ledger(self, request: web.Request) -> LedgerReader:
        if not (path := self._folder(request) / "ledger.sqlite").exists():
            raise ForbiddenError(404, "the run has no ledger on disk")
        return LedgerReader(path, COUNT_LIMIT_S)


def _bounds(events: Iterable[RunEvent], newest: int | None) -> list[tuple[int, int]]:
    """Return the staleness bounds of a run, each with its first step; the last one that began holds. `newest` is the config's."""
    bounds, resumed = list[tuple[int, int]](), 0
    for event in events:
        if event.kind == "restart" and event.subject == "run":
            resumed = event.version
        elif event.kind == "change" and (found := BOUND_CHANGE.match(event.text)):
            step, before, after = map(int, found.groups())
            if not bounds or bounds[-1][1] != before:  # a resume sets another bound without an event of a change
                bounds.append((resumed if bounds else 0, before))
            bounds.append((step, after))
    if newest is not None and (not bounds or bounds[-1][1] != newest):
        bounds.append((resumed if bounds else 0, newest))
    return bounds


def _columns(parts: Sequence[TokenRow]) -> dict[str, Any]:
    """Return the learner's figures for a sample: arrays [T] by name, the texts, the reward."""
    floats = ("behaviour", "learner", "weights", "entropy", "advantages")
    columns: dict[str, Any] = {
        name: np.concatenate([logprobs_from_bytes(getattr(part, name)) for part in parts]).astype(float) for name in floats
    }
    flags = np.frombuffer(b"".join(part.flags for part in parts), dtype=np.uint8)
    columns |= {"trained": flags & TRAINED > 0, "kept": flags & KEPT > 0, "clipped": flags & CLIPPED > 0}
    columns |= {"ratio": np.exp(columns["learner"] - columns["behaviour"]), "reward": parts[0].reward}
    columns |= {"token": np.concatenate([ids_from_bytes(part.token_ids) for part in parts])}
    columns |= {"version": np.concatenate([ids_from_bytes(part.versions) for part in parts])}
    return columns | {"text": [text for part in parts for text in part.texts]}
