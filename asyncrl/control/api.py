"""The run's HTTP API: aiohttp on loopback, a bearer token of the run's own, msgpack bodies (NDJSON for the step stream).

Owns the server and `api.json` (mode 0600), nothing of the run: every route calls one method of the `RunControl` it was given.
Called by control/controller.py; spoken to by client.py.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from asyncrl.errors import AsyncRLError
from asyncrl.observe.steps import EvalReport, StepReport
from asyncrl.schema.batches import GroupsTaken
from asyncrl.schema.status import ApiEndpoint, ExternalGroup, RunStatus, SubmitResult
from asyncrl.schema.weights import WeightsAvailable

MAX_BODY_BYTES = 256 << 20


class ExternalStep(msgspec.Struct, frozen=True):
    """Body of /trained."""

    step: int
    metrics: dict[str, float] = {}


class ExternalWeights(msgspec.Struct, frozen=True):
    """Body of /weights."""

    available: WeightsAvailable
    model_folder: str = ""


class RunControl(Protocol):
    """What the API can ask of a run; the controller, or a stand-in in tests."""

    def status(self) -> RunStatus:
        """Return the run as it is now."""
        ...

    def evaluations(self) -> list[EvalReport]:
        """Return the evaluations so far."""
        ...

    def steps_from(self, first: int) -> AsyncIterator[StepReport]:
        """Yield reports from step `first` until the run has ended."""
        ...

    def metrics_text(self) -> str:
        """Return the newest metrics in Prometheus' text form."""
        ...

    async def pause(self) -> RunStatus:
        """Hold the run."""
        ...

    async def resume(self) -> RunStatus:
        """Go on."""
        ...

    async def checkpoint(self) -> str:
        """Write a checkpoint; return its folder."""
        ...

    async def drain(self) -> RunStatus:
        """End the run in good order; return once it has ended."""
        ...

    async def stop(self) -> RunStatus:
        """End the run at once; return once it has ended."""
        ...

    async def submit(self, group: ExternalGroup) -> SubmitResult:
        """Take in a group generated elsewhere."""
        ...

    async def take(self) -> GroupsTaken:
        """Hand the next step's groups to an outside learner."""
        ...

    async def trained(self, step: int, metrics: dict[str, float]) -> None:
        """An outside learner has done a step."""
        ...

    async def announce_weights(self, available: WeightsAvailable, model_folder: str) -> None:
        """An outside learner has published a version."""
        ...


@asynccontextmanager
async def serve_api(control: RunControl, run_folder: Path, host: str = "127.0.0.1") -> AsyncIterator[ApiEndpoint]:
    """Serve the API while the context is open, on a free port; `api.json` exists exactly that long."""
    token = secrets.token_urlsafe(32)
    app = web.Application(middlewares=[_guard(token)], client_max_size=MAX_BODY_BYTES)
    app.add_routes(_routes(control))
    # A caller that hangs up is not worked for any longer: a step taken for nobody could never be reported as trained.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5.0, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0)
        await site.start()
        port = runner.addresses[0][1]
        endpoint = ApiEndpoint(url=f"http://{host}:{port}", token=token, pid=os.getpid())
        _write_private(run_folder / "api.json", msgspec.json.encode(endpoint))
        yield endpoint
    finally:
        (run_folder / "api.json").unlink(missing_ok=True)
        await runner.cleanup()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _routes(control: RunControl) -> list[web.RouteDef]:
    acts = {
        "pause": control.pause,
        "resume": control.resume,
        "checkpoint": control.checkpoint,
        "drain": control.drain,
        "stop": control.stop,
        "take": control.take,
    }
    return [
        web.get("/status", _answering(control.status)),
        web.get("/evaluations", _answering(control.evaluations)),
        web.get("/metrics", _metrics(control)),
        web.get("/steps", _steps(control)),
        web.post("/submit", _taking(ExternalGroup, control.submit)),
        web.post("/trained", _taking(ExternalStep, lambda body: control.trained(body.step, body.metrics))),
        web.post("/weights", _taking(ExternalWeights, lambda body: control.announce_weights(body.available, body.model_folder))),
        *(web.post(f"/{name}", _acting(act)) for name, act in acts.items()),
    ]


def _answering(ask: Callable[[], Any]) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return _packed(ask())

    return answer


def _acting(act: Callable[[], Awaitable[Any]]) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return _packed(await act())

    return answer


def _taking(kind: type[Any], act: Callable[[Any], Awaitable[Any]]) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return _packed(await act(msgspec.msgpack.decode(await request.read(), type=kind)))

    return answer


def _metrics(control: RunControl) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=control.metrics_text())

    return answer


def _steps(control: RunControl) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        async for report in control.steps_from(int(request.query.get("first", "0"))):
            await response.write(msgspec.json.encode(report) + b"\n")
        await response.write_eof()
        return response

    return answer


def _guard(token: str) -> Any:  # noqa: ANN401 - aiohttp's middleware type is private
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), expected):
            return web.Response(status=401, text="a bearer token is needed; it is in the run folder's api.json")
        try:
            return await handler(request)
        except AsyncRLError as error:
            return web.Response(status=409, text=str(error))
        except (msgspec.DecodeError, ValueError) as error:
            return web.Response(status=400, text=str(error))

    return guard


def _packed(answer: object) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(answer), content_type="application/msgpack")


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, whole or not at all."""
    partial = path.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    partial.replace(path)
