"""A daemon from Python: submit runs, look at them, wait for them. A study written so survives the script that submitted it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from asyncrl.client import RunClient, connect
from asyncrl.config.load import dump_config, find_config, read_config_text
from asyncrl.config.run import RunConfig
from asyncrl.errors import LaunchError, RunError
from asyncrl.serve.records import RunRecord
from asyncrl.serve.routes import Fork
from asyncrl.serve.submit import Submission

LOOK_S = 1.0
"""Between looks at runs that are waited for."""
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
            if not isinstance(error, RunError):
                raise
            raise LaunchError(f"no daemon answers at {self._url}: {error}") from error
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
            config: A TOML file here, the name of a shipped config, tables, or a config.
            name: Of the run; left out: the config's.
            presets: Names of shipped configs, laid over it.
            set: `a.b` to values, laid over all of it.
            project: To find it by.
            tags: To find it by.
            priority: Higher goes first.
            key: Of this submission: a repeat with the same key and the same arguments gives the same run.

        Raises:
            RunError: It is refused; the message has every fault.
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
        self, run: str, name: str, *, checkpoint: str = "", set: Mapping[str, Any] | None = None  # noqa: A002 - as above
    ) -> RunRecord:  # fmt: skip
        """Queue a new run that begins with the weights of a checkpoint of another."""
        return await self._ask("POST", f"/v1/runs/{run}/fork", RunRecord, Fork(name, checkpoint, dict(set or {})))

    async def runs(self, **query: str) -> list[RunRecord]:
        """Return runs, newest first: all, or by `state`, `project`, `tag`; at most 1,000."""
        page = await self._ask("GET", "/v1/runs", dict[str, Any], query={"limit": "1000", **query})
        return msgspec.convert(page["runs"], list[RunRecord])

    async def show(self, run: str) -> RunRecord:
        """Return a run's record."""
        return await self._ask("GET", f"/v1/runs/{run}", RunRecord)

    async def cancel(self, run: str) -> RunRecord:
        """Take a queued run out of the queue."""
        return await self._ask("POST", f"/v1/runs/{run}/cancel", RunRecord)

    async def ended(self, runs: Iterable[RunRecord | str]) -> AsyncIterator[RunRecord]:
        """Yield runs as they end."""
        waiting = {run if isinstance(run, str) else run.id for run in runs}
        while waiting:
            for run in sorted(waiting):
                record = await self.show(run)
                if record.state == "ended":
                    waiting.discard(run)
                    yield record
            if waiting:
                await asyncio.sleep(LOOK_S)

    def connect(self, run: str) -> RunClient:
        """Return a client of a run: status, steps, orders."""
        return connect(f"{self._url}/v1/runs/{run}", token=self._token)

    async def _ask(
        self, method: str, path: str, kind: type[T], body: Any = None, headers: Mapping[str, str] | None = None,  # noqa: ANN401
        query: Mapping[str, str] | None = None,
    ) -> T:  # fmt: skip
        if self._http is None:
            raise RunError("this server is closed; use it inside `async with`")
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._http.request(method, f"{self._url}{path}", data=data, headers=headers, params=query) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise RunError(f"{self._url} does not answer: {error}") from error
        if response.status >= 400:
            said = msgspec.json.decode(answer).get("error", "") if answer.startswith(b"{") else answer.decode(errors="replace")
            raise RunError(said)
        return msgspec.json.decode(answer, type=kind)
