"""Who waits for whom, and since when: the one line of the live display, and the report of a run in which nothing moves.

A wait is told by the process that waits (its Heartbeat), and by the controller for itself and for its queues. The chain goes from
the learner backwards along the data, each link waiting for what the next one should deliver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CALLER_HOLDS = "its caller to train or release groups"
"""What admission waits for where groups that a caller holds have all places."""
PATIENCE_WITH_WORK = 6
"""Times the stall time-out, while some process says that it works: a warm start or a long step moves nothing that others see."""
SAMPLING = frozenset({"generated", "scored"})
"""What is no progress while it comes to nothing."""
SLOW_SCORE_S = 10.0
"""From here on an unanswered request for a score is a wait of its own."""
UPSTREAM = ("learner", "controller", "reward", "inference", "generator")
"""Against the flow of the data: each waits for what comes after it, and the last for the first (weights)."""
MOST_LINKS = 6


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody waits for something."""

    who: str
    what: str
    since_s: float


def wait_chain(waits: Sequence[Wait], now: float) -> str:
    """Return the waits as one line, from the learner back along the data, links joined by ` <- `.

    Of one kind of process with the same complaint only the one that waits longest is shown, with a count.
    """
    links: dict[tuple[int, str], list[Wait]] = {}
    for wait in waits:
        kind = wait.who.partition("-")[0]
        links.setdefault((UPSTREAM.index(kind) if kind in UPSTREAM else len(UPSTREAM), wait.what), []).append(wait)
    firsts = [(place, min(alike, key=lambda wait: wait.since_s), len(alike) - 1) for (place, _), alike in links.items()]
    firsts.sort(key=lambda item: (item[0], item[1].since_s))
    texts = [
        f"{wait.who} waits for {wait.what} since {max(now - wait.since_s, 0.0):.0f} s" + (f" (and {more} more)" if more else "")
        for _, wait, more in firsts
    ]
    return " <- ".join(texts[:MOST_LINKS] + ([f"{len(texts) - MOST_LINKS} more"] if len(texts) > MOST_LINKS else []))


class StallDetector:
    """Remembers when something last moved, and reports when nothing has for too long.

    Example:
        >>> detector = StallDetector(stall_timeout_s=600.0, now=0.0)
        >>> detector.moved("trained", now=5.0)
        >>> detector.check(10.0, [], {})
        ''
    """

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self.in_vain = False
        """While it is set, new samples and scores are no progress, and of those at work only the learner buys time."""
        self._timeout_s = stall_timeout_s
        self._moved_s: dict[str, float] = {}
        self._since_s = now
        self._held = False

    def moved(self, what: str, now: float) -> None:
        """Note progress: `generated`, `scored`, `trained`, `evaluated`, `live`, whatever tells that the run moves."""
        self._moved_s[what] = now
        if not (self.in_vain and what in SAMPLING):
            self._since_s = max(self._since_s, now)

    def hold(self, now: float, *, held: bool) -> None:
        """Stop or restart the count: nothing is expected to move in a paused run."""
        self._held = held
        self._since_s = now

    def check(self, now: float, waits: Sequence[Wait], queues: Mapping[str, int], working: Sequence[str] = ()) -> str:
        """Return the sentence that the run ends with when nothing moved for `stall_timeout_s`, else nothing.

        While somebody says that it works, a stall is one only after PATIENCE_WITH_WORK times as long.

        Args:
            now: Clock seconds.
            waits: Everybody's waits, the controller's own among them.
            queues: Depth by name, `ready`, `running`, `scoring`.
            working: Names of processes that wait for nothing.
        """
        stalled_s = now - self._since_s
        if self.in_vain:
            working = [name for name in working if name.startswith("learner")]
        if self._held or stalled_s <= self._timeout_s * (PATIENCE_WITH_WORK if working else 1):
            return ""
        moves = sorted(self._moved_s.items(), key=lambda item: item[1])
        last = ", ".join(f"{what} {now - at_s:.0f} s ago" for what, at_s in moves) or "nothing at all"
        chain = wait_chain(waits, now) or f"nobody says what it waits for; last seen: {last}"
        chain += f"; at work, as they say: {', '.join(working)}" if working else ""
        depths = ", ".join(f"{count} {name}" for name, count in queues.items()) or "none"
        what = "nothing was trained" if self.in_vain else "nothing moved"
        return f"{what} for {stalled_s:.0f} s (supervision.stall_timeout_s): {chain}; queues: {depths}"
