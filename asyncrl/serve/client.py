"""Use a daemon from Python: submit runs, read their results, wait for them. The runs continue if the submitting script ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, TypeVar, get_args

import aiohttp
import msgspec

from asyncrl.client import RunClient, connect, error_in
from asyncrl.config.load import dump_config, find_config, read_config_text
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError, LaunchError, RunError, RunLostError
from asyncrl.schema.status import RunStatus
from asyncrl.serve.reading import MOST_CHUNK_BYTES, SUMS_FILE
from asyncrl.serve.records import RunRecord
from asyncrl.serve.submit import Fork, Resume, Submission
from asyncrl.sweep.statistics import Comparison, compare

LOOK_S = 1.0
"""Time between two checks of awaited runs."""
READ_S = 60.0
"""A download fails if nothing arrives for this long."""
ComparedValue = Literal["accuracy_before", "accuracy_after", "reward", "staleness", "steps_per_s"]
"""`reward` and `staleness` are means of the last 50 steps, `steps_per_s` is their median speed."""
T = TypeVar("T")


class Server:
    """A daemon (`asyncrl serve`); use as an async context manager.

    Example:
        >>> async with asyncrl.Server("http://127.0.0.1:7717", token=TOKEN) as server:  # doctest: +SKIP
        ...     runs = [await server.submit("quickstart", name=f"eta-{eta}", set={"buffer.max_staleness": eta}) for eta in (0, 2)]
        ...     async for run in server.ended(runs):
        ...         print(run.id, run.outcome, run.accuracy_after)
    """

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url.rstrip("/"), token
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"})
        try:
            await self._ask("GET", "/v1/machine", dict)
        except BaseException as error:
            await self._http.close()
            if isinstance(error, RunError):
                said = f"no daemon answers at {self._url}" if isinstance(error, RunLostError) else f"{self._url} refuses"
                raise LaunchError(f"{said}: {error}") from error
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._http is not None:
            await self._http.close()

    async def submit(
        self,
        config: str | Path | Mapping[str, Any] | RunConfig,
        *,
        name: str = "",
        presets: Sequence[str] = (),
        set: Mapping[str, Any] | None = None,  # noqa: A002 - as in TOML and on the command line
        project: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        key: str = "",
    ) -> RunRecord:
        """Queue a run.

        Args:
            config: A TOML file on this machine, the name of a shipped config, tables, or a config.
            name: The run's name; empty: the config's.
            presets: Names of shipped configs that override the config.
            set: Values by field `a.b`, which override everything else.
            project: Label to find the run by.
            tags: Labels to find the run by.
            priority: Runs with a higher number start first.
            key: Idempotency key: a repeat with the same key and arguments returns the same run.

        Raises:
            RunError: The submission is refused; the message has every fault.
        """
        given: str | dict[str, Any]
        if isinstance(config, RunConfig):
            given = dump_config(config)
        elif isinstance(config, Mapping):
            given = dict(config)
        else:
            given = read_config_text(find_config(config)) + "\n"
        asked = Submission(given, tuple(presets), dict(set or {}), name, project, tuple(tags), priority)
        return await self._ask("POST", "/v1/runs", RunRecord, asked, {"Idempotency-Key": key} if key else None)

    async def fork(
        self, run: RunRecord | str, name: str, *, checkpoint: str = "", set: Mapping[str, Any] | None = None,  # noqa: A002 - as above
        project: str = "", tags: Sequence[str] = (), priority: int = 0,
    ) -> RunRecord:  # fmt: skip
        """Queue a new run that starts from a checkpoint's weights of another run; without `project`, in that run's project."""
        asked = Fork(name, checkpoint, dict(set or {}), priority, project, tuple(tags))
        return await self._ask("POST", f"/v1/runs/{_id(run)}/fork", RunRecord, asked)

    async def runs(self, **query: str) -> list[RunRecord]:
        """Return runs, newest first: all, or by `state`, `project`, `tag`; at most 1,000."""
        page = await self._ask("GET", "/v1/runs", dict[str, Any], query={"limit": "1000", **query})
        return msgspec.convert(page["runs"], list[RunRecord])

    async def show(self, run: RunRecord | str) -> RunRecord:
        """Return a run's record."""
        return await self._ask("GET", f"/v1/runs/{_id(run)}", RunRecord)

    async def cancel(self, run: RunRecord | str) -> RunRecord:
        """Take a queued run out of the queue."""
        return await self._ask("POST", f"/v1/runs/{_id(run)}/cancel", RunRecord)

    async def resume(self, run: RunRecord | str, num_steps: int = 0) -> RunRecord:
        """Continue a paused run, or queue an ended run again; `num_steps` is the ended run's new goal (0: as before)."""
        await self._ask("POST", f"/v1/runs/{_id(run)}/resume", RunStatus, Resume(num_steps))
        return await self.show(run)

    async def ended(self, runs: Iterable[RunRecord | str]) -> AsyncIterator[RunRecord]:
        """Yield runs as they end."""
        waiting = {_id(run) for run in runs}
        while waiting:
            for run in sorted(waiting):
                record = await self.show(run)
                if record.state == "ended":
                    waiting.discard(run)
                    yield record
            if waiting:
                await asyncio.sleep(LOOK_S)

    async def download(self, run: RunRecord | str, into: str | Path, *, checkpoint: str = "newest") -> Path:
        """Download a checkpoint; every file is checked against its SHA-256.

        Args:
            run: The run, or its id.
            into: A folder; created if missing.
            checkpoint: Name of the folder under checkpoints/.

        Returns:
            The checkpoint's folder, such as `into`/step-000050; it appears only when it is complete.

        Raises:
            RunError: There is no such checkpoint, it arrived damaged, or `into` has it already.
        """
        path, patience = f"/v1/runs/{_id(run)}/checkpoints/{checkpoint}", aiohttp.ClientTimeout(total=None, sock_read=READ_S)
        with _place_in(Path(into)) as archive:
            try:
                async with self._open().get(f"{self._url}{path}", timeout=patience) as response:
                    if response.status >= 400:
                        raise RunError(error_in(await response.read()))
                    async for piece in response.content.iter_chunked(MOST_CHUNK_BYTES):
                        await asyncio.to_thread(archive.write, piece)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise RunError(f"{self._url}{path} was cut off: {error}; ask again") from error
            return await asyncio.to_thread(_unpacked, archive, Path(into))

    async def compare(
        self, runs: Sequence[RunRecord | str], *, by: str, metric: ComparedValue = "accuracy_after", baseline: str = ""
    ) -> list[Comparison]:
        """Compare runs that differ in one field of their configs: means with intervals, and p of differences paired by `seed`.

        Args:
            runs: The runs to compare, at most 50. A run that has not ended or has no value is left out; for `accuracy_after`,
                a run that is not done too.
            by: The field, such as `buffer.max_staleness`; runs with the same value are one arm.
                Of two runs in an arm with the same seed, the last one counts.
            metric: The metric to compare.
            baseline: The value of `by` to compare the others with, as text; empty: the first run's value.

        Raises:
            RunError: There is no such run.
            ConfigError: `metric` is unknown, the runs do not differ in `by`, or none that counts has the value `baseline`.
        """
        if metric not in get_args(ComparedValue):
            raise ConfigError(f"metric must be one of {', '.join(get_args(ComparedValue))}, got {metric!r}")
        names = ",".join(_id(run) for run in runs)
        page = await self._ask("GET", "/v1/compare", dict[str, list[dict[str, Any]]], query={"runs": names})
        arms: dict[str, dict[int, float]] = {}
        if not any(by in row["config"] for row in page["runs"]):  # which has only the fields that differ
            raise ConfigError(f"these runs do not differ in {by!r}")
        ended = {"done"} if metric == "accuracy_after" else {"done", "stopped", "failed"}
        for row in page["runs"]:
            arm = arms.setdefault(str(row["config"].get(by)), {})  # also where its first run does not count
            if row["outcome"] in ended and row[metric] is not None:
                arm[row["config"].get("seed", 0)] = row[metric]
        return compare(arms, baseline)

    def connect(self, run: RunRecord | str) -> RunClient:
        """Return a client of one run, for its status, steps and orders."""
        return connect(f"{self._url}/v1/runs/{_id(run)}", token=self._token)

    async def _ask(
        self, method: str, path: str, kind: type[T], body: Any = None, headers: Mapping[str, str] | None = None,  # noqa: ANN401
        query: Mapping[str, str] | None = None,
    ) -> T:  # fmt: skip
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._open().request(method, f"{self._url}{path}", data=data, headers=headers, params=query) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise RunLostError(f"{self._url} does not answer: {error}") from error
        if response.status >= 400:
            raise RunError(error_in(answer))
        return msgspec.json.decode(answer, type=kind)

    def _open(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RunError("this server is closed; use it inside `async with`")
        return self._http


def _id(run: RunRecord | str) -> str:
    return run if isinstance(run, str) else run.id


@contextlib.contextmanager
def _place_in(folder: Path) -> Iterator[BinaryIO]:
    """Open a file in a new folder under `folder`; the new folder is removed afterwards with everything in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as place, Path(place, "tar").open("w+b") as archive:
        yield archive


def _unpacked(archive: BinaryIO, into: Path) -> Path:
    """Unpack a tar of one folder beside it, check its files against their sums, and move the folder into `into`."""
    place = Path(archive.name).parent / "unpacked"
    place.mkdir()
    archive.seek(0)
    try:
        with tarfile.open(fileobj=archive) as opened:
            for member in opened:  # `extractall` has no filter before Python 3.11.4
                path, content = place / member.name, opened.extractfile(member) if member.isfile() else None
                if not path.is_relative_to(place) or ".." in Path(member.name).parts or (content is None and not member.isdir()):
                    raise ValueError(f"{member.name!r} is no file of a checkpoint")  # noqa: TRY301 - as where there are several
                if content is None:
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
        (folder,) = place.iterdir()
    except (tarfile.TarError, ValueError) as error:
        raise RunError(f"the checkpoint came damaged: {error}; ask again") from error
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != SUMS_FILE:
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    lines = (folder / SUMS_FILE).read_text(encoding="utf-8").splitlines() if (folder / SUMS_FILE).exists() else []
    written = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if wrong := sorted(name for name in {*found, *written} if found.get(name) != written.get(name)):
        raise RunError(f"{folder.name} came damaged ({', '.join(wrong)}); ask again")
    try:
        return folder.rename(into / folder.name)
    except OSError as error:
        raise RunError(f"{into} has {folder.name} already; take another folder") from error
