"""Everybody's waits, and how deep the queues are: what status, watchdog and live display say about a run that stands still.

Reads, changes nothing. Called by control/controller.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.control.feed import LearnerFeed
from asyncrl.control.flow import Flow
from asyncrl.control.peers import Peers
from asyncrl.control.scoring import JudgeKind
from asyncrl.control.switching import Switching
from asyncrl.control.watchdog import Wait, waits_of
from asyncrl.schema.control import Heartbeat

SLOW_SCORE_S = 10.0
"""From here on an unanswered request for a score is somebody's wait."""


def all_waits(
    heartbeats: Iterable[Heartbeat], flow: Flow, feed: LearnerFeed, peers: Peers, switching: Switching | None, now: float
) -> list[Wait]:
    """Return who waits for what, the controller's own waits for a full step and for a switch among them."""
    waits = waits_of(heartbeats)
    if feed.waiting:
        waits.append(Wait("controller", feed.waiting, feed.waiting_since_s or now))
    if flow.fruitless:
        waits.append(Wait("controller", flow.fruitless, feed.waiting_since_s or now))
    if switching is not None:
        waits += switching.waits()
    held = (switching.why_nothing_goes_out if switching is not None else "") or flow.admission.why_nothing()
    if held and any(wait.who.startswith("generator") for wait in waits):
        waits.append(Wait("admission", held, now))
    kinds: tuple[JudgeKind, ...] = ("reward", "inference")
    if switching is not None and not switching.may_judge:
        kinds = ("reward",)
    return waits + _slow_judges(flow, peers, kinds, now)


def _slow_judges(flow: Flow, peers: Peers, kinds: tuple[JudgeKind, ...], now: float) -> list[Wait]:
    """Return the waits for scores that were asked for long ago, by who owes them."""
    waits = []
    for kind in kinds:
        since_s = flow.desk.open_since_s(kind)
        if since_s is not None and now - since_s > SLOW_SCORE_S:
            names = ", ".join(peer.name for peer in peers.of(kind)) or f"{kind} workers, of which none is there"
            waits.append(Wait("controller", f"{flow.desk.num_open(kind)} answers of {names}", since_s))
    return waits


def queue_depths(flow: Flow) -> dict[str, int]:
    """Return how much is where, by name."""
    counts = flow.buffer.counts()
    return {
        "ready": counts.ready,
        "running": counts.running,
        "scoring": counts.scoring,
        "scores asked for": len(flow.desk),
        "of reward workers": flow.desk.num_open("reward"),
        "of inference workers": flow.desk.num_open("inference"),
    }
