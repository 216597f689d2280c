"""Detects runs that cannot succeed: too many failed samples and groups, counted by kind, or a run without progress.

Each process reports its own wait (in its Heartbeat); the controller reports its own waits and those of its queues. The chain of
waits goes from the learner back along the data; each link waits for what the next one should deliver.

A kind of failure is the type and place of the exception (`errors.kind_of`), never its message: one cause is one kind. Pure: no
clock, no IO. The controller calls both classes and acts on their results.

Invariants: each kind is reported once; memory is bounded whatever fails; a verdict never changes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from asyncrl.schema.status import OVER_LIMIT, FailureSeen

WINDOW_GROUPS, WINDOW_SAMPLES = 64, 256
"""Number of newest groups for the share of failed groups, and of newest scored samples for the share over a limit."""
MOST_KINDS = 64
"""Maximum number of kinds counted separately; further kinds are counted together."""
OTHER_KINDS = "other kinds"
FIRST_GROUPS, FIRST_SAMPLES = 4, 16
"""If this many groups and samples failed before any sample was scored, the run is ended."""
MOST_PROMPT_FAILURES = 4
"""A prompt is set aside after this many failed groups in a row."""
CALLER_HOLDS = "its caller to train or release groups"
"""What admission waits for if a caller's groups hold all places."""
PATIENCE_WITH_WORK = 6
"""Factor on the stall time-out while some process reports that it works: a warm start or a long step shows no other progress."""
SAMPLING = frozenset({"generated", "scored"})
"""These do not count as progress while no group of theirs can be trained."""
SLOW_SCORE_S = 10.0
"""After this time an unanswered request for a score is reported as a wait."""
UPSTREAM = ("learner", "controller", "reward", "inference", "generator")
"""Processes against the flow of data: each waits for the next one in this list, and the last for the first (weights)."""
MOST_LINKS = 6
SILENT_AFTER_BEATS = 10
"""After this many missing heartbeats a process counts as silent, and what it last waited for is not shown."""


class FailureWatch:
    """Counts failures, and decides whether the run must end.

    Args:
        max_failed_share: `supervision.max_failed_share`.

    Example:
        >>> watch = FailureWatch(0.5)
        >>> watch.sample_failed("reward", "TypeError at rewards.py:3", "score: TypeError: ...", "Traceback ...")
        True
        >>> watch.share
        0.0
    """

    def __init__(self, max_failed_share: float) -> None:
        self.kinds: dict[str, FailureSeen] = {}
        """Failures by kind, in the order of their first occurrence."""
        self.set_aside: dict[str, str] = {}
        """Prompts that are not issued again, by id, and the kind of their last failure."""
        self.verdict = ""
        """Why the run must end; empty if it need not."""
        self._max_failed_share = max_failed_share
        self._window: deque[bool] = deque(maxlen=WINDOW_GROUPS)
        self._prompt_failures: Counter[str] = Counter()
        """Number of failed groups of each prompt since its last completed group."""
        self._over_limit: deque[bool] = deque(maxlen=WINDOW_SAMPLES)
        self._any_scored = False
        self.num_failed_samples = self.num_over_limit = 0

    @property
    def share(self) -> float:
        """Return the share of failed groups among the newest that were completed or failed; 0 before there is one."""
        return sum(self._window) / len(self._window) if self._window else 0.0

    @property
    def over_limit_share(self) -> float:
        """Return the share of the newest scored samples for which a reward exceeded time or memory; 0 before there is one."""
        return sum(self._over_limit) / len(self._over_limit) if self._over_limit else 0.0

    def sample_scored(self, over_limit: str = "") -> bool:
        """Note a sample that has its reward.

        Args:
            over_limit: As `Score.over_limit`. Such a sample scores 0 and does not fail, but a run with only such samples learns
                nothing.

        Returns:
            Whether it is the first over this limit, which must be logged.
        """
        self._over_limit.append(bool(over_limit))
        if not over_limit:
            self._any_scored = True
            return False
        self.num_over_limit += 1
        is_new = self._count(OVER_LIMIT, over_limit, over_limit, "")
        num_first = self.num_failed_samples + self.num_over_limit
        if not self.verdict and not self._any_scored and num_first >= FIRST_SAMPLES:
            self.verdict = f"all of the first {num_first} samples failed or ran over a limit; the last: {over_limit}"
        elif not self.verdict and len(self._over_limit) == WINDOW_SAMPLES and self.over_limit_share > self._max_failed_share:
            self.verdict = (
                f"{sum(self._over_limit)} of the last {WINDOW_SAMPLES} samples ran over a limit of their reward, more than "
                f"supervision.max_failed_share ({self._max_failed_share:g}) allows; the last: {over_limit}"
            )
        return is_new

    def sample_failed(self, stage: str, kind: str, reason: str, trace: str = "") -> bool:
        """Count a failed sample.

        Args:
            stage: `generate` or `reward`.
            kind: Type and place; empty: the reason is used.
            reason: As text.
            trace: The traceback, if there is one.

        Returns:
            Whether it is the first of its kind, which must be logged.
        """
        self.num_failed_samples += 1
        return self._count(stage, kind or reason, reason, trace)

    def _count(self, stage: str, kind: str, reason: str, trace: str) -> bool:
        if kind not in self.kinds and len(self.kinds) >= MOST_KINDS:
            kind, reason, trace = OTHER_KINDS, f"more than {MOST_KINDS} kinds of failure", ""
        is_new = kind not in self.kinds
        seen = FailureSeen(kind=kind, stage=stage, count=0, reason=reason, trace=trace) if is_new else self.kinds[kind]
        self.kinds[kind] = replace(seen, count=seen.count + 1)
        return is_new

    def group_completed(self, prompt_id: str) -> None:
        """Note a group whose members are scored, whether it is trained or not."""
        self._window.append(False)
        self._prompt_failures.pop(prompt_id, None)

    def group_failed(self, prompt_id: str, kind: str) -> bool:
        """Note a failed group; return whether its prompt is now set aside."""
        self._window.append(True)
        most = max(self.kinds.values(), key=lambda seen: seen.count, default=None)
        said = f": {kind}"
        if most is not None:
            said = f"; most often at {most.stage}: {next(iter((most.reason or most.kind).splitlines()), 'no reason given')}"
        if self.verdict:
            pass
        elif not self._any_scored and sum(self._window) >= FIRST_GROUPS and self.num_failed_samples >= FIRST_SAMPLES:
            self.verdict = f"all of the first {self.num_failed_samples} samples failed{said}"
        elif len(self._window) == WINDOW_GROUPS and self.share > self._max_failed_share:
            self.verdict = (
                f"{sum(self._window)} of the last {WINDOW_GROUPS} groups failed, more than supervision.max_failed_share "
                f"({self._max_failed_share:g}) allows{said}"
            )
        self._prompt_failures[prompt_id] += 1
        if self._prompt_failures[prompt_id] < MOST_PROMPT_FAILURES:
            return False
        del self._prompt_failures[prompt_id]
        self.set_aside[prompt_id] = kind
        return True


# -- stalls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wait:
    """A process, and what it waits for."""

    who: str
    what: str
    """Empty: it has sent no heartbeat since then."""
    since_s: float


def wait_chain(waits: Sequence[Wait], now: float) -> str:
    """Return the waits as one line, from the learner back along the data, links joined by ` <- `, silent processes last.

    If several processes of one kind wait for the same, only the longest wait is shown, with a count.
    """
    places = {kind: place for place, kind in enumerate(UPSTREAM)}
    links: dict[tuple[int, str], list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since_s):
        place = places.get(wait.who.partition("-")[0], len(UPSTREAM)) if wait.what else len(UPSTREAM) + 1
        links.setdefault((place, wait.what), []).append(wait)
    texts = [
        f"{first.who} {f'waits for {first.what}' if first.what else 'has sent no heartbeat'} since "
        f"{max(now - first.since_s, 0.0):.0f} s" + (f" (and {len(more)} more)" if more else "")
        for _, (first, *more) in sorted(links.items(), key=lambda link: link[0][0])
    ]
    return " <- ".join(texts[:MOST_LINKS] + ([f"{len(texts) - MOST_LINKS} more"] if len(texts) > MOST_LINKS else []))


class StallDetector:
    """Remembers the last progress, and reports when there was none for too long.

    Example:
        >>> detector = StallDetector(stall_timeout_s=600.0, now=0.0)
        >>> detector.moved("trained", now=5.0)
        >>> detector.check(10.0, [], {})
        ''
    """

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self.in_vain = False
        """While set, new samples and scores do not count as progress, and only a working learner extends the time-out."""
        self._timeout_s = stall_timeout_s
        self._moved_s: dict[str, float] = {}
        self._since_s = now
        self._held = False

    def moved(self, what: str, now: float) -> None:
        """Note progress, such as `generated`, `scored`, `trained`, `evaluated` or `live`."""
        self._moved_s[what] = now
        if not (self.in_vain and what in SAMPLING):
            self._since_s = max(self._since_s, now)

    def hold(self, now: float, *, held: bool) -> None:
        """Stop or restart the time-out: a paused run makes no progress."""
        self._held = held
        self._since_s = now

    def check(
        self,
        now: float,
        waits: Sequence[Wait],
        queues: Mapping[str, int],
        working: Sequence[str] = (),
        *,
        is_warming: bool = False,
    ) -> str:
        """Return the reason to end the run if there was no progress for `stall_timeout_s`, else nothing.

        While a process reports that it works, and while models are loaded, the time-out is PATIENCE_WITH_WORK times as long.

        Args:
            now: Clock seconds.
            waits: The waits of all processes, including the controller.
            queues: Depth of queues by name: `ready`, `running`, `scoring`.
            working: Names of processes that wait for nothing, or are being started again.
            is_warming: Whether models are being loaded.
        """
        stalled_s = now - self._since_s
        if self.in_vain:
            working = [name for name in working if name.startswith("learner")]
        if self._held or stalled_s <= self._timeout_s * (PATIENCE_WITH_WORK if working or is_warming else 1):
            return ""
        moves = sorted(self._moved_s.items(), key=lambda item: item[1])
        last = ", ".join(f"{what} {now - at_s:.0f} s ago" for what, at_s in moves) or "nothing at all"
        chain = wait_chain(waits, now) or f"nobody says what it waits for; last seen: {last}"
        chain += f"; at work or starting: {', '.join(working)}" if working else ""
        depths = ", ".join(f"{count} {name}" for name, count in queues.items()) or "none"
        what = "nothing was trained" if self.in_vain else "nothing moved"
        return f"{what} for {stalled_s:.0f} s (supervision.stall_timeout_s): {chain}; queues: {depths}"
