"""The run's HTTP API: aiohttp on loopback, the run's own bearer token, msgpack bodies (NDJSON for the step stream).

Owns the server and `api.json` (mode 0600), and no part of the run. Every route calls one method of `RunApi`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import logging
import os
import platform
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientPayloadError, http_exceptions, web

from asyncrl.config.live import ChangeResult, changed, write_revision
from asyncrl.control.controller import Controller
from asyncrl.control.edge import odd_value
from asyncrl.control.lifecycle.events import DrainRequested, Event, PauseRequested, ResumeRequested, StopRequested
from asyncrl.control.lifecycle.failure_watch import wait_chain
from asyncrl.errors import AsyncRLError, ConfigError, RunError, shown
from asyncrl.folders import write_whole
from asyncrl.observe.steps import EVENTS_FILE, STEPS_FILE, EvalReport, Tail, accuracies
from asyncrl.schema import status as st
from asyncrl.schema.samples import GroupsTaken, Score, ScoreRequest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.tasks.asked import AskedPrompts

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 1 << 20
"""Maximum size of an unpacked request, unless its route allows more."""
MOST_MANIFEST_BYTES = 64 << 20
"""Maximum size of a version's manifest: a model's tensors, by name."""
MOST_GROUP_BYTES = 256 << 20
"""Maximum size of a group of samples."""
READ_TIMEOUT_S = 60.0
"""Timeout for a request's head, and then for its body."""
ACTIONS = ("pause", "resume", "checkpoint", "take")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ExternalStep(msgspec.Struct, frozen=True):
    """Body of /trained."""

    step: int
    metrics: dict[str, float] = {}


class StepAsked(msgspec.Struct, frozen=True):
    """Body of /lease."""

    groups: tuple[int, ...]


class ExternalWeights(msgspec.Struct, frozen=True):
    """Body of /weights."""

    available: WeightsAvailable
    model_folder: str = ""


class ConfigChange(msgspec.Struct, frozen=True):
    """Body of /change."""

    values: dict[str, Any]
    """By field, `buffer.max_staleness`."""
    who: str = "a client"

    def __post_init__(self) -> None:
        msgspec.json.encode(self.values)  # what only msgpack has is no value of a config: a TypeError, and so no such message


@asynccontextmanager
async def serve_api(control: RunApi, run_folder: Path, read_timeout_s: float = READ_TIMEOUT_S) -> AsyncIterator[st.ApiEndpoint]:
    """Serve the API while the context is open, on a free port; `api.json` exists exactly that long."""
    token = secrets.token_urlsafe(32)
    app = web.Application(middlewares=[_guard(token)], client_max_size=MOST_GROUP_BYTES)
    app.add_routes(_routes(control, read_timeout_s))
    # A caller that hangs up is not worked for any longer: a step taken for nobody could never be reported as trained.
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=5.0, handler_cancellation=True, lingering_time=1.0,
        keepalive_timeout=read_timeout_s,
    )  # fmt: skip
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        endpoint = st.ApiEndpoint(url=url, token=token, pid=os.getpid(), machine=platform.node())
        write_whole(run_folder / "api.json", msgspec.json.encode(endpoint), private=True, onto_disk=False)
        yield endpoint
    finally:
        (run_folder / "api.json").unlink(missing_ok=True)
        await runner.cleanup()


def _routes(control: RunApi, read_timeout_s: float) -> list[web.RouteDef]:
    def answers(act: Callable[..., Any], kind: type[Any] | None = None, most_bytes: int = MOST_BODY_BYTES) -> Handler:
        """Return the handler of a route: it answers with what `act` returns or yields for the request's body, if it takes one."""

        async def handler(request: web.Request) -> web.StreamResponse:
            body = b"" if kind is None else await read_body(request, most_bytes, read_timeout_s)
            answer = act() if kind is None else act(msgspec.msgpack.decode(body, type=kind))
            answer = await answer if inspect.isawaitable(answer) else answer
            if isinstance(answer, AsyncGenerator):
                return await write_lines(request, answer)
            if isinstance(answer, web.Response):
                return answer
            return web.Response(body=msgspec.msgpack.encode(answer), content_type="application/msgpack")

        return handler

    async def write_lines(request: web.Request, lines: AsyncGenerator[bytes, None]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        async with contextlib.aclosing(lines):
            async for line in lines:
                await response.write(line + b"\n")
        await response.write_eof()
        return response

    def streams(file: str, number: str, place: str, first: int) -> Handler:
        """Return the handler of a stream of a file's rows; the query has the number of the first row, or of the row before it."""

        async def handler(request: web.Request) -> web.StreamResponse:
            return await write_lines(request, control.rows_of(file, number, int(request.query.get(place, "0")) - first))

        return handler

    return [
        web.get("/status", answers(control.status)),
        web.get("/evaluations", answers(control.evaluations)),
        web.get("/metrics", answers(control.metrics)),
        web.get("/steps", streams(STEPS_FILE, "step", "first", 1)),
        web.get("/events", streams(EVENTS_FILE, "seq", "after", 0)),
        web.post("/submit", answers(control.submit, st.ExternalGroup, MOST_GROUP_BYTES)),
        web.post("/generate", answers(control.generate, st.GroupsAsked, MOST_GROUP_BYTES)),
        web.post("/progress", answers(control.progress, st.GroupsAsked, MOST_GROUP_BYTES)),
        web.post("/score", answers(control.score, st.Judged, MOST_GROUP_BYTES)),
        web.post("/release", answers(control.release, st.Released)),
        web.post("/lease", answers(control.take_these, StepAsked)),
        web.post("/trained", answers(control.trained, ExternalStep)),
        web.post("/change", answers(control.change, ConfigChange)),
        web.post("/weights", answers(control.announce_weights, ExternalWeights, MOST_MANIFEST_BYTES)),
        web.post("/drain", answers(lambda: control.end(DrainRequested()))),
        web.post("/stop", answers(lambda: control.end(StopRequested()))),
        *(web.post(f"/{name}", answers(getattr(control, name))) for name in ACTIONS),
    ]


async def read_body(request: web.Request, most_bytes: int = MOST_BODY_BYTES, timeout_s: float = READ_TIMEOUT_S) -> bytes:
    """Return the unpacked body.

    Raises:
        HTTPRequestEntityTooLarge: The body is larger than `most_bytes`; no more than that is read.
        HTTPRequestTimeout: The body did not arrive within `timeout_s`.
        HTTPBadRequest: The body cannot be unpacked.
    """
    read = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                read += chunk
                if len(read) > most_bytes:
                    raise web.HTTPRequestEntityTooLarge(max_size=most_bytes, actual_size=len(read))
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=f"the body has not come within {timeout_s:g} s") from error
    except (http_exceptions.HttpProcessingError, web.RequestPayloadError, ClientPayloadError) as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read: {error}") from error
    return bytes(read)


def _guard(token: str) -> Any:  # noqa: ANN401 - aiohttp's middleware type is private
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected):
            return web.Response(status=401, text="a bearer token is needed; it is in the run folder's api.json")
        try:
            return await handler(request)
        except AsyncRLError as error:
            return web.Response(status=409, text=str(error))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return web.Response(status=400, text=str(error))

    return guard


MOST_JUDGED = 64
"""Maximum number of groups that a scoring program holds at once."""
LOOK_AGAIN_S = 0.5
"""Several requests share one event; a request waits at most this long for a change that another request saw first."""


@dataclass(eq=False)
class RunApi:
    """What clients may request of a live run, one method per route."""

    _run: Controller

    def status(self) -> st.RunStatus:
        """Return the run's current status."""
        run = self._run
        now, counts, failures = run.clock.now(), run.buffer.counts(), run.dispatcher.failures
        groups = {state: getattr(counts, state) for state in ("issued", "running", "scoring", "ready", "taken", "trained")}
        groups |= {"dropped": sum(counts.dropped.values()), "failed": sum(counts.failed.values())}
        accuracy_before, accuracy_after = accuracies(run.reporter.evaluations)
        asked = run.dispatcher.asked
        return st.RunStatus(
            name=run.config.name,
            run_folder=str(run.run_folder),
            # An ended run still shows `draining` until its books are closed.
            phase="draining" if run.lifecycle.phase in st.ENDED and not run.over.is_set() else run.lifecycle.phase,
            reason=run.lifecycle.reason,
            resumed=run.resumed,
            version=run.feeder.version,
            num_steps=run.config.num_steps,
            groups=groups,
            dropped={**counts.dropped, **counts.failed},
            without_place=len(asked.queue) if asked is not None and run.buffer.state.is_full else 0,
            failed_share=failures.share,
            over_limit_share=failures.over_limit_share,
            failures=tuple(failures.kinds.values()),
            set_aside=tuple(failures.set_aside),
            alarms=tuple(run.reporter.alarms.standing.values()),
            processes=tuple(self._processes(now)),
            waiting=wait_chain(run.waits(now), now),
            accuracy_before=accuracy_before,
            accuracy_after=accuracy_after,
            checkpoint=run.checkpoints.folder,
            refused_messages=run.listener.refused.total() + run.edge.refused.total(),
            refused_samples=run.dispatcher.refused_samples,
            uptime_s=now - run.started_s,
            guests=run.membership.counts(),
        )

    def _processes(self, now: float) -> list[st.ProcessStatus]:
        run = self._run
        pids = {name: process.pid.pid for name, process in run.supervisor.live.items()}
        rows = [
            st.ProcessStatus(
                record.name, record.kind, pids.get(record.name, 0), record.state, len(record.exit_codes),
                last_death=record.last_death,
            )
            for record in run.lifecycle.processes.values()
        ]  # fmt: skip
        ready = {peer.name for peer in run.peers.of("generator") if peer.num_slots}
        rows += [
            st.ProcessStatus(name, "generator", hello.pid, "ready" if name in ready else "starting", joined=True)
            for name, hello in run.membership.joined.items()
        ]
        waits = {  # a joined generator's clock is of another machine
            beat.name: {"waiting_for": beat.waiting_for, "waiting_s": max(0.0, now - beat.waiting_since_s)}
            for beat in run.heartbeats()
            if beat.waiting_for
        }
        return [msgspec.structs.replace(row, **waits.get(row.name, {})) for row in rows]

    def evaluations(self) -> list[EvalReport]:
        """Return the evaluations so far."""
        return list(self._run.reporter.evaluations)

    def metrics(self) -> web.Response:
        """Return the newest metrics in Prometheus' text form."""
        return web.Response(text=self._run.reporter.sinks.prometheus_text())

    async def rows_of(self, file: str, number: str, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the rows of one of the run's files after number `after`, past and later ones, until the run has ended."""
        reporter, tail = self._run.reporter, Tail(self._run.run_folder / file, number, "", after)
        while True:
            is_over = self._run.over.is_set()  # asked first: what was written before the end is still read
            newest = reporter.num_rows
            while rows := await tail.rows():
                for _, _, line in rows:
                    yield line
            if is_over:
                return
            await self._until_moved(lambda: reporter.num_rows > newest or self._run.over.is_set())  # noqa: B023 - awaited at once

    async def _until_moved(self, reached: Callable[[], bool]) -> None:
        """Wait until the condition is true; it is checked at every step and phase change."""
        while not reached():
            self._run.moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._run.moved.wait()

    async def pause(self) -> st.RunStatus:
        """Pause the run; return once no step is being trained (an outside learner's step is the caller's own matter)."""
        self._request(PauseRequested())
        if self._run.config.learner.kind == "builtin":
            await self._until_moved(lambda: self._run.feeder.idle or self._run.lifecycle.phase != "paused")
        return self.status()

    def resume(self) -> st.RunStatus:
        """Continue a paused run."""
        self._request(ResumeRequested())
        return self.status()

    async def end(self, event: DrainRequested | StopRequested) -> st.RunStatus:
        """Drain the run or end it at once; return once it has ended."""
        self._request(event)
        await self._run.over.wait()
        return self.status()

    def _request(self, event: Event) -> None:
        if refusal := self._run.lifecycle.refusal(event):
            raise RunError(refusal)
        self._run.supervisor.post(event)

    async def checkpoint(self) -> str:
        """Write a checkpoint; return its folder."""
        if self._run.lifecycle.over:
            raise RunError(f"the run is over: what it has saved is in {self._run.run_folder / 'checkpoints'}")
        return await self._run.checkpoints.wait_for_next(self._run.feeder.version)

    def change(self, asked: ConfigChange) -> ChangeResult:
        """Change the config of the live run; the change applies from the next step taken.

        Raises:
            ConfigError: A field cannot change now, or its value is not allowed; nothing has changed then.
            RunError: The run is over, num_steps is raised although no more steps are taken, or the folder cannot be written.
        """
        run, values = self._run, asked.values
        if run.lifecycle.over:
            raise RunError("the run is over")
        who = " ".join(shown(asked.who).split()) or "a client"  # it becomes a comment of a TOML file
        config, changes = changed(run.config, values)
        if config.num_steps > run.config.num_steps and (run.lifecycle.goal_reached or run.lifecycle.phase == "draining"):
            raise RunError(
                f"num_steps cannot be raised any more: this run is {run.lifecycle.phase} and takes no more steps; once it has "
                f"ended, `asyncrl resume {run.run_folder} --set num_steps={config.num_steps}` continues it"
            )
        step = run.buffer.state.next_step
        if config.num_steps < step:
            raise ConfigError(f"num_steps must be at least {step}, the number of steps already taken; got {config.num_steps}")
        revision = len(list((run.run_folder / "revisions").glob("*.toml")))
        if not changes:
            return ChangeResult(revision, step, ())
        what = ", ".join(f"{one.field} from {one.before} to {one.after}" for one in changes)
        try:
            write_revision(run.run_folder, revision, config, f"by {who} from step {step} on: {what}")
        except OSError as error:
            raise RunError(f"nothing is changed: cannot write to {run.run_folder}: {error}") from error
        run.config = config
        run.feeder.config = config
        run.dispatcher.change(config, f"{what} (by {who})")
        run.reporter.follow(config)
        if any(one.field == "generate.num_workers" for one in changes):  # otherwise elastic scaling keeps its own number
            run.autoscaler.want(config.generate.num_workers, run.clock.now())
        run.reporter.note_event("change", who, f"from step {step} on: {what}", run.feeder.version)
        log.info("changed by %s from step %d on: %s", who, step, what)
        run.reach_goal()
        return ChangeResult(revision + 1, step, changes)

    def submit(self, group: st.ExternalGroup) -> st.SubmitResult:
        """Enter a group that was generated elsewhere."""
        if self._run.lifecycle.over:
            raise RunError("the run is over")
        return self._run.dispatcher.submit(group)

    async def take(self) -> GroupsTaken:
        """Return the next step's groups to an outside learner."""
        self._only_external()
        try:
            return await self._run.feeder.take_outside(self._run.ending)
        except RunError as error:
            if not self._run.lifecycle.over:
                raise
            raise RunError(f"{error}: {self._run.lifecycle.reason}") from error

    async def take_these(self, asked: StepAsked) -> int:
        """Take exactly these groups for the next step; return the version below which their tokens are masked."""
        source, group_ids = self._asked(), tuple(sorted(set(asked.groups)))
        if not group_ids:
            raise RunError("there are no groups to train")
        for group_id in group_ids:
            if (one := source.by_group.get(group_id)) is not None and one.why_over:
                raise RunError(f"group {group_id} cannot be trained any more, it was {one.why_over}")
        taken = await self._run.feeder.take_outside(self._run.ending, group_ids)
        source.forget(group_ids)
        return taken.mask_below

    async def generate(self, asked: st.GroupsAsked) -> list[st.GroupGiven]:
        """Request groups; return the first of them once they are ready, or over."""
        source, run = self._asked(), self._run
        source.enter(asked)
        run.dispatcher.changed()
        source.num_waiting += 1
        try:
            while not (settled := source.settled(asked)):
                if run.ending.is_set():
                    raise RunError(f"the run has ended: {run.lifecycle.reason}")
                await source.moved.wait()
        finally:
            source.num_waiting -= 1
        held = run.buffer.held
        return [
            st.GroupGiven(None, one.why_over) if one.why_over else st.GroupGiven(held[one.group_id].as_scored(one.group_id))
            for one in settled
        ]

    def progress(self, asked: st.GroupsAsked) -> AsyncGenerator[bytes, None]:
        """Request groups; yield the tokens of the first one as Progress in JSON, until that group is ready or over."""
        source, run = self._asked(), self._run
        if not asked.groups:
            raise RunError("there is no group to follow")
        one = source.enter(asked)[0]
        run.dispatcher.changed()

        async def pieces() -> AsyncGenerator[bytes, None]:
            num_told = 0
            source.num_waiting += 1
            try:
                while True:
                    is_over = one.is_ready or bool(one.why_over) or run.ending.is_set()
                    for piece in one.pieces[num_told:]:
                        num_told += 1
                        yield msgspec.json.encode(piece)
                    if is_over:
                        return
                    one.news.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN_S):
                            await one.news.wait()
            finally:
                source.num_waiting -= 1

        return pieces()

    def release(self, released: st.Released) -> None:
        """Release groups that will not be trained, so that their places are free."""
        source = self._asked()
        issued = source.close(released.stream, released.first) if released.stream else []
        if not self._run.lifecycle.over:
            self._run.feeder.release_outside(released.groups)
            self._run.dispatcher.release([*issued, *released.groups])
        source.forget(released.groups)

    async def score(self, said: st.Judged) -> list[ScoreRequest]:
        """Enter the scores of a scoring program; return the next samples to score, waiting a little for some."""
        run = self._run
        caller, scores = run.caller, run.dispatcher.scores
        if caller is None:
            raise RunError('this run has reward functions of its own; set reward.functions = [{kind = "caller"}]')
        if run.lifecycle.over:
            raise RunError(f"the run has ended: {run.lifecycle.reason}")
        caller.heard(said.caller, run.clock.now())
        answers = []
        for answer in said.answers:
            if scores.refusal(answer, said.caller):
                continue
            judged = answer.scores
            if odd := odd_value(answer):  # a number cannot be used: the samples fail
                judged = tuple([Score(score.index, 0.0, error=f"the caller's reward: {odd}") for score in judged])
            answers.append(msgspec.structs.replace(answer, scores=judged, worker="caller", finished_s=run.clock.now()))
        if answers:
            run.take_answers(answers)
        given = list[ScoreRequest]()

        def found() -> bool:
            handed = scores.hand_out(said.caller, said.held, MOST_JUDGED - len(said.held))
            given.extend(msgspec.structs.replace(one, timeout_s=run.config.reward.timeout_s) for one in handed)
            return bool(given) or run.ending.is_set()

        if said.wants:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(run.config.supervision.heartbeat_s):
                    await self._until_moved(found)
            if run.ending.is_set():
                raise RunError(f"the run has ended: {run.lifecycle.reason}")
        return given

    def _asked(self) -> AskedPrompts:
        if self._run.dispatcher.asked is None:
            raise RunError('this run has prompts of its own; set learner.kind = "driven", or use a Session')
        return self._run.dispatcher.asked

    def trained(self, done: ExternalStep) -> None:
        """Note that an outside learner has finished a step."""
        self._only_external()
        if self._run.lifecycle.over:
            raise RunError("the run is over")
        self._run.step_done(self._run.feeder.outside_step(done.step, done.metrics, self._run.clock.now()))

    def announce_weights(self, made: ExternalWeights) -> None:
        """Announce to the generators a version that an outside learner has published."""
        self._only_external()
        if self._run.lifecycle.over:
            return
        if odd := odd_value(made.available):
            raise RunError(f"these weights cannot be announced: {odd}")
        run = self._run
        if not run.model_folder and (made.model_folder or run.config.generate.num_workers):
            if not made.model_folder:
                raise RunError("the generators have no model yet: give model_folder with the first version")
            run.know_model(made.model_folder)
            self._run.tell_model_folder()
        self._run.spread(made.available)

    def _only_external(self) -> None:
        if self._run.config.learner.kind == "builtin":
            raise RunError('this run has its own learner; set learner.kind = "external" to train outside')
