"""The daemon's HTTP interface, version 1: one table of routes, each with the role that it needs.

JSON in and out. Errors are `{"error": text}`; errors of a submission have `faults`, each with field, given and allowed. Streams
are numbered server-sent events and continue after `Last-Event-ID`. If the client accepts msgpack, status, evaluations and orders
of a run are answered in it: `asyncrl.connect(url, token=...)` uses a run here like one on its own machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import re
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from aiohttp import web

from asyncrl import __version__
from asyncrl.clock import Clock
from asyncrl.config.check import Fault
from asyncrl.config.live import ChangeResult
from asyncrl.config.load import load_config
from asyncrl.control.api import MOST_BODY_BYTES, READ_TIMEOUT_S, ConfigChange, read_body
from asyncrl.errors import AsyncRLError, ConfigError, RunError, RunLostError
from asyncrl.observe.steps import EVENTS_FILE, STEPS_FILE, EvalReport, Tail, read_evals
from asyncrl.schema.samples import ScoreRequest
from asyncrl.schema.status import Judged, RunStatus
from asyncrl.serve.keeper import Keeper
from asyncrl.serve.machine import in_order, waits
from asyncrl.serve.pages import Login, Pages
from asyncrl.serve.reading import compared, file_or_list, json_response, last_event_id, metrics_text, number_of, send_tar, stream
from asyncrl.serve.records import (
    ANYBODY,
    OPEN,
    WHO,
    Answered,
    ForbiddenError,
    Guard,
    Records,
    RunRecord,
    ServerEvent,
    State,
    new_token,
)
from asyncrl.serve.submit import Fork, NewToken, RefusedError, Resume, Submission, change_faults, of_fork, resolve

MOST_LISTED = 1000
MOST_KEY_CHARS = 200
MOST_COMPARED = 50
MOST_AT_ONCE = 200
"""Maximum number of open requests of one token, streams included."""
MOST_JUDGED_BYTES = 16 << 20
PROBE_S = 5.0
"""Time between two tries of `/readyz` to write the database."""
"""Maximum size of a program's scores; they include errors that its function raised."""
ORDERS = ("pause", "checkpoint", "drain", "stop")
FILE, MADE = (200, 206, 304), (200, 201)
"""HTTP statuses of a file (complete, partial, not modified), and of a run that was made (before or now)."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = Callable[[web.Request], object]
"""A response, or a value that is converted to one; or an awaitable of either."""


class Route(NamedTuple):
    """One row of the table."""

    method: str
    path: str
    least: str
    """The least role, or OPEN."""
    handler: Answer
    summary: str
    """Includes the query's parameters, such as `?state= &tag=`."""
    body: Any = None
    """Struct of the request's body; in msgpack if the summary says so, else JSON."""
    statuses: tuple[int, ...] = (200,)
    """HTTP statuses of answers that are not refusals."""


class Refusal(msgspec.Struct, frozen=True):
    """Body of answers with a status from 400 on; for 422 it has all faults."""

    error: str
    faults: Sequence[Fault] = ()


@dataclass
class Service:
    """The handlers of the routes, and their state."""

    records: Records
    keeper: Keeper
    guard: Guard
    clock: Clock
    code_roots: Sequence[Path] = ()
    draining: bool = False
    show_samples: bool = False
    """Whether viewers may read samples; else only operators may."""
    read_only: bool = False
    """Whether orders are refused (`asyncrl view`)."""
    behind_proxy: bool = False
    """Whether a proxy in front provides TLS."""
    answered: dict[int, int] = field(default_factory=dict)
    """Number of requests by HTTP status."""
    _asking: dict[str, set[asyncio.Task[Any]]] = field(default_factory=dict)
    """Requests that are being answered, by the digest of their token."""
    _look_s: float = 0.0
    """When the database is tried next."""
    _unwritable: str = ""
    """Why it could not be written."""
    _checkers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "check"))
    """Threads that check submissions, so that a slow check delays no run."""

    def routes(self) -> list[Route]:
        """Return every route there is."""
        page = Pages(
            self.records, self.keeper, self.guard, self.is_over, read_only=self.read_only, behind_proxy=self.behind_proxy
        )
        run, known = "/v1/runs/{run}", self.records.runs
        steps, events = partial(self.follow, STEPS_FILE, "step", "step"), partial(self.follow, EVENTS_FILE, "seq", "event")
        reads_text = "viewer" if self.show_samples else "operator"
        orders = ((name, partial(self.order, name)) for name in ORDERS)
        table = [
            Route("GET", "/", OPEN, page.file, "The page.", statuses=FILE),
            Route("GET", "/page/{file:.*}", OPEN, page.file, "The page's files.", statuses=FILE),
            Route("POST", "/v1/login", OPEN, page.login, "Exchange a token for the page's cookie.", Login),
            Route("POST", "/v1/logout", OPEN, page.logout, "Delete the page's cookie."),
            Route("GET", "/v1/session", OPEN, page.session, "Who is logged in on this page, and in which role."),
            Route("GET", "/v1/live", "viewer", page.live_runs, "The newest runs, whenever one has changed, as a stream."),
            Route("GET", "/healthz", OPEN, lambda _: {"ok": True}, "Whether the daemon's loop runs."),
            Route("GET", "/readyz", OPEN, self.readyz, "Whether it accepts runs: earlier runs are found, it can write.",
                  statuses=(200, 503)),
            Route("GET", "/version", OPEN, lambda _: {"version": __version__, "api": 1}, "The daemon's version."),
            Route("GET", "/openapi.json", OPEN, self.openapi, "This interface, as OpenAPI 3.1."),
            Route("GET", "/metrics", "viewer", self.metrics, "Every run's newest metrics, in Prometheus' text form."),
            Route("GET", "/v1/runs", "viewer", self.list_runs, "Runs, newest first: ?state= &project= &tag= &limit= &before=."),
            Route("POST", "/v1/runs", "submitter", self.submit, "Submit a run; only once per Idempotency-Key.", Submission, MADE),
            Route("GET", "/v1/queue", "viewer", self.queue, "Queued runs in the order in which they start; what each waits for."),
            Route("GET", "/v1/machine", "viewer", self.machine, "What there is, and what is in use."),
            Route("GET", "/v1/compare", "viewer", self.compare, "Compare runs: ?runs=A,B."),
            Route("GET", "/v1/events", "viewer", self.events, "Events of the daemon and of all runs, as a stream; ?after=."),
            Route("GET", run, "viewer", lambda asked: known[asked.match_info["run"]], "One run's record."),
            Route("GET", f"{run}/status", "viewer", self.status, "A run's progress, and which process waits for what."),
            Route("GET", f"{run}/steps", "viewer", steps, "Step reports, past and future, as a stream; ?first= &after=."),
            Route("GET", f"{run}/evaluations", "viewer", self.evaluations, "Held-out evaluations, oldest first."),
            Route("GET", f"{run}/events", "viewer", events, "Events of a run, as a stream; ?first= &after=."),
            Route("GET", f"{run}/live", "viewer", page.live, "All of it as one stream: ?offset= &events= &seconds= &after=."),
            Route("GET", f"{run}/series", "viewer", page.series, "Values over all steps: ?names=reward_mean,ratio/ess."),
            Route("GET", f"{run}/alarms", "viewer", page.alarms, "Alarms that were raised, and the rules with their advice."),
            Route("GET", f"{run}/seconds", "viewer", page.seconds, "A run's state in each second of its newest hour."),
            Route("GET", f"{run}/timeline", "viewer", page.timeline, "Spans of a window: ?from= &to= (seconds) &bins=."),
            Route("GET", f"{run}/ledger", "viewer", page.ledger, "Groups by state, and samples by version."),
            Route("GET", f"{run}/groups", reads_text, page.groups, "The newest groups in a state: ?state=dropped."),
            Route("GET", f"{run}/samples", reads_text, page.samples, "Samples: ?step=."),
            Route("GET", f"{run}/tokens", reads_text, page.tokens, "One token by token: ?step= &group= &index= &first=."),
            Route("GET", f"{run}/logs", "operator", page.logs, "Newest lines of all processes: ?q= text, ?pattern= of RE2."),
            Route("GET", f"{run}/config", "viewer", self.config, "A run's config, as TOML."),
            Route("GET", f"{run}/changeable", "viewer", page.changeable, "Fields that can change during a run."),
            Route("PATCH", f"{run}/config", "operator", self.change, "Change a live run's config, field by field.", ConfigChange),
            Route("POST", f"{run}/change", "operator", self.change, "The same, for a run's client: msgpack.", ConfigChange),
            Route("GET", f"{run}/files/{{path:.*}}", "operator", self.files, "A file, or the list of a folder.", None, FILE),
            Route("GET", f"{run}/checkpoints/{{name}}", "operator", self.checkpoint, "A checkpoint, or `newest`, as a tar."),
            *(Route("POST", f"{run}/{name}", "operator", order, f"Have a live run {name}.") for name, order in orders),
            Route("POST", f"{run}/resume", "operator", self.resume, "Continue a paused or ended run.", Resume),
            Route("POST", f"{run}/cancel", "operator", self.cancel, "Remove a queued run from the queue."),
            Route("POST", f"{run}/score", "submitter", self.score, "Score a run's samples, as its client does: msgpack.", Judged),
            Route("POST", f"{run}/fork", "submitter", self.submit, "A new run from a checkpoint of this one.", Fork, MADE),
            Route("GET", "/v1/tokens", "admin", self.list_tokens, "Names and roles of tokens."),
            Route("POST", "/v1/tokens", "admin", self.add_token, "Make a token; it is shown once.", NewToken, (201,)),
            Route("DELETE", "/v1/tokens/{name:.*}", "admin", self.remove_token, "Remove a token."),
        ]  # fmt: skip
        return [route for route in table if not self.read_only or route.method == "GET" or route.least == OPEN]

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self._boundary], client_max_size=MOST_BODY_BYTES)
        for route in self.routes():
            app.router.add_route(route.method, route.path, self._guarded(route))
        return app

    def runner(self) -> web.AppRunner:
        """Return the application's runner; a connection is closed if its next request's head does not arrive in time."""
        return web.AppRunner(
            self.app(), access_log=None, shutdown_timeout=2.0, handler_cancellation=True, keepalive_timeout=READ_TIMEOUT_S
        )

    def _guarded(self, route: Route) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            request[WHO] = who = self.guard.check(request, route.least)
            if (run := request.match_info.get("run")) is not None and run not in self.records.runs:
                raise ForbiddenError(404, f"there is no run {run!r}")
            asking = self._asking.setdefault(who.digest, set())
            if who is not ANYBODY and len(asking) >= MOST_AT_ONCE:
                raise ForbiddenError(429, f"{MOST_AT_ONCE} requests of {who.name} are open: end some of them first")
            answer = route.handler(request)
            if inspect.isawaitable(answer):
                task = asyncio.current_task()
                assert task is not None
                asking.add(task)
                try:
                    answer = await answer
                finally:
                    asking.discard(task)
            if isinstance(answer, web.StreamResponse):
                return answer
            if "application/msgpack" in request.headers.get("Accept", ""):
                return web.Response(body=msgspec.msgpack.encode(answer), content_type="application/msgpack")
            return json_response(answer)

        return handler

    @web.middleware
    async def _boundary(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn errors into answers, and add what every answer has."""
        try:
            if request.match_info.http_exception is not None:  # no such route: who may not ask is not told
                self.guard.check(request, "viewer")
            response = await handler(request)
        except web.HTTPException as error:
            response = json_response({"error": error.text or error.reason}, error.status)
        except RefusedError as error:
            response = json_response(Refusal(str(error), error.faults), 422)
        except ForbiddenError as error:
            response = json_response({"error": str(error)}, error.status)
            if error.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
        except (msgspec.DecodeError, ConfigError, ValueError, RecursionError) as error:
            response = json_response({"error": str(error)}, 400)
        except AsyncRLError as error:
            is_refused = isinstance(error, RunError) and not isinstance(error, RunLostError)
            response = json_response({"error": str(error)}, 409 if is_refused else 503)
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, ConnectionError):
                raise
            response = json_response({"error": f"the daemon cannot write its records: {error}"}, 507)
        self.answered[response.status] = self.answered.get(response.status, 0) + 1
        if not response.prepared:
            response.headers["X-Content-Type-Options"] = "nosniff"
            response.headers["Content-Security-Policy"] = "default-src 'self'; base-uri 'none'; frame-ancestors 'none'"
        return response

    # -- the daemon ------------------------------------------------------------------------------------------------------

    async def readyz(self, _: web.Request) -> web.StreamResponse:
        """Answer 200 if runs are accepted, else 503 with the reason."""
        if (now := self.clock.now()) >= self._look_s:  # a write at most every PROBE_S: anybody may ask
            self._look_s, self._unwritable = now + PROBE_S, self.records.fault()
        reason = self._refusal() or self._unwritable if self.keeper.settled.is_set() else "runs of before are being looked at"
        return json_response({"ready": not reason, "reason": reason}, 503 if reason else 200)

    def openapi(self, _request: web.Request) -> dict[str, Any]:
        """Return the table as OpenAPI."""
        routes, paths = self.routes(), dict[str, dict[str, Any]]()
        bodies = [*dict.fromkeys(route.body for route in routes if route.body is not None), Refusal]
        references, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
        reference_to = dict(zip(bodies, references, strict=True))
        refused = {"description": "refused", "content": {"application/json": {"schema": reference_to[Refusal]}}}
        for route in routes:
            path = route.path.replace(":.*", "")
            query = re.findall(r"[?&](\w+)=", route.summary)
            named = [("path", part[1:-1]) for part in path.split("/") if part.startswith("{")]
            named += [("query", name) for name in query] + [("header", "Last-Event-ID")] * ("after" in query)
            named += [("header", "Idempotency-Key")] * (route.statuses == MADE)
            operation = {
                "summary": route.summary,
                "security": [] if route.least == OPEN else [{"bearer": []}],
                "x-role": route.least,
                "parameters": [
                    {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
                    for place, name in named
                ],
                "responses": {str(status): {"description": HTTPStatus(status).phrase} for status in route.statuses}
                | {"4XX": refused, "5XX": refused},
            }
            if route.body is not None:
                kind = "application/msgpack" if "msgpack" in route.summary else "application/json"
                content = {kind: {"schema": reference_to[route.body]}}
                operation["requestBody"] = {"required": route.body is not Resume, "content": content}
            paths.setdefault(path, {})[route.method.lower()] = operation
        bearer = {"bearer": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "asyncrl serve", "version": __version__},
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": bearer},
        }

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        """Return the daemon's own counts, and the newest metrics of every live run."""
        return web.Response(text=await asyncio.to_thread(metrics_text, self.records, dict(self.answered)))

    def machine(self, _: web.Request) -> dict[str, Any]:
        """Return the machine's resources, and those that runs hold."""
        busy = [run for run in self.records.runs.values() if run.state in {"starting", "live"}]
        in_use = [{"run": run.id, "gpus": run.gpus, "demand": run.demand} for run in busy]
        return {"has": self.keeper.machine, "in_use": in_use}

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream the daemon's events."""
        seen = last_event_id(request)

        async def rows() -> list[tuple[int, str, bytes]]:
            nonlocal seen
            found: list[ServerEvent] = self.records.events(seen)
            seen = found[-1].seq if found else seen
            return [(event.seq, event.kind, msgspec.json.encode(event)) for event in found]

        return await stream(request, rows, lambda: self.draining)

    # -- runs ------------------------------------------------------------------------------------------------------------

    def list_runs(self, request: web.Request) -> dict[str, Any]:
        """Return records, newest first."""
        query = request.query
        limit, before = number_of(request, "limit", 100), number_of(request, "before", 1 << 62)
        if not 1 <= limit <= MOST_LISTED:
            raise ForbiddenError(400, f"limit must be from 1 to {MOST_LISTED}, got {limit}")
        if (state := query.get("state")) is not None and state not in get_args(State):
            raise ForbiddenError(400, f"state is one of {', '.join(get_args(State))}, got {state[:40]!r}")
        found = [
            run for run in sorted(self.records.runs.values(), key=lambda run: -run.number)
            if run.number < before and (state is None or run.state == state)
            and query.get("project", run.project) == run.project and ("tag" not in query or query["tag"] in run.tags)
        ]  # fmt: skip
        return {"runs": found[:limit], "next": found[limit - 1].number if len(found) > limit else None}

    def queue(self, _: web.Request) -> dict[str, Any]:
        """Return the queue, and what each run in it waits for."""
        runs = self.records.runs.values()
        return {"runs": in_order(runs), "waits": waits(self.keeper.machine, runs)}

    async def submit(self, request: web.Request) -> RunRecord | web.Response:
        """Check a submission (a fork too) completely, on threads for that purpose, and queue it.

        Returns:
            The new run, or the run that the same key has made before.
        """
        body, key = await read_body(request), request.headers.get("Idempotency-Key", "")
        if len(key) > MOST_KEY_CHARS:
            raise ForbiddenError(400, f"an Idempotency-Key has at most {MOST_KEY_CHARS} characters, got {len(key)}")
        run, digest = request.match_info.get("run", ""), hashlib.sha256(request.path.encode() + b"\n" + body).hexdigest()
        asked: Fork | Submission = msgspec.json.decode(body, type=Fork) if run else msgspec.json.decode(body, type=Submission)

        def made_before() -> RunRecord | None:
            answered = self.records.answer(key) if key else None
            if answered is not None and answered.body_digest != digest:
                raise RunError("this Idempotency-Key came with another body before; take a new key")
            return None if answered is None else self.records.runs[answered.run]

        if (known := made_before()) is not None:
            return known
        self._takes_work()
        if isinstance(asked, Submission):
            submission, parent = asked, ""
        else:
            checkpoint = self._checkpoint(run, asked.checkpoint)
            submission = of_fork(asked, checkpoint, self.records.runs[run].project)
            parent = f"{run}/checkpoints/{checkpoint.name}"
        folder, there = self.records.run_folder(""), self.keeper.machine
        config, demand = await asyncio.get_running_loop().run_in_executor(
            self._checkers, resolve, submission, folder, self.code_roots, there
        )  # fmt: skip
        if (known := made_before()) is not None:  # a repeat that came meanwhile
            return known
        answers = (key, Answered(digest, config.name)) if key else None
        return json_response(self.keeper.submit(submission, config, demand, request[WHO].name, parent, answers), 201)

    def _checkpoint(self, run: str, name: str) -> Path:
        """Return a checkpoint of a run; by default the newest."""
        found = {path.name: path for path in sorted((self.records.run_folder(run) / "checkpoints").glob("step-*"))}
        numbers = {one: int(number) for one in found if (number := one.removeprefix("step-")).isdecimal()}
        name = name or max(numbers, key=numbers.__getitem__, default="")
        if name not in found:
            raise RunError(f"{run} has no checkpoint {name!r}; it has {', '.join(found) or 'none'}")
        return found[name]

    async def checkpoint(self, request: web.Request) -> web.StreamResponse:
        """Send a checkpoint as a tar."""
        name = request.match_info["name"]
        return await send_tar(request, self._checkpoint(request.match_info["run"], "" if name == "newest" else name))

    def _refusal(self) -> str:
        """Return why no runs are accepted; empty if they are."""
        return "the daemon is ending" if self.draining else self.keeper.full_disk()

    def _takes_work(self) -> None:
        if reason := self._refusal():
            raise ForbiddenError(503, reason)

    def status(self, request: web.Request) -> RunStatus:
        """Return a live run's own status, or the recorded status of another run."""
        return self.keeper.status(request.match_info["run"])

    def evaluations(self, request: web.Request) -> Awaitable[list[EvalReport]]:
        """Return a run's evaluations."""
        return asyncio.to_thread(read_evals, self.records.run_folder(request.match_info["run"]))

    async def follow(self, file: str, number: str, kind: str, request: web.Request) -> web.StreamResponse:
        """Stream the rows of one of a run's files, steps or events."""
        run = request.match_info["run"]
        after = max(last_event_id(request), number_of(request, "first") - 1)
        return await stream(
            request, Tail(self.records.run_folder(run) / file, number, kind, after).rows, lambda: self.is_over(run)
        )

    def is_over(self, run: str = "") -> bool:
        """Return whether a run, or the daemon, will send nothing more."""
        return self.draining or bool(run and self.records.runs[run].state == "ended")

    async def config(self, request: web.Request) -> web.StreamResponse:
        """Return a run's config as it is now, or as it was submitted."""
        path = self.records.config_file(request.match_info["run"])
        if not path.exists():
            raise ForbiddenError(404, "the run has no config")
        return web.Response(text=path.read_text(encoding="utf-8"), content_type="application/toml")

    async def change(self, request: web.Request) -> ChangeResult:
        """Change a live run's config; the answer says from which step on."""
        run, who, body = request.match_info["run"], request[WHO].name, await read_body(request)
        decode = msgspec.json.decode if request.method == "PATCH" else msgspec.msgpack.decode
        asked, file = decode(body, type=ConfigChange), self.records.run_folder(run) / "config.toml"
        if file.exists():
            # In a thread: it may ask nvidia-smi.
            faults = await asyncio.to_thread(change_faults, load_config(file), asked.values, self.keeper.machine)
            if faults:
                raise RefusedError(faults)
        result: ChangeResult = await self.keeper.ask(run, "change", who, values=asked.values, who=who)
        return result

    def files(self, request: web.Request) -> web.StreamResponse:
        """Return a file, or what is in a folder."""
        return file_or_list(self.records.run_folder(request.match_info["run"]), request.match_info["path"])

    async def order(self, name: str, request: web.Request) -> object:
        """Send an order to a live run."""
        answer = await self.keeper.ask(request.match_info["run"], name, request[WHO].name)
        return self.status(request) if answer is None else answer

    async def score(self, request: web.Request) -> list[ScoreRequest]:
        """Enter a program's scores of a run, and return the next samples to score."""
        judged = msgspec.msgpack.decode(await read_body(request, MOST_JUDGED_BYTES), type=Judged)
        return await self.keeper.judge(request.match_info["run"], judged)

    async def resume(self, request: web.Request) -> RunStatus:
        """Continue a paused run, or queue an ended run again."""
        run = request.match_info["run"]
        if self.records.runs[run].state != "ended":
            resumed: RunStatus = await self.keeper.ask(run, "resume", request[WHO].name)
            return resumed
        body = await read_body(request)
        goal = msgspec.json.decode(body, type=Resume).num_steps if body else 0
        self._takes_work()
        self.keeper.resume_ended(run, request[WHO].name, goal)
        return self.status(request)

    def cancel(self, request: web.Request) -> RunRecord:
        """Cancel a queued run."""
        return self.keeper.cancel(request.match_info["run"], request[WHO].name)

    async def compare(self, request: web.Request) -> dict[str, Any]:
        """Return what differs between runs: settings and results."""
        names = [name for name in request.query.get("runs", "").split(",") if name]
        if unknown := [name for name in names if name not in self.records.runs]:
            raise ForbiddenError(404, f"no run {', '.join(unknown)}")
        if not 1 <= len(names) <= MOST_COMPARED:
            raise ForbiddenError(400, f"runs=A,B names 1 to {MOST_COMPARED} runs")
        return {"runs": await asyncio.to_thread(compared, self.records, names)}

    # -- tokens ----------------------------------------------------------------------------------------------------------

    def list_tokens(self, _: web.Request) -> list[dict[str, Any]]:
        """Return names and roles."""
        return [{"name": one.name, "role": one.role, "created_s": one.created_s} for one in self.records.tokens.values()]

    async def add_token(self, request: web.Request) -> web.StreamResponse:
        """Make a token."""
        asked = msgspec.json.decode(await read_body(request), type=NewToken)
        token = new_token(self.records, asked.name, asked.role, self.clock)
        self.keeper.tell("token", text=f"{asked.name} has the role {asked.role}", who=request[WHO].name)
        return json_response({"name": asked.name, "role": asked.role, "token": token}, 201)

    async def remove_token(self, request: web.Request) -> dict[str, str]:
        """Remove a token, and end its open requests."""
        name = request.match_info["name"]
        if name == request[WHO].name:
            raise RunError("a token cannot remove itself")
        if (token := self.records.tokens.get(name)) is None:
            raise ForbiddenError(404, f"there is no token {name!r}")
        self.records.forget_token(name)
        for task in self._asking.pop(token.digest, ()):
            task.cancel()  # its streams end with it
        self.keeper.tell("token", text=f"{name} is removed", who=request[WHO].name)
        return {"removed": name}
