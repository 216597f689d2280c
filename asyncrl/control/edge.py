"""The controller's edge: which messages a peer may send, and what happens with other messages.

A peer may report only about itself. Each role has a list of allowed messages; the sender is known from the connection, never from
a field. Every field is checked against what the controller knows: groups, the generators that got them, published versions, sent
steps. Numbers must be finite and bounded, since they reach the ledger, the metrics and the clock of a resume. A wrong message is
refused with a reason and counted by sender and kind; the third refusal in a minute ends the connection.

buffer/validate.py checks what the buffer stores (arrays of samples, parts of scores). Nothing here changes the run.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from asyncrl.buffer.validate import MAX_ATTEMPT, progress_fault, shape_fault
from asyncrl.control.batch_feeder import BatchFeeder
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.peers import Peer
from asyncrl.schema import control as msg
from asyncrl.schema.codec import Message
from asyncrl.schema.samples import InferResult, Progress, SampleFailure, Samples, Scores, StepDone
from asyncrl.schema.weights import VersionLive, WeightsAvailable

log = logging.getLogger(__name__)

EVERYBODY: frozenset[type] = frozenset({msg.Heartbeat, msg.Fault})
MAY_SEND: dict[msg.ProcessKind, frozenset[type]] = {
    "generator": EVERYBODY | {Samples, SampleFailure, Progress, msg.EngineReady, msg.EngineRoom, VersionLive, msg.PhaseReached},
    "reward": EVERYBODY | {Scores},
    "inference": EVERYBODY | {InferResult, msg.ModelsReady, msg.PhaseReached},
    "learner": EVERYBODY | {msg.LearnerReady, StepDone, WeightsAvailable, msg.CheckpointDone, msg.PhaseReached},
}
"""Messages that each role may send to the controller; other roles may send none."""
MOST_REFUSALS = 3
"""After this many refusals within `REFUSAL_WINDOW_S` the connection is ended."""
REFUSAL_WINDOW_S = 60.0
MOST_SLOTS = 1 << 20
MOST_NUMBER = 1 << 60
"""Largest number of bytes, seconds or anything else: more than any real value, and safe for arithmetic."""
MOST_VALUES = 4096
"""Maximum number of metrics or gauges in one message."""
MOST_WORDS = 1000
"""Maximum length of the text that says what a process waits for, in characters."""
MOST_TEXT = 1 << 20
"""Maximum length of a reason, in characters."""
MOST_NAME = 256
"""Maximum length of a metric's name, in characters."""
CHECKED_ELSEWHERE = frozenset({"reward", "parts", "rewards", "metrics"})
"""Fields whose values are checked where they are stored. Values of `metrics` may be anything, as after a failed step."""


class Edge:
    """Checks the controller's incoming messages, and counts refusals."""

    def __init__(self, run_folder: Path, dispatcher: Dispatcher, feeder: BatchFeeder) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        """Number of refusals, by sender and kind of message."""
        self._checkpoints = run_folder / "checkpoints"
        self._dispatcher = dispatcher
        self._buffer = dispatcher.buffer
        self._feeder = feeder
        self._prompts: dict[int, bytes] = {}
        """By group, the prompt ids of its first sample, for groups whose first samples are among these messages."""

    def let_in(self, peer: Peer, messages: Sequence[Message], now: float) -> tuple[Sequence[Message], str]:
        """Return the messages that are not refused, and why the connection must be ended, or nothing."""
        refusals, reason = self._refusals(peer, messages), ""
        if not any(refusals):
            return messages, ""
        for message, refusal in zip(messages, refusals, strict=True):
            if refusal:
                log.debug("refused a %s of %s: %s", type(message).__name__, peer.name, refusal)
                reason = reason or self._count(peer, message, refusal, now)
        return [message for message, refusal in zip(messages, refusals, strict=True) if not refusal], reason

    def _count(self, peer: Peer, message: Message, refusal: str, now: float) -> str:
        """Count a refusal; return why the connection must be ended if there were too many, else nothing."""
        self.refused[peer.name, type(message).__name__] += 1
        peer.refused_s = [*peer.refused_s, now][-MOST_REFUSALS:]
        if len(peer.refused_s) < MOST_REFUSALS or now - peer.refused_s[0] > REFUSAL_WINDOW_S:
            return ""
        return f"its messages were refused, the last, a {type(message).__name__}: {refusal}"

    def _refusals(self, peer: Peer, messages: Iterable[Message]) -> list[str]:
        """Return, for each of these messages, why it is refused, or nothing."""
        self._prompts.clear()
        refusals, may_send = list[str](), MAY_SEND.get(peer.kind, frozenset())
        kind: type[Message]
        for kind, alike in itertools.groupby(messages, type):
            if kind not in may_send:
                refusals += [f"a {peer.kind} process does not send it" for _ in alike]
                continue
            speaker = next((field for field in ("name", "generator", "worker") if field in kind.__struct_fields__), "")
            for message in alike:
                speaks_for, refusal = getattr(message, speaker, peer.name), ""
                if speaks_for != peer.name and (speaks_for or speaker != "worker"):
                    refusal = f"it speaks for {speaks_for[:100]!r}"
                refusal = refusal or odd_value(message) or _beyond("attempt", getattr(message, "attempt", 0), 0, MAX_ATTEMPT)
                refusals.append(refusal or self._refusal(peer, message))
        return refusals

    def _refusal(self, peer: Peer, message: Message) -> str:
        """Return why this message contradicts what the controller knows, or nothing."""
        newest, feeder, refusal = self._buffer.newest_version, self._feeder, ""
        match message:
            case Samples() | SampleFailure():
                refusal = self._member_refusal(peer, message)
            case Scores() | InferResult():
                refusal = self._dispatcher.scores.refusal(message, peer.name)
            case Progress(group_id=group_id, index=index):
                group = self._buffer.state.groups.get(group_id)
                refusal = progress_fault(message, self._dispatcher.sampling.max_new_tokens)
                if group is not None and (group.holders.get(message.attempt) != peer.name or not 0 <= index < group.size):
                    refusal = f"member {index} of group {group_id} was not given to it"
            case msg.Heartbeat(waiting_for=what):
                short = len(what) <= MOST_WORDS and what.isprintable()
                refusal = "" if short else f"what it waits for is no line of {MOST_WORDS} characters at most"
            case msg.EngineReady():
                refusal = _beyond("num_slots", message.num_slots, 1, MOST_SLOTS)
                refusal = refusal or _beyond("version", message.version, -1, newest)
            case msg.EngineRoom():
                refusal = _beyond("num_slots", message.num_slots, 0, MOST_SLOTS)
            case VersionLive():
                refusal = _beyond("version", message.version, 0, newest) if peer.num_slots else "its engine is not ready"
            case msg.LearnerReady() if peer.is_ready:
                refusal = "it has said so before"
            case msg.LearnerReady(checkpoint=folder) if folder:
                refusal = self._folder_refusal(folder)
            case StepDone() if not peer.is_ready:
                refusal = "it is not ready"
            case StepDone():
                refusal = _beyond("step", message.step, 0, min(feeder.next_step - 1, feeder.version))  # one after the other
                refusal = refusal or _beyond("version", message.version, message.step + 1, message.step + 1)
            case WeightsAvailable():
                refusal = _beyond("version", message.version, 0, self._buffer.state.next_step)
            case msg.CheckpointDone():
                refusal = self._folder_refusal(message.folder) or _beyond("version", message.version, 0, max(feeder.version, 0))
        return refusal

    def _folder_refusal(self, folder: str) -> str:
        return "" if Path(folder).parent == self._checkpoints else f"{folder[:200]!r} is not in {self._checkpoints}"

    def _member_refusal(self, peer: Peer, message: Samples | SampleFailure) -> str:
        """Return why this peer may not report about these members. For a group that is over it may; that changes nothing."""
        if isinstance(message, Samples):
            indices, refusal = message.indices, shape_fault(message)
        else:
            indices = (message.index,)
            refusal = "" if message.stage == "generate" else f"a generator cannot fail at {message.stage}"
        if not refusal and (not indices or len(set(indices)) < len(indices)):
            refusal = f"its members are {indices[:8]}"
        if refusal:
            return refusal
        if message.purpose == "eval":
            evaluation = self._dispatcher.evaluation
            holder = evaluation.holders.get(message.group_id, peer.name) if evaluation is not None else peer.name
            return "" if holder == peer.name else f"prompt {message.group_id} was given to {holder}"
        state = self._buffer.state
        group = state.groups.get(message.group_id)
        if group is None:
            return "" if 0 <= message.group_id < state.next_group_id else f"there is no group {message.group_id}"
        if min(indices) < 0 or max(indices) >= group.size:
            return f"group {message.group_id} has no members {indices[:8]}"
        if group.holders.get(message.attempt) != peer.name or group.external:
            return f"attempt {message.attempt} of group {message.group_id} was not given to it"
        if isinstance(message, Samples):
            known, source = self._buffer.held[message.group_id].prompt_ids()
            # Where another generator's word is another one, neither is believed (Dispatcher.take_samples).
            if source in {"", peer.name}:
                known = known or self._prompts.setdefault(message.group_id, message.prompt_ids)
                return "" if known == message.prompt_ids else f"its prompt is not that of group {message.group_id}"
        return ""


def _beyond(name: str, value: int, least: int, most: int) -> str:
    return "" if least <= value <= most else f"{name} is {value}, not {least} to {most}"


def odd_value(message: msgspec.Struct) -> str:
    """Return what is wrong with a message's numbers, tables and texts, or nothing; structs in tuples are checked too."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, (float, int)):
            if not -MOST_NUMBER <= value <= MOST_NUMBER and name not in CHECKED_ELSEWHERE:  # true of NaN, too
                return f"{value} is no usable number"
        elif isinstance(value, str):
            if len(value) > MOST_TEXT:
                return f"{len(value)} characters are too many"
        elif isinstance(value, tuple):
            for each in value if value and isinstance(value[0], msgspec.Struct) else ():
                if odd := odd_value(each):
                    return odd
        elif isinstance(value, dict):
            if len(value) > MOST_VALUES:
                return f"{len(value)} values are too many"
            if any(len(key) > MOST_NAME for key in value):
                return f"the name of a value has at most {MOST_NAME} characters"
            for number in value.values() if name not in CHECKED_ELSEWHERE else ():
                if not -MOST_NUMBER <= number <= MOST_NUMBER:
                    return f"{number} is no usable number"
    return ""
