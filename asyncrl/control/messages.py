"""What the run's processes say to the controller: one handler a kind of message.

A handler reads the message, tells the parts it concerns, and acknowledges it, once what it brought is safe. Called by
control/reception.py, on the controller's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl.control.life_events import ProcessFault, ProcessReady
from asyncrl.control.peers import Peer
from asyncrl.errors import LedgerError
from asyncrl.schema.batches import StepDone
from asyncrl.schema.control import (
    CheckpointDone,
    EngineReady,
    EngineRoom,
    Fault,
    Heartbeat,
    LearnerReady,
    ModelsReady,
    Pause,
    PhaseReached,
    Resume,
)
from asyncrl.schema.samples import InferResult, Sample, SampleFailure, Score
from asyncrl.schema.weights import VersionLive, WeightsAvailable
from asyncrl.transport.channel import Delivery

if TYPE_CHECKING:
    from asyncrl.control.controller import Controller

log = logging.getLogger(__name__)


class Messages:
    """The handlers, by kind."""

    def __init__(self, controller: Controller) -> None:
        self._run = controller
        self._handlers: dict[type, Callable[[Peer, Delivery], None]] = {
            Sample: self._on_sample,
            SampleFailure: self._on_failure,
            Score: self._on_score,
            InferResult: self._on_score,
            ModelsReady: self._on_models_ready,
            StepDone: self._on_step_done,
            WeightsAvailable: self._on_weights,
            VersionLive: self._on_version_live,
            Heartbeat: self._on_heartbeat,
            LearnerReady: self._on_learner_ready,
            EngineReady: self._on_engine_ready,
            EngineRoom: self._on_engine_room,
            CheckpointDone: self._on_checkpoint_done,
            PhaseReached: self._on_phase_reached,
            Fault: self._on_fault,
        }

    def dispatch(self, peer: Peer, delivery: Delivery) -> None:
        """Hand a message to its handler."""
        handler = self._handlers.get(type(delivery.message))
        if handler is None:
            log.warning("%s sent a %s, which is not for the controller", peer.name, type(delivery.message).__name__)
            delivery.ack()
            return
        handler(peer, delivery)

    def _on_sample(self, _: Peer, delivery: Delivery) -> None:
        sample = delivery.message
        assert isinstance(sample, Sample)
        self._run.watchdog.moved("evaluated" if sample.purpose == "eval" else "generated", self._run.clock.now())
        self._run.reporter.note_sample(sample)
        self._run.flow.take_sample(sample, delivery.ack)

    def _on_failure(self, peer: Peer, delivery: Delivery) -> None:
        failure = delivery.message
        assert isinstance(failure, SampleFailure)
        is_awaited = self._run.flow.take_failure(failure, peer.name, delivery.ack)
        level = logging.WARNING if is_awaited else logging.DEBUG
        log.log(level, "g%d.%d failed at %s: %s", failure.group_id, failure.index, failure.stage, failure.reason)

    def _on_score(self, _: Peer, delivery: Delivery) -> None:
        answer = delivery.message
        assert isinstance(answer, Score | InferResult)
        self._run.watchdog.moved("evaluated" if answer.purpose == "eval" else "scored", self._run.clock.now())
        self._run.reporter.note_judged(answer)
        score = self._run.flow.take_answer(answer, delivery.ack)
        if score is not None:
            self._run.reporter.note_score(score)

    def _on_models_ready(self, peer: Peer, delivery: Delivery) -> None:
        ready = delivery.message
        assert isinstance(ready, ModelsReady)
        delivery.ack()
        if self._run.peers.get(peer.name) is peer:
            log.info("%s: %s ready (%.1f MiB)", peer.name, ", ".join(ready.models), ready.num_bytes / 2**20)
            self._run.post(ProcessReady(peer.name))
            self._run.flow.pump()

    def _on_heartbeat(self, peer: Peer, delivery: Delivery) -> None:
        assert isinstance(delivery.message, Heartbeat)
        peer.heartbeat = delivery.message
        self._run.supervisor.note_heartbeat(delivery.message)
        self._run.roster.beat(peer.name, self._run.clock.now())
        delivery.ack()

    def _on_fault(self, peer: Peer, delivery: Delivery) -> None:
        fault = delivery.message
        assert isinstance(fault, Fault)
        delivery.ack()
        if self._run.roster.is_guest(peer.name):
            log.warning("%s cannot go on: %s", peer.name, fault.reason)
            return
        self._run.post(ProcessFault(fault.name, fault.reason, fault.fatal))

    def _on_learner_ready(self, peer: Peer, delivery: Delivery) -> None:
        ready = delivery.message
        assert isinstance(ready, LearnerReady)
        delivery.ack()
        if self._run.peers.get(peer.name) is not peer:
            return
        self._run.model_folder = ready.model_folder
        self._run.reporter.note_warm_start(ready.metrics)
        try:
            self._run.feed.learner_ready(peer.connection, ready.version)
        except LedgerError as error:
            self._run.post(ProcessFault(peer.name, str(error), fatal=True))
            return
        self._run.flow.buffer.version_published(ready.version)
        if self._run.switching is not None:
            self._run.switching.join(peer, self._run.model_folder)
        self._run.tell_model_folder()
        self._run.post(ProcessReady(peer.name))
        if self._run.lifecycle.phase == "draining":
            self._run.feed.on_idle = self._run.write_last_checkpoint
        if self._run.reached_goal:
            self._run.reach_goal()

    def _on_phase_reached(self, peer: Peer, delivery: Delivery) -> None:
        reached = delivery.message
        assert isinstance(reached, PhaseReached)
        delivery.ack()
        if self._run.switching is not None and self._run.peers.get(peer.name) is peer:
            self._run.switching.reached(reached)

    def _on_engine_ready(self, peer: Peer, delivery: Delivery) -> None:
        ready = delivery.message
        assert isinstance(ready, EngineReady)
        delivery.ack()
        if self._run.peers.get(peer.name) is not peer or peer.num_slots:
            return  # it died meanwhile, or was told twice to load: taking it in again would forget the groups it was given
        self._run.watchdog.moved("ready", self._run.clock.now())
        peer.num_slots = ready.num_slots
        self._run.flow.generator_ready(peer.name, ready.num_slots, ready.version)
        if self._run.lifecycle.phase == "paused":
            peer.tell(Pause())
        elif self._run.roster.is_guest(peer.name):
            peer.tell(Resume())  # the run may have been paused when the guest was cut off
        if self._run.weights is not None:
            peer.tell(self._run.weights)
        if self._run.roster.is_guest(peer.name):
            self._run.roster.ready(peer.name)
        else:
            self._run.post(ProcessReady(peer.name))

    def _on_engine_room(self, peer: Peer, delivery: Delivery) -> None:
        room = delivery.message
        assert isinstance(room, EngineRoom)
        delivery.ack()
        if self._run.peers.get(peer.name) is peer and peer.num_slots:
            peer.num_slots = max(1, room.num_slots)
            self._run.flow.room_changed(peer.name, peer.num_slots)

    def _on_weights(self, _: Peer, delivery: Delivery) -> None:
        available = delivery.message
        assert isinstance(available, WeightsAvailable)
        delivery.ack()
        self._run.spread(available)
        if self._run.switching is not None:
            self._run.switching.announced(available.version)

    def _on_version_live(self, peer: Peer, delivery: Delivery) -> None:
        live = delivery.message
        assert isinstance(live, VersionLive)
        delivery.ack()
        self._run.watchdog.moved("live", self._run.clock.now())
        peer.live_version = live.version
        self._run.reporter.note_live(live, self._run.weights)
        if live.probe_error > self._run.config.broadcast.probe_tolerance:
            log.warning(
                "%s: probe logprobs of version %d differ by %.3g from the learner's (broadcast.probe_tolerance %g): engine and "
                "learner do not agree on the model; check dtypes", peer.name, live.version, live.probe_error,
                self._run.config.broadcast.probe_tolerance,
            )  # fmt: skip
        self._run.flow.version_live(peer.name, live.version)

    def _on_step_done(self, _: Peer, delivery: Delivery) -> None:
        done = delivery.message
        assert isinstance(done, StepDone)
        delivery.ack()
        self._run.step_done(done)

    def _on_checkpoint_done(self, _: Peer, delivery: Delivery) -> None:
        done = delivery.message
        assert isinstance(done, CheckpointDone)
        delivery.ack()
        log.info("checkpoint of version %d: %s (%.1f s)", done.version, done.folder, done.seconds)
        self._run.flow.buffer.forget(self._run.checkpoints.done(done), self._run.clock.now())
        if self._run.lifecycle.phase == "draining" and self._run.feed.idle:
            self._run.write_last_checkpoint()
