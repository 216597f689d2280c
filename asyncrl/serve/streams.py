"""What is sent piece by piece: rows that come while somebody reads (server-sent events with numbers, or JSON lines), files, tars.

Rows come from files and from the database, never from a run's controller: readers cost a run nothing, however many and however
slow they are. A reader that is too slow is held back by its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from asyncrl.observe.steps import AT_ONCE_BYTES
from asyncrl.serve.guard import ForbiddenError
from asyncrl.serve.records import PRIVATE

LOOK_S = 0.5
"""Between looks for new rows."""
BEAT_S = 15.0
"""After this long without a row a comment is sent, so that a connection which is gone is found."""
MOST_CHUNK_BYTES = 4 << 20
SUMS_FILE = "SHA256SUMS"
"""Last member of a tar: the digest of every other, as `sha256sum -c` reads it."""

Rows = Callable[[], Awaitable[list[tuple[int, str, bytes]]]]
"""What has come since it was called last: number, kind, JSON."""


def json_response(value: Any, status: int = 200) -> web.Response:  # noqa: ANN401 - anything msgspec encodes
    """Return a value as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def last_event_id(request: web.Request) -> int:
    """Return behind which number a reader goes on: `Last-Event-ID`, or `?after=`; -1 for all.

    Raises:
        ForbiddenError: It is no number.
    """
    given = request.headers.get("Last-Event-ID") or request.query.get("after") or "-1"
    try:
        number = int(given)
    except ValueError as error:
        raise ForbiddenError(400, f"Last-Event-ID (or after) must be a whole number, got {given[:40]!r}") from error
    if not -1 <= number < 1 << 63:
        raise ForbiddenError(400, f"Last-Event-ID (or after) must be from 0 to {(1 << 63) - 1}, got {number}")
    return number


async def stream(request: web.Request, rows: Rows, is_over: Callable[[], bool]) -> web.StreamResponse:
    """Send rows until there are no more: as events where the reader accepts those, else as JSON lines."""
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
            if not over and sum(len(line) for _, _, line in found) < AT_ONCE_BYTES:  # else more may be there
                await asyncio.sleep(LOOK_S)
                silent_s += LOOK_S
        await response.write_eof()
    return response


async def send_tar(request: web.Request, folder: Path) -> web.StreamResponse:
    """Send a folder as a tar that ends with SUMS_FILE; without it, the download was cut off. Links are sent as what they mean.

    Raises:
        ForbiddenError: The folder has gone.
    """
    headers = {"Content-Type": "application/x-tar", "Content-Disposition": f'attachment; filename="{folder.name}.tar"'}
    response, sums = web.StreamResponse(headers=headers), b""

    async def send(name: str, size: int, pieces: Iterator[bytes]) -> None:
        entry = tarfile.TarInfo(f"{folder.name}/{name}")
        entry.size = size
        await response.write(entry.tobuf())
        while piece := await asyncio.to_thread(next, pieces, b""):
            await response.write(piece)
        await response.write(bytes(-size % tarfile.BLOCKSIZE))

    with contextlib.ExitStack() as opened:
        try:  # all of them first: what is open can be read to its end when the run removes the folder meanwhile
            inside = await asyncio.to_thread(lambda: sorted(path for path in folder.rglob("*") if path.is_file()))
            if not inside:
                raise FileNotFoundError(folder)  # noqa: TRY301 - as where it has gone a moment later
            files = [
                (path.relative_to(folder).as_posix(), opened.enter_context(path.open("rb")))
                for path in inside if path.name != SUMS_FILE
            ]  # fmt: skip
        except FileNotFoundError as error:
            raise ForbiddenError(404, f"{folder.name} has just been removed by its run; ask for a newer one") from error
        with contextlib.suppress(ConnectionError):  # the reader has gone
            await response.prepare(request)
            for name, file in files:
                digest = hashlib.sha256()

                def pieces(file: BinaryIO = file, digest: hashlib._Hash = digest) -> Iterator[bytes]:
                    while piece := file.read(MOST_CHUNK_BYTES):
                        digest.update(piece)
                        yield piece

                await send(name, os.fstat(file.fileno()).st_size, pieces())
                sums += f"{digest.hexdigest()}  {name}\n".encode()
            await send(SUMS_FILE, len(sums), iter((sums,)))
            await response.write(bytes(2 * tarfile.BLOCKSIZE))
            await response.write_eof()
    return response


def file_or_list(folder: Path, asked: str) -> web.StreamResponse:
    """Return a file of a run's folder (ranges and ETag are understood), or what is in a folder of it.

    Raises:
        ForbiddenError: There is none, or it is not for download.
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
    """A file that is sent whole where `If-Range` has another ETag than it has now: aiohttp looks at dates alone."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if (given := request.headers.get("If-Range", "")).startswith(('"', "W/")):
            with contextlib.suppress(OSError):  # gone meanwhile
                stat = self._path.stat()
                if given != f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"':
                    whole = request.headers.copy()
                    whole.popall("Range", None)
                    request = request.clone(headers=whole)
        return await super().prepare(request)
