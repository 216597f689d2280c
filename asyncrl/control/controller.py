"""The controller: accepts the run's processes, moves their messages, and carries out what the pure parts decide.

Owns the connections, the flow of groups (control/flow.py), the learner's feed (control/feed.py), the supervisor and the API of one
run. Invariants: one event loop, nothing here blocks it; every message kind has one handler; the run's end is decided by the
lifecycle alone and happens once: tell everyone, wait for them, close the ledger, write the report.

Called by pipeline.py, in a process of its own; spoken to through control/api.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.control.api import serve_api
from asyncrl.control.evaluation import Evaluation
from asyncrl.control.feed import LearnerFeed
from asyncrl.control.flow import Flow
from asyncrl.control.launcher import Launcher
from asyncrl.control.life_events import (
    Drained,
    DrainRequested,
    EvaluationDone,
    Event,
    PauseRequested,
    ProcessFault,
    ProcessReady,
    ResumeRequested,
    Stalled,
    StepsDone,
    StopRequested,
)
from asyncrl.control.lifecycle import Lifecycle
from asyncrl.control.peers import Peer, Peers
from asyncrl.control.process_plan import plan_processes, spec_maker
from asyncrl.control.reporter import Reporter
from asyncrl.control.supervisor import Supervisor, SupervisorCallbacks
from asyncrl.control.watchdog import Wait, Watchdog, wait_chain, waits_of
from asyncrl.errors import ConnectionClosed, RunError
from asyncrl.observe.steps import EvalReport, StepReport
from asyncrl.schema.batches import GroupsTaken, StepDone
from asyncrl.schema.codec import Message
from asyncrl.schema.control import (
    Checkpoint,
    CheckpointDone,
    EngineReady,
    Fault,
    Heartbeat,
    LearnerReady,
    LoadModel,
    Pause,
    ProcessKind,
    Resume,
    Shutdown,
)
from asyncrl.schema.samples import Prompt, Sample, SampleFailure, Score
from asyncrl.schema.status import ENDED, ExternalGroup, Phase, ProcessStatus, RunStatus, SubmitResult
from asyncrl.schema.weights import VersionLive, WeightsAvailable
from asyncrl.transport.channel import Connection, Delivery, Lane, Listener

log = logging.getLogger(__name__)

TICK_S = 0.25
SHUTDOWN_S = 10.0
"""For processes to end by themselves once they are told to."""
LINGER_S = 30.0
"""How long an ended run still answers questions when its owner does not hang up."""


class Controller:
    """One run, from its first process to its last."""

    def __init__(
        self,
        config: RunConfig,
        run_folder: Path,
        listener: Listener,
        launcher: Launcher,
        flow: Flow,
        feed: LearnerFeed,
        peers: Peers,
        reporter: Reporter,
        held_out: list[Prompt],
        clock: Clock,
        *,
        resumed: bool,
    ) -> None:
        """Join the parts that pipeline.py has made; `resumed` skips the first evaluation."""
        self._config = config
        self._run_folder = run_folder
        self._listener = listener
        self._flow = flow
        self._feed = feed
        self._peers = peers
        self._reporter = reporter
        self._held_out = held_out
        self._clock = clock
        self._started_s = clock.now()
        self._lifecycle = Lifecycle(
            plan_processes(config),
            config.supervision,
            evaluate_first=config.eval.at_start and bool(held_out) and not resumed,
            evaluate_last=config.eval.at_end and bool(held_out),
            logs_folder=str(run_folder / "logs"),
        )
        callbacks = SupervisorCallbacks(self._on_dead, self._on_phase, self._on_end)
        spec_for = spec_maker(config, run_folder)
        self._supervisor = Supervisor(self._lifecycle, launcher, spec_for, config.supervision, callbacks, clock, run_folder)
        self._watchdog = Watchdog(config.supervision.stall_timeout_s, clock.now())
        self._model_folder = config.model.path if config.learner.kind == "external" and hasattr(config.model, "path") else ""
        self._weights: WeightsAvailable | None = None
        self._checkpoint_folder = ""
        self._checkpointed_version = -1
        self._checkpoint_waiters: list[asyncio.Future[str]] = []
        self._evaluate_at_version: int | None = None
        self._ending = asyncio.Event()
        self._over = asyncio.Event()
        self._moved = asyncio.Event()
        self._ok = False
        feed.on_taken = reporter.note_taken
        flow.changed = feed.wake
        self._handlers: dict[type, Callable[[Peer, Delivery], None]] = {
            Sample: self._on_sample,
            SampleFailure: self._on_failure,
            Score: self._on_score,
            StepDone: self._on_step_done,
            WeightsAvailable: self._on_weights,
            VersionLive: self._on_version_live,
            Heartbeat: self._on_heartbeat,
            LearnerReady: self._on_learner_ready,
            EngineReady: self._on_engine_ready,
            CheckpointDone: self._on_checkpoint_done,
            Fault: self._on_fault,
        }

    # -- life ------------------------------------------------------------------------------------------------------------

    async def run(self, owner_gone: asyncio.Event) -> bool:
        """Live through the whole run; return whether it ended well.

        Args:
            owner_gone: Set when whoever started the run has hung up; a run that is still on then stops at once.
        """
        async with serve_api(self, self._run_folder):
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._accept(group), name="accept"),
                    group.create_task(self._feed.run(), name="feed"),
                    group.create_task(self._tick(), name="tick"),
                    group.create_task(self._stop_when(owner_gone), name="owner"),
                ]
                self._flow.pick_up()
                supervising = group.create_task(self._supervisor.run(), name="supervisor")
                await self._ending.wait()
                await self._say_goodbye()
                await self._supervisor.shutdown(SHUTDOWN_S)
                await supervising
                for task in background:
                    task.cancel()
                await self._listener.close()
            await self._close_books()
            self._over.set()
            self._moved.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await owner_gone.wait()
        return self._ok

    async def _say_goodbye(self) -> None:
        reason = self._lifecycle.reason
        for peer in self._peers.all():
            with contextlib.suppress(ConnectionClosed):
                peer.connection.try_send(Shutdown(reason), Lane.CONTROL)

    async def _close_books(self) -> None:
        await asyncio.to_thread(self._flow.buffer.check)
        await asyncio.to_thread(self._flow.buffer.close)
        await self._reporter.close(self._run_folder)

    async def _stop_when(self, owner_gone: asyncio.Event) -> None:
        await owner_gone.wait()
        if not self._lifecycle.over:
            log.warning("whoever started this run is gone: stopping")
            self._post(StopRequested("the process that started the run is gone"))

    async def _accept(self, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                connection = await self._listener.accept()
            except ConnectionClosed:
                return
            peer = self._peers.add(connection)
            for lane in Lane:
                group.create_task(self._serve(peer, connection, lane), name=f"serve-{peer.name}-{lane.name}")
            self._on_connected(peer)

    async def _serve(self, peer: Peer, connection: Connection, lane: Lane) -> None:
        """Hand every message of one lane to its handler until the connection ends."""
        while True:
            try:
                delivery = await connection.receive(lane)
            except ConnectionClosed:
                return
            self._dispatch(peer, delivery)

    def _dispatch(self, peer: Peer, delivery: Delivery) -> None:
        handler = self._handlers.get(type(delivery.message))
        if handler is None:
            log.warning("%s sent a %s, which is not for the controller", peer.name, type(delivery.message).__name__)
            delivery.ack()
            return
        handler(peer, delivery)

    async def _tick(self) -> None:
        """Do what no message sets off: windows that opened, evaluations that ended, stalls, the time limit."""
        while True:
            await self._clock.sleep(TICK_S)
            self._flow.pump()
            self._finish_evaluation()
            now = self._clock.now()
            self._reporter.tick()
            stall = self._watchdog.check(now, self._waits(now), self._queues())
            if stall is not None:
                self._post(Stalled(stall.reason))
            limit_s = self._config.max_run_s
            if limit_s and now - self._started_s > limit_s and self._lifecycle.phase == "running":
                self._post(DrainRequested(f"max_run_s ({limit_s:g} s) is over"))

    # -- what the lifecycle wants ----------------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        if not self._lifecycle.over:
            self._supervisor.post(event)

    def _on_dead(self, name: str, kind: ProcessKind) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            self._peers.remove(peer)
        self._reporter.note_death(name, kind)
        if kind == "generator":
            self._flow.generator_dead(name)
        elif kind == "reward":
            self._flow.reward_worker_dead(name)
        elif kind == "learner":
            self._feed.learner_dead()
            self._fail_checkpoints("the learner died")

    def _on_phase(self, phase: Phase) -> None:
        self._moved.set()
        self._watchdog.hold(self._clock.now(), held=phase == "paused")
        self._feed.hold(
            phase in {"paused", "draining", "starting", "warming"} or (phase == "evaluating" and self._reached_goal())
        )
        if phase == "paused":
            self._flow.hold(evaluation_too=True)
            self._tell_generators(Pause())
        elif phase == "running":
            self._tell_generators(Resume())
            self._flow.release()
        elif phase == "evaluating":
            self._tell_generators(Resume())
            self._flow.hold(evaluation_too=False)
            self._start_evaluation(self._feed.version)
        elif phase == "draining":
            self._flow.hold(evaluation_too=True)
            self._feed.on_idle = self._write_last_checkpoint
        else:
            self._flow.hold(evaluation_too=True)

    def _on_end(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - the supervisor's callback
        self._ok = ok
        self._fail_checkpoints(f"the run ended: {reason}")
        self._ending.set()

    def _reached_goal(self) -> bool:
        return self._feed.version >= self._config.num_steps

    def _write_last_checkpoint(self) -> None:
        """Called once the learner has nothing in hand while draining."""
        if self._config.learner.kind == "external" or self._checkpointed_version >= self._feed.version:
            self._post(Drained())
        else:
            self._ask_checkpoint()

    # -- evaluation ------------------------------------------------------------------------------------------------------

    def _start_evaluation(self, version: int) -> None:
        if self._flow.evaluation is None and self._held_out:
            self._flow.start_evaluation(Evaluation(self._config, self._held_out, version, self._clock.now()))

    def _finish_evaluation(self) -> None:
        evaluation = self._flow.evaluation
        if evaluation is None or not evaluation.done:
            return
        self._flow.evaluation = None
        report = evaluation.report(self._clock.now())
        self._reporter.note_evaluation(report)
        log.info("held-out accuracy at version %d: %.3f (%d samples)", report.version, report.accuracy, report.num_samples)
        if self._lifecycle.phase == "evaluating":
            if report.version < self._feed.version:
                self._start_evaluation(self._feed.version)
            else:
                self._post(EvaluationDone())

    # -- messages --------------------------------------------------------------------------------------------------------

    def _on_connected(self, peer: Peer) -> None:
        log.info("%s connected (pid %d)", peer.name, peer.connection.peer.pid)
        if peer.kind == "reward":
            self._post(ProcessReady(peer.name))
            self._flow.pump()
        elif peer.kind == "generator" and self._model_folder:
            peer.connection.try_send(LoadModel(self._model_folder), Lane.CONTROL)

    def _on_sample(self, _: Peer, delivery: Delivery) -> None:
        sample = delivery.message
        assert isinstance(sample, Sample)
        self._watchdog.moved("generated", self._clock.now())
        self._reporter.note_sample(sample)
        self._flow.take_sample(sample, delivery.ack)

    def _on_failure(self, peer: Peer, delivery: Delivery) -> None:
        failure = delivery.message
        assert isinstance(failure, SampleFailure)
        log.warning("g%d.%d failed at %s: %s", failure.group_id, failure.index, failure.stage, failure.reason)
        self._flow.take_failure(failure, peer.name, delivery.ack)

    def _on_score(self, _: Peer, delivery: Delivery) -> None:
        score = delivery.message
        assert isinstance(score, Score)
        self._watchdog.moved("scored", self._clock.now())
        self._reporter.note_score(score)
        self._flow.take_score(score, delivery.ack)

    def _on_heartbeat(self, peer: Peer, delivery: Delivery) -> None:
        assert isinstance(delivery.message, Heartbeat)
        peer.heartbeat = delivery.message
        self._supervisor.note_heartbeat(delivery.message)
        delivery.ack()

    def _on_fault(self, _: Peer, delivery: Delivery) -> None:
        fault = delivery.message
        assert isinstance(fault, Fault)
        delivery.ack()
        self._post(ProcessFault(fault.name, fault.reason, fault.fatal))

    def _on_learner_ready(self, peer: Peer, delivery: Delivery) -> None:
        ready = delivery.message
        assert isinstance(ready, LearnerReady)
        delivery.ack()
        self._model_folder = ready.model_folder
        self._reporter.note_warm_start(ready.metrics)
        self._feed.learner_ready(peer.connection, ready.version)
        self._flow.buffer.version_published(ready.version)
        for generator in self._peers.of("generator"):
            if generator.num_slots == 0:
                generator.connection.try_send(LoadModel(self._model_folder), Lane.CONTROL)
        self._post(ProcessReady(peer.name))
        if self._reached_goal():
            self._goal()

    def _on_engine_ready(self, peer: Peer, delivery: Delivery) -> None:
        ready = delivery.message
        assert isinstance(ready, EngineReady)
        delivery.ack()
        peer.num_slots = ready.num_slots
        self._flow.generator_ready(peer.name, ready.num_slots, ready.version)
        if self._lifecycle.phase == "paused":
            peer.connection.try_send(Pause(), Lane.CONTROL)
        if self._weights is not None:
            peer.connection.try_send(self._weights, Lane.CONTROL)
        self._post(ProcessReady(peer.name))

    def _on_weights(self, _: Peer, delivery: Delivery) -> None:
        available = delivery.message
        assert isinstance(available, WeightsAvailable)
        delivery.ack()
        self._spread(available)

    def _spread(self, available: WeightsAvailable) -> None:
        """Tell every generator about a version, unless a newer one is out already."""
        if (
            self._weights is not None
            and available.version < self._weights.version
            and available.location == self._weights.location
        ):
            return
        self._weights = available
        self._reporter.note_published(available)
        self._flow.buffer.version_published(available.version)
        self._tell_generators(available)

    def _on_version_live(self, peer: Peer, delivery: Delivery) -> None:
        live = delivery.message
        assert isinstance(live, VersionLive)
        delivery.ack()
        self._watchdog.moved("live", self._clock.now())
        peer.live_version = live.version
        self._reporter.note_live(live, self._weights)
        if live.probe_error > self._config.broadcast.probe_tolerance:
            log.warning(
                "%s: probe logprobs of version %d differ by %.3g from the learner's (broadcast.probe_tolerance %g): engine and "
                "learner do not agree on the model; check dtypes", peer.name, live.version, live.probe_error,
                self._config.broadcast.probe_tolerance,
            )  # fmt: skip
        self._flow.version_live(peer.name, live.version)

    def _on_step_done(self, _: Peer, delivery: Delivery) -> None:
        done = delivery.message
        assert isinstance(done, StepDone)
        delivery.ack()
        self._step_done(done)

    def _step_done(self, done: StepDone) -> None:
        self._watchdog.moved("trained", self._clock.now())
        fresh = self._feed.step_done(done)
        self._flow.buffer.version_published(done.version)
        if fresh:
            self._reporter.note_step(done, self._flow, self._peers, self._supervisor.heartbeats)
            self._moved.set()
        checkpoint, evaluate = self._config.checkpoint.every_steps, self._config.eval.every_steps
        if self._reached_goal():
            self._goal()
        elif checkpoint and done.version % checkpoint == 0:
            self._ask_checkpoint()
        if evaluate and done.version % evaluate == 0 and not self._reached_goal():
            self._start_evaluation(done.version)

    def _goal(self) -> None:
        if self._lifecycle.phase in {"running", "paused", "evaluating"}:
            self._ask_checkpoint()
            self._post(StepsDone())

    def _ask_checkpoint(self) -> None:
        learner = self._peers.get("learner")
        if learner is not None:
            learner.connection.try_send(Checkpoint(self._feed.version), Lane.CONTROL)

    def _on_checkpoint_done(self, _: Peer, delivery: Delivery) -> None:
        done = delivery.message
        assert isinstance(done, CheckpointDone)
        delivery.ack()
        log.info("checkpoint of version %d: %s (%.1f s)", done.version, done.folder, done.seconds)
        self._checkpoint_folder, self._checkpointed_version = done.folder, done.version
        self._flow.buffer.forget(oldest_checkpoint(Path(done.folder).parent), self._clock.now())
        for waiter in self._checkpoint_waiters:
            if not waiter.done():
                waiter.set_result(done.folder)
        self._checkpoint_waiters.clear()
        if self._lifecycle.phase == "draining" and self._feed.idle:
            self._write_last_checkpoint()

    def _fail_checkpoints(self, reason: str) -> None:
        for waiter in self._checkpoint_waiters:
            if not waiter.done():
                waiter.set_exception(RunError(f"no checkpoint was written: {reason}"))
        self._checkpoint_waiters.clear()

    def _tell_generators(self, message: Message) -> None:
        for peer in self._peers.of("generator"):
            if peer.num_slots:
                with contextlib.suppress(ConnectionClosed):
                    peer.connection.try_send(message, Lane.CONTROL)

    # -- what the API asks -----------------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """Return the run as it is now."""
        now, counts = self._clock.now(), self._flow.buffer.counts()
        groups = {state: getattr(counts, state) for state in ("issued", "running", "scoring", "ready", "taken", "trained")}
        groups |= {"dropped": sum(counts.dropped.values()), "failed": sum(counts.failed.values())}
        evaluations = self._reporter.evaluations
        return RunStatus(
            name=self._config.name,
            run_folder=str(self._run_folder),
            phase=self._visible_phase(),
            reason=self._lifecycle.reason,
            version=self._feed.version,
            num_steps=self._config.num_steps,
            groups=groups,
            dropped={**counts.dropped, **counts.failed},
            processes=tuple(self._process_status(now)),
            waiting=wait_chain(self._waits(now), now),
            accuracy_before=evaluations[0].accuracy if evaluations else None,
            accuracy_after=evaluations[-1].accuracy if len(evaluations) > 1 else None,
            checkpoint=self._checkpoint_folder,
            refused_messages=self._listener.refused.total,
            refused_samples=self._flow.refused_samples,
            uptime_s=now - self._started_s,
        )

    def _visible_phase(self) -> str:
        """Return the phase; an ended run still shows `draining` until its books are closed."""
        return "draining" if self._lifecycle.phase in ENDED and not self._over.is_set() else self._lifecycle.phase

    def _waits(self, now: float) -> list[Wait]:
        """Return who waits for what, the controller's own wait for a full step among them."""
        waits = waits_of(self._supervisor.heartbeats.values())
        if self._feed.waiting:
            waits.append(Wait("controller", self._feed.waiting, self._feed.waiting_since_s or now))
        held = self._flow.admission.why_nothing()
        if held and any(wait.who.startswith("generator") for wait in waits):
            waits.append(Wait("admission", held, now))
        return waits

    def _queues(self) -> dict[str, int]:
        counts = self._flow.buffer.counts()
        return {
            "ready": counts.ready,
            "running": counts.running,
            "scoring": counts.scoring,
            "rewards asked for": len(self._flow.desk),
        }

    def _process_status(self, now: float) -> list[ProcessStatus]:
        rows = []
        for record in self._lifecycle.processes.values():
            beat = self._supervisor.heartbeats.get(record.name)
            pid = self._supervisor.pids.get(record.name)
            waiting = beat is not None and bool(beat.waiting_for)
            rows.append(
                ProcessStatus(
                    name=record.name,
                    kind=record.kind,
                    pid=pid.pid if pid else 0,
                    state=record.state,
                    deaths=len(record.exit_codes),
                    waiting_for=beat.waiting_for if beat and waiting else "",
                    waiting_s=now - beat.waiting_since_s if beat and waiting else 0.0,
                )
            )
        return rows

    def evaluations(self) -> list[EvalReport]:
        """Return the evaluations so far."""
        return list(self._reporter.evaluations)

    async def steps_from(self, first: int) -> AsyncIterator[StepReport]:
        """Yield reports from step `first` until the run has ended."""
        sent = 0
        while True:
            reports = self._reporter.steps
            while sent < len(reports):
                report = reports[sent]
                sent += 1
                if report.step >= first:
                    yield report
            if self._over.is_set():
                return
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._moved.wait()

    def metrics_text(self) -> str:
        """Return the newest metrics in Prometheus' text form."""
        return self._reporter.prometheus_text()

    async def pause(self) -> RunStatus:
        """Hold the run."""
        return self._request(PauseRequested())

    async def resume(self) -> RunStatus:
        """Go on."""
        return self._request(ResumeRequested())

    async def drain(self) -> RunStatus:
        """End the run in good order; return once it has ended."""
        self._request(DrainRequested())
        await self._over.wait()
        return self.status()

    async def stop(self) -> RunStatus:
        """End the run at once; return once it has ended."""
        self._request(StopRequested())
        await self._over.wait()
        return self.status()

    def _request(self, event: Event) -> RunStatus:
        refusal = self._lifecycle.refusal(event)
        if refusal:
            raise RunError(refusal)
        self._supervisor.post(event)
        return self.status()

    async def checkpoint(self) -> str:
        """Write a checkpoint; return its folder."""
        if self._peers.get("learner") is None:
            raise RunError("there is no learner that could write a checkpoint now")
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._checkpoint_waiters.append(waiter)
        self._ask_checkpoint()
        return await waiter

    async def submit(self, group: ExternalGroup) -> SubmitResult:
        """Take in a group generated elsewhere."""
        if self._lifecycle.over:
            raise RunError("the run is over")
        return self._flow.submit(group)

    async def take(self) -> GroupsTaken:
        """Hand the next step's groups to an outside learner."""
        self._only_external()
        return await self._feed.take_outside(self._ending)

    async def trained(self, step: int, metrics: dict[str, float]) -> None:
        """Note that an outside learner has done a step."""
        self._only_external()
        now = self._clock.now()
        self._step_done(self._feed.outside_step(step, metrics, now))

    async def announce_weights(self, available: WeightsAvailable, model_folder: str) -> None:
        """Tell the generators about a version that an outside learner has published."""
        self._only_external()
        if model_folder and not self._model_folder:
            self._model_folder = model_folder
        for generator in self._peers.of("generator"):
            if generator.num_slots == 0 and self._model_folder:
                generator.connection.try_send(LoadModel(self._model_folder), Lane.CONTROL)
        self._spread(available)

    def _only_external(self) -> None:
        if self._config.learner.kind != "external":
            raise RunError('this run has its own learner; set learner.kind = "external" to train outside')


def oldest_checkpoint(folder: Path) -> int:
    """Return the version of the oldest checkpoint kept; steps before it can never be asked for again."""
    versions = [
        int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()
    ]
    return min(versions, default=0)
