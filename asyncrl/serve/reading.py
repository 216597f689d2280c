"""Answers read from the files of runs: streams of rows, files, tars, newest metrics, comparisons of runs.

Rows are sent as numbered server-sent events, or as JSON lines. They come from files and from the database, never from a run's
controller: readers cost a run nothing, however many and however slow they are. A slow reader slows only its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from asyncrl.config.load import load_config
from asyncrl.observe.sinks import MetricsRow, label_text, newest_values, render_prometheus
from asyncrl.observe.steps import EVAL_FILE, MOST_READ_BYTES, STEPS_FILE, EvalReport, StepReport, newest_rows
from asyncrl.serve.records import PRIVATE, ForbiddenError, Records

MOST_SERIES = 300
"""Maximum number of metrics of one run in /metrics; the number of omitted ones is a metric too."""
OWN_METRICS = {
    "version": "the run's policy version",
    "serve_metrics_left_out": "metrics of the run that are not here, as they are too many",
}
"""The daemon's own metrics of each live run, with their descriptions."""
LAST_STEPS = 50
"""Number of last steps over which reward, staleness and speed are compared."""
LOOK_S = 0.5
"""Time between two checks for new rows."""
BEAT_S = 15.0
"""After this long without a row a comment is sent, to detect a broken connection."""
MOST_CHUNK_BYTES = 4 << 20
SUMS_FILE = "SHA256SUMS"
"""Last member of a tar: the digests of all other members, for `sha256sum -c`."""

Rows = Callable[[], Awaitable[list[tuple[int, str, bytes]]]]
"""Returns the rows since its last call: number, kind, JSON."""


def json_response(value: Any, status: int = 200) -> web.Response:  # noqa: ANN401 - anything msgspec encodes
    """Return a value as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def number_of(request: web.Request, name: str, default: int = 0, header: str = "") -> int:
    """Return a whole number from this header, else from the query; if neither is given, return `default`.

    Raises:
        ForbiddenError: The value is not a whole number from 0 to 2^63 - 1.
    """
    given = request.headers.get(header) or request.query.get(name, "")
    if given in {"", str(default)}:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) <= 19 and int(given) < 1 << 63):
        what = f"{header} (or {name})" if header else name
        raise ForbiddenError(400, f"{what} must be a whole number from 0 to {(1 << 63) - 1}, got {given[:40]!r}")
    return int(given)


def last_event_id(request: web.Request) -> int:
    """Return the number after which a reader continues: `Last-Event-ID`, or `?after=`; -1 for all."""
    return number_of(request, "after", -1, header="Last-Event-ID")


async def stream(request: web.Request, rows: Rows, is_over: Callable[[], bool]) -> web.StreamResponse:
    """Send rows until there are no more: as server-sent events if the reader accepts them, else as JSON lines."""
    as_events = "text/event-stream" in request.headers.get("Accept", "")
    kind = "text/event-stream" if as_events else "application/x-ndjson"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"})
    with contextlib.suppress(ConnectionError):  # the reader has gone
        await response.prepare(request)
        silent_s = 0.0
        while True:
            over = is_over()  # asked first: what was written before the end is still read
            found = await rows()
            if found:
                shown = [
                    b"id: %d\nevent: %b\ndata: %b\n\n" % (number, name.encode(), line) if as_events else line + b"\n"
                    for number, name, line in found
                ]
                await response.write(b"".join(shown))
                silent_s = 0.0
            elif over:
                break
            elif as_events and silent_s >= BEAT_S:
                await response.write(b": still here\n\n")
                silent_s = 0.0
            if not over and sum(len(line) for _, _, line in found) < MOST_READ_BYTES // 4:  # else more may be there
                await asyncio.sleep(LOOK_S)
                silent_s += LOOK_S
        await response.write_eof()
    return response


async def send_tar(request: web.Request, folder: Path) -> web.StreamResponse:
    """Send a folder as a tar that ends with SUMS_FILE; without it, the download was cut off. Links are sent as their targets.

    Raises:
        ForbiddenError: The folder was removed.
    """
    headers = {"Content-Type": "application/x-tar", "Content-Disposition": f'attachment; filename="{folder.name}.tar"'}
    response, sums = web.StreamResponse(headers=headers), io.BytesIO()
    with contextlib.ExitStack() as opened:
        try:  # all of them first: what is open can be read to its end when the run removes the folder meanwhile
            inside = await asyncio.to_thread(lambda: sorted(path for path in folder.rglob("*") if path.is_file()))
            if not inside:
                raise FileNotFoundError(folder)  # noqa: TRY301 - as where it has gone a moment later
            files: list[tuple[str, BinaryIO]] = [
                (path.relative_to(folder).as_posix(), opened.enter_context(path.open("rb")))
                for path in inside if path.name != SUMS_FILE
            ]  # fmt: skip
        except FileNotFoundError as error:
            raise ForbiddenError(404, f"{folder.name} has just been removed by its run; ask for a newer one") from error
        with contextlib.suppress(ConnectionError):  # the reader has gone
            await response.prepare(request)
            for name, file in [*files, (SUMS_FILE, sums)]:  # which has a line of every other by then
                entry, digest = tarfile.TarInfo(f"{folder.name}/{name}"), hashlib.sha256()
                entry.size = file.seek(0, os.SEEK_END)
                file.seek(0)
                await response.write(entry.tobuf())
                while piece := await asyncio.to_thread(file.read, MOST_CHUNK_BYTES):
                    await asyncio.to_thread(digest.update, piece)
                    await response.write(piece)
                await response.write(bytes(-entry.size % tarfile.BLOCKSIZE))
                sums.write(f"{digest.hexdigest()}  {name}\n".encode())
            await response.write(bytes(2 * tarfile.BLOCKSIZE))
            await response.write_eof()
    return response


def file_or_list(folder: Path, asked: str) -> web.StreamResponse:
    """Return a file of a run's folder (with support for ranges and ETag), or the list of a folder.

    Raises:
        ForbiddenError: The file does not exist, or may not be downloaded.
    """
    folder = folder.resolve()
    try:
        path = (folder / asked).resolve()
        found = path.is_relative_to(folder) and not PRIVATE & set(path.relative_to(folder).parts)
        found = found and (path.is_file() or path.is_dir())
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a zero byte
        found = False
    if not found:
        raise ForbiddenError(404, f"the run has no file {asked!r}")
    if path.is_dir():
        rows = []
        for child in sorted(child for child in path.iterdir() if child.name not in PRIVATE):
            with contextlib.suppress(OSError):  # gone meanwhile, or a link to nothing
                stat = child.stat()
                rows.append({
                    "name": child.name, "folder": child.is_dir(), "bytes": stat.st_size, "changed_s": stat.st_mtime,
                })  # fmt: skip
        return json_response(rows)
    return _File(path, headers={"Content-Disposition": "attachment"})


class _File(web.FileResponse):
    """A file that is sent complete if its ETag differs from `If-Range`; aiohttp compares only dates."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if (given := request.headers.get("If-Range", "")).startswith(('"', "W/")):
            with contextlib.suppress(OSError):  # gone meanwhile
                stat = self._path.stat()
                if given != f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"':
                    whole = request.headers.copy()
                    whole.popall("Range", None)
                    request = request.clone(headers=whole)
        return await super().prepare(request)


# -- several runs at once ----------------------------------------------------------------------------------------------


class StepSeen(msgspec.Struct, frozen=True):
    """The part of a run's newest step that the list of runs shows; see `StepReport`."""

    step: int
    reward_mean: float
    staleness_mean: float
    staleness_max: int
    learner_idle: float
    generators_idle: float


def metrics_text(records: Records, answered: Mapping[int, int]) -> str:
    """Return the newest metrics of every live run, and counts of the daemon: runs by state, requests by status (`answered`)."""
    runs = list(records.runs.values())
    states = {state: sum(run.state == state for run in runs) for state in ("queued", "starting", "live", "ended")}
    lines = ["# HELP asyncrl_serve_runs runs of the daemon by state", "# TYPE asyncrl_serve_runs gauge"]
    lines += [f'asyncrl_serve_runs{{state="{name}"}} {n}' for name, n in states.items()]
    lines += ["# HELP asyncrl_serve_requests_total requests that the daemon has answered, by status"]
    lines += ["# TYPE asyncrl_serve_requests_total counter"]
    lines += [f'asyncrl_serve_requests_total{{status="{status}"}} {n}' for status, n in sorted(answered.items())]
    newest: dict[str, dict[str, float]] = {}
    for run in runs:
        if run.state == "live":
            seen, folder = dict[str, float](), records.run_folder(run.id)
            for row in reversed(list(newest_rows(folder / "metrics.jsonl", MetricsRow))):
                seen = newest_values(seen, row.metrics)
            # The end of metrics.jsonl has no evaluation where the newest is many steps ago.
            if (evaluated := next(newest_rows(folder / EVAL_FILE, EvalReport), None)) is not None:
                seen["eval/reward_mean"] = evaluated.reward_mean
                if evaluated.accuracy is not None:
                    seen["eval/accuracy"] = evaluated.accuracy
            values = sorted(seen.items())
            own = dict(zip(OWN_METRICS, (run.version, max(0, len(values) - MOST_SERIES)), strict=True))
            newest[f'run="{label_text(run.id)}",project="{label_text(run.project)}"'] = {**dict(values[:MOST_SERIES]), **own}
    return "\n".join(lines) + "\n" + render_prometheus(newest, OWN_METRICS)


def compared(records: Records, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return results of runs, and the settings in which they differ (none of a run whose folder is gone).

    Only their newest steps are read.
    """
    rows = list[dict[str, Any]]()
    for record, folder in ((records.runs[name], records.run_folder(name)) for name in names):
        newest, source = dict[int, StepReport](), records.config_file(record.id)
        for step in newest_rows(folder / STEPS_FILE, StepReport):
            newest.setdefault(step.step, step)  # of a step that was repeated the last line counts
        last = [newest[number] for number in sorted(newest)][-LAST_STEPS:]
        reach = max(1, len(last) // 4)  # steps may come in bursts; a pause is in less than half of these spans
        spans = zip(last, last[reach:], strict=False)
        step_s = median([(late.time_s - early.time_s) / (late.step - early.step) for early, late in spans] or [0.0])
        rows.append({
            "run": record.id,
            "outcome": record.outcome or record.state,
            "version": record.version,
            "accuracy_before": record.accuracy_before,
            "accuracy_after": record.accuracy_after,
            "reward": sum(step.reward_mean for step in last) / len(last) if last else None,
            "staleness": sum(step.staleness_mean for step in last) / len(last) if last else None,
            "steps_per_s": 1 / step_s if step_s > 0 else None,
            "config": _flat(msgspec.to_builtins(load_config(source))) if source.exists() else {},
        })  # fmt: skip
    keys = {key for row in rows for key in row["config"]}
    same = {key for key in keys if len({repr(row["config"].get(key)) for row in rows if row["config"]}) == 1}
    return [{**row, "config": {key: value for key, value in row["config"].items() if key not in same}} for row in rows]


def _flat(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found
