"""The controller's edge: what a peer may say, and what is done where it says something else.

A peer is believed only about itself. Each role has its list of messages; the sender is the connection, never a field; every field
is checked against what the controller knows: the groups, who was given them, the versions that were published, the steps that
were sent. Numbers are finite and bounded, since they reach the ledger, the metrics and the clock of a resume. What fails is
refused with a reason and counted by sender and kind; the third refusal in a minute ends that connection.

What is checked where it is stored (a sample's arrays, a score's parts) is in buffer/validate.py. Nothing here changes the run.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from pathlib import Path

from asyncrl.buffer.validate import MAX_ATTEMPT
from asyncrl.control.batch_feeder import BatchFeeder
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.peers import Peer
from asyncrl.schema.batches import StepDone
from asyncrl.schema.codec import Message
from asyncrl.schema.control import (
    CheckpointDone,
    EngineReady,
    EngineRoom,
    Fault,
    Heartbeat,
    LearnerReady,
    ModelsReady,
    PhaseReached,
    ProcessKind,
)
from asyncrl.schema.samples import InferResult, Sample, SampleFailure, Score
from asyncrl.schema.weights import VersionLive, WeightsAvailable

MAY_SEND: dict[ProcessKind, frozenset[type]] = {
    "generator": frozenset({
        Sample, SampleFailure, EngineReady, EngineRoom, VersionLive, PhaseReached, Heartbeat, Fault
    }),
    "reward": frozenset({Score, Heartbeat, Fault}),
    "inference": frozenset({InferResult, ModelsReady, PhaseReached, Heartbeat, Fault}),
    "learner": frozenset({LearnerReady, StepDone, WeightsAvailable, CheckpointDone, PhaseReached, Heartbeat, Fault}),
}  # fmt: skip
"""What each role may say to the controller; everybody else nothing."""
MOST_REFUSALS = 3
"""Within `REFUSAL_WINDOW_S`: then the connection is ended."""
REFUSAL_WINDOW_S = 60.0
MOST_SLOTS = 1 << 20
MOST_BYTES = 1 << 60
MOST_SECONDS = 1e12
"""Of any time: more than clocks show, less than breaks arithmetic."""
MOST_VALUES = 4096
"""Of metrics or gauges in one message."""
UNKNOWN = "the controller takes no such message"
MOST_TEXT = 1 << 20
"""Characters of a reason."""


class Edge:
    """What the controller lets in, and how much it has refused."""

    def __init__(self, run_folder: Path, dispatcher: Dispatcher, feeder: BatchFeeder) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        """By sender and kind of message."""
        self._checkpoints = run_folder / "checkpoints"
        self._dispatcher = dispatcher
        self._buffer = dispatcher.buffer
        self._feeder = feeder
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MOST_REFUSALS))

    def count(self, peer: Peer, message: Message, now: float) -> bool:
        """Count a refusal; return whether it is one too many and the connection is to be ended."""
        self.refused[peer.name, type(message).__name__] += 1
        recent = self._recent[peer.connection.peer.incarnation]
        recent.append(now)
        return len(recent) == MOST_REFUSALS and now - recent[0] <= REFUSAL_WINDOW_S

    def forget(self, peer: Peer) -> None:
        """Forget when a connection that is over was refused something."""
        self._recent.pop(peer.connection.peer.incarnation, None)

    def refusal(self, peer: Peer, message: Message) -> str:
        """Return why this message of this peer is not taken, or nothing."""
        if type(message) not in MAY_SEND.get(peer.kind, frozenset()):
            return f"a {peer.kind} process does not send it"
        if isinstance(message, Heartbeat):
            numbers = (message.sent_s, message.waiting_since_s, *message.gauges.values())
            return _named(message.name, peer) or _numbers(numbers, text=message.waiting_for)
        if isinstance(message, Fault):
            return _named(message.name, peer) or _numbers((), text=message.reason)
        if isinstance(message, PhaseReached):
            moved = (*message.resident.values(), *(move.num_bytes for move in message.moves), message.peak_bytes)
            seconds = (message.finished_s, *(move.seconds for move in message.moves))
            return (
                _named(message.name, peer)
                or _count("bytes", min(moved), 0)
                or _count("bytes", max(moved), 0, MOST_BYTES)
                or (_numbers(seconds))
            )
        if peer.kind == "generator":
            return self._of_generator(peer, message)
        return self._of_learner(peer, message) if peer.kind == "learner" else self._of_judge(peer, message)

    def _of_generator(self, peer: Peer, message: Message) -> str:
        newest = self._buffer.newest_version
        match message:
            case Sample():
                return _named(message.generator, peer) or self._of_member(peer, message) or self._prompt(message)
            case SampleFailure():
                wrong_stage = "" if message.stage == "generate" else f"a generator cannot fail at {message.stage}"
                return (
                    wrong_stage
                    or self._of_member(peer, message)
                    or _numbers((), text=message.reason + message.kind + message.trace)
                )
            case EngineReady():
                return (
                    _named(message.generator, peer)
                    or _count("num_slots", message.num_slots, 1, MOST_SLOTS)
                    or _count("version", message.version, -1, newest)
                )
            case EngineRoom():
                return _named(message.generator, peer) or _count("num_slots", message.num_slots, 0, MOST_SLOTS)
            case VersionLive():
                return (
                    _named(message.generator, peer)
                    or ("" if peer.num_slots else "its engine is not ready")
                    or _count("version", message.version, 0, newest)
                    or _numbers((message.live_s, message.fetch_ms, message.swap_ms, message.probe_error))
                )
        return UNKNOWN

    def _of_judge(self, peer: Peer, message: Message) -> str:
        match message:
            case Score() | InferResult():
                told = message.error + (message.error_kind + message.trace if isinstance(message, Score) else "")
                return (
                    (_named(message.worker, peer) if message.worker else "")
                    or _count("attempt", message.attempt, 0, MAX_ATTEMPT)
                    or _numbers((message.started_s, message.finished_s), text=told)
                    or self._dispatcher.scores.refusal(message, peer.name)
                )
            case ModelsReady():
                return _named(message.worker, peer) or _count("num_bytes", message.num_bytes, 0, MOST_BYTES)
        return UNKNOWN

    def _of_learner(self, peer: Peer, message: Message) -> str:
        match message:
            case LearnerReady():
                return "it has said so before" if peer.is_ready else _numbers((), text=message.model_folder)
            case StepDone():
                if message.version != message.step + 1:
                    return f"step {message.step} makes no version {message.version}"
                if not peer.is_ready or len(message.metrics) > MOST_VALUES:
                    return f"it is not ready, or {len(message.metrics)} metrics are too many"
                return _count("step", message.step, 0, self._feeder.num_sent - 1) or _numbers((
                    message.started_s,
                    message.finished_s,
                    message.waited_s,
                ))
            case WeightsAvailable():
                return _count("version", message.version, 0, self._buffer.state.next_step) or _numbers((
                    message.published_s,
                    message.blocked_ms,
                ))
            case CheckpointDone():
                if Path(message.folder).parent != self._checkpoints:
                    return f"{message.folder[:200]!r} is not in {self._checkpoints}"
                return _count("version", message.version, 0, max(self._feeder.version, 0)) or _numbers((message.seconds,))
        return UNKNOWN

    def _of_member(self, peer: Peer, message: Sample | SampleFailure) -> str:
        """Return why this peer cannot speak of that member; of a group that is over it may, and that changes nothing."""
        if refusal := _count("attempt", message.attempt, 0, MAX_ATTEMPT):
            return refusal
        if isinstance(message, Sample) and (refusal := _numbers((message.started_s, message.finished_s))):
            return refusal
        if message.purpose == "eval":
            evaluation = self._dispatcher.evaluation
            holder = evaluation.holder(message.group_id) if evaluation is not None else None
            return "" if holder in {None, peer.name} else f"prompt {message.group_id} was given to {holder}"
        state = self._buffer.state
        group = state.groups.get(message.group_id)
        if group is None:
            return "" if 0 <= message.group_id < state.next_group_id else f"there is no group {message.group_id}"
        if not 0 <= message.index < group.size:
            return f"group {message.group_id} has no member {message.index}"
        if group.holders.get(message.attempt) != peer.name or group.external:
            return f"attempt {message.attempt} of group {message.group_id} was not given to it"
        return ""

    def _prompt(self, sample: Sample) -> str:
        """Return a word where a sample is of another prompt than its group."""
        if sample.purpose != "train" or sample.group_id not in self._buffer.state.groups:
            return ""
        known = self._buffer.prompt_ids(sample.group_id)
        return "" if known in {b"", sample.prompt_ids} else f"its prompt is not that of group {sample.group_id}"


def vocabulary_of(model_folder: str) -> int:
    """Return the size of a model's vocabulary, by its configuration; 0 where that does not say."""
    try:
        model = json.loads((Path(model_folder) / "config.json").read_text(encoding="utf-8"))
        return int(model.get("vocab_size") or model.get("text_config", {}).get("vocab_size") or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def _named(name: str, peer: Peer) -> str:
    return "" if name == peer.name else f"it speaks for {name[:100]!r}"


def _count(name: str, value: int, least: int, most: int = MOST_BYTES) -> str:
    return "" if least <= value <= most else f"{name} is {value}, not {least} to {most}"


def _numbers(values: Iterable[float], *, text: str = "") -> str:
    """Return what is wrong with these numbers and this text, or nothing."""
    numbers = tuple(values)
    if len(numbers) > MOST_VALUES or len(text) > MOST_TEXT:
        return f"{len(numbers)} numbers and {len(text)} characters are too many"
    odd = [value for value in numbers if not (math.isfinite(value) and abs(value) <= MOST_SECONDS)]
    return f"{odd[0]} is no usable number" if odd else ""
