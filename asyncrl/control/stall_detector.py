"""Who waits for whom, and since when: the one line of the live display, and the report of a run in which nothing moves.

A wait is told by the process that waits (its Heartbeat), and by the controller for itself and for its queues. The chain is found
here: from the learner backwards along the data, each link waiting for what the next one should deliver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.control.batch_feeder import BatchFeeder
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.peers import Peers
from asyncrl.control.scoring import JudgeKind
from asyncrl.schema.control import Heartbeat

PATIENCE_WITH_WORK = 6
"""Times the stall time-out, while some process says that it works: a warm start or a long step moves nothing that others see."""
SAMPLING = frozenset({"generated", "scored"})
"""What is no progress while it comes to nothing."""
SLOW_SCORE_S = 10.0
"""From here on an unanswered request for a score is a wait of its own."""
UPSTREAM = ("learner", "controller", "reward", "inference", "generator")
"""Against the flow of the data: each waits for what comes after it, and the last for the first (weights)."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody waits for something."""

    who: str
    what: str
    since_s: float

    def text(self, now: float) -> str:
        """Return it in words: `learner waits for a batch since 14 s`."""
        return f"{self.who} waits for {self.what} since {max(now - self.since_s, 0.0):.0f} s"


@dataclass(frozen=True, slots=True)
class StallReport:
    """Nothing moved for too long."""

    stalled_s: float
    chain: str
    queues: str
    what: str = "nothing moved"

    @property
    def reason(self) -> str:
        """Return the sentence that the run ends with."""
        return f"{self.what} for {self.stalled_s:.0f} s (supervision.stall_timeout_s): {self.chain}; {self.queues}"


def all_waits(
    heartbeats: Iterable[Heartbeat],
    dispatcher: Dispatcher,
    feeder: BatchFeeder,
    peers: Peers,
    now: float,
    *,
    device_waits: Iterable[Wait] = (),
    why_held: str = "",
    judges: Iterable[JudgeKind] = ("reward", "inference"),
) -> list[Wait]:
    """Return who waits for what, the controller's own waits for a full step and for a switch among them.

    Args:
        heartbeats: The newest of every process.
        dispatcher: Asked for scores that are due and for what holds groups back.
        feeder: Asked for the step that is missing.
        peers: Names those who owe scores.
        now: Clock seconds.
        device_waits: Of a switch of a shared device that is under way.
        why_held: Why the placement issues no groups now; else the buffer is asked.
        judges: Who may answer requests for scores now.
    """
    waits = [Wait(beat.name, beat.waiting_for, beat.waiting_since_s) for beat in heartbeats if beat.waiting_for]
    waits += [Wait("controller", what, feeder.waiting_since_s or now) for what in (feeder.waiting, dispatcher.fruitless) if what]
    waits += device_waits
    held = why_held or dispatcher.state.why_nothing_is_issued()
    if held and any(wait.who.startswith("generator") for wait in waits):
        waits.append(Wait("admission", held, now))
    for kind in judges:
        since_s = dispatcher.scores.open_since_s(kind)
        if since_s is not None and now - since_s > SLOW_SCORE_S:
            names = ", ".join(peer.name for peer in peers.of(kind)) or f"{kind} workers, of which none is there"
            waits.append(Wait("controller", f"{dispatcher.scores.num_open(kind)} answers of {names}", since_s))
    return waits


def queue_depths(dispatcher: Dispatcher) -> dict[str, int]:
    """Return how much is where, by name."""
    counts, scores = dispatcher.buffer.counts(), dispatcher.scores
    return {
        "ready": counts.ready,
        "running": counts.running,
        "scoring": counts.scoring,
        "scores asked for": len(scores),
        "of reward workers": scores.num_open("reward"),
        "of inference workers": scores.num_open("inference"),
    }


def working_of(heartbeats: Iterable[Heartbeat]) -> list[str]:
    """Return the names of the processes that say they wait for nothing."""
    return [beat.name for beat in heartbeats if not beat.waiting_for]


def wait_chain(waits: Sequence[Wait], now: float, *, longest: int = 6) -> str:
    """Return the waits as one line, from the learner back along the data, links joined by ` <- `.

    Args:
        waits: Every wait known, in any order.
        now: Clock seconds.
        longest: Links shown; of one kind of process with the same complaint only the one that waits longest is, with a count.
    """
    links: dict[tuple[int, str], list[Wait]] = {}
    for wait in waits:
        links.setdefault((_place(wait.who), wait.what), []).append(wait)
    texts = []
    for (_, _), alike in sorted(links.items(), key=lambda item: (item[0][0], min(wait.since_s for wait in item[1]))):
        first = min(alike, key=lambda wait: wait.since_s)
        others = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
        texts.append(first.text(now) + others)
    shown = texts[:longest] + ([f"{len(texts) - longest} more"] if len(texts) > longest else [])
    return " <- ".join(shown)


def _place(who: str) -> int:
    kind = who.partition("-")[0]
    return UPSTREAM.index(kind) if kind in UPSTREAM else len(UPSTREAM)


class StallDetector:
    """Remembers when something last moved, and reports when nothing has for too long.

    Example:
        >>> detector = StallDetector(stall_timeout_s=600.0, now=0.0)
        >>> detector.moved("trained", now=5.0)
        >>> detector.check(10.0, [], {}) is None
        True
    """

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self._timeout_s = stall_timeout_s
        self._moved_s: dict[str, float] = {}
        self._since_s = now
        self._held = False
        self._fruitless = False

    def moved(self, what: str, now: float) -> None:
        """Note progress: `generated`, `scored`, `trained`, `evaluated`, `live`, whatever tells that the run moves."""
        self._moved_s[what] = now
        if not (self._fruitless and what in SAMPLING):
            self._since_s = max(self._since_s, now)

    def sampling_in_vain(self, in_vain: bool) -> None:
        """While it is, new samples and scores are no progress, and of those at work only the learner buys time."""
        self._fruitless = in_vain

    def hold(self, now: float, *, held: bool) -> None:
        """Stop or restart the count: nothing is expected to move in a paused run."""
        self._held = held
        self._since_s = now

    def check(
        self, now: float, waits: Sequence[Wait], queues: Mapping[str, int], working: Sequence[str] = ()
    ) -> StallReport | None:
        """Return a report when nothing moved for `stall_timeout_s`, else None.

        While somebody says that it works, a stall is one only after PATIENCE_WITH_WORK times as long.

        Args:
            now: Clock seconds.
            waits: Everybody's waits, the controller's own among them.
            queues: Depth by name, `ready`, `running`, `scoring`.
            working: Names of processes that wait for nothing.
        """
        stalled_s = now - self._since_s
        if self._fruitless:
            working = [name for name in working if name.partition("-")[0] == "learner"]
        if self._held or stalled_s <= self._timeout_s * (PATIENCE_WITH_WORK if working else 1):
            return None
        chain = wait_chain(waits, now) or f"nobody says what it waits for; last seen: {self._last_moves(now)}"
        chain += f"; at work, as they say: {', '.join(working)}" if working else ""
        depths = ", ".join(f"{count} {name}" for name, count in queues.items())
        what = "nothing was trained" if self._fruitless else "nothing moved"
        return StallReport(stalled_s, chain, f"queues: {depths or 'none'}", what)

    def _last_moves(self, now: float) -> str:
        moves = sorted(self._moved_s.items(), key=lambda item: item[1])
        return ", ".join(f"{what} {now - at_s:.0f} s ago" for what, at_s in moves) or "nothing at all"
