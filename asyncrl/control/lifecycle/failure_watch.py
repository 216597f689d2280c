"""Failures of samples and groups: counted by kind, told once each, and ending a run that cannot succeed.

A kind is the type and place of what was raised (`errors.kind_of`), never its message: one cause is one kind. Pure: no clock, no
IO. The controller feeds it and acts on `verdict`.

Invariants: a kind is news once; memory is bounded whatever fails; the verdict, once there, stays.
"""

from __future__ import annotations

from collections import Counter, deque

from msgspec.structs import replace

from asyncrl.schema.status import OVER_LIMIT, FailureSeen

WINDOW_GROUPS, WINDOW_SAMPLES = 64, 256
"""Newest groups over which the share of failed ones is taken, and scored samples over which that of those over a limit is."""
MOST_KINDS = 64
"""Kinds counted apart; further ones are counted together."""
OTHER_KINDS = "other kinds"
FIRST_GROUPS, FIRST_SAMPLES = 4, 16
"""So many groups and samples, failed before a single sample was scored, are enough to end a run."""
MOST_PROMPT_FAILURES = 4
"""A prompt whose groups failed so often is set aside."""


class FailureWatch:
    """Counts of failures, and what follows from them.

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
        """What failed, by kind, in the order of the first of each."""
        self.set_aside: dict[str, str] = {}
        """Prompts that are not issued again, by id, and the kind of their last failure."""
        self.verdict = ""
        """Empty, or why the run must end."""
        self._max_failed_share = max_failed_share
        self._window: deque[bool] = deque(maxlen=WINDOW_GROUPS)
        self._prompt_failures: Counter[str] = Counter()
        self._over_limit: deque[bool] = deque(maxlen=WINDOW_SAMPLES)
        self._any_scored = False
        self.num_failed_samples = self.num_over_limit = 0
        self._num_failed_groups = 0

    @property
    def share(self) -> float:
        """Return the share of failed groups among the newest that were completed or failed; 0 before there is one."""
        return sum(self._window) / len(self._window) if self._window else 0.0

    @property
    def over_limit_share(self) -> float:
        """Return the share of the newest scored samples that made a reward run out of time or memory; 0 before there is one."""
        return sum(self._over_limit) / len(self._over_limit) if self._over_limit else 0.0

    def sample_scored(self, over_limit: str = "") -> bool:
        """Note a sample that has its reward.

        Args:
            over_limit: As `Score.over_limit`. Such a sample scores 0 and is not failed, but a run of them alone learns nothing.

        Returns:
            Whether it is the first over this limit: to be told.
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
            kind: Type and place; empty: the reason stands for it.
            reason: In words.
            trace: The traceback, where there is one.

        Returns:
            Whether it is the first of its kind: to be told.
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

    def group_completed(self) -> None:
        """Note a group whose members are scored, whatever becomes of it."""
        self._window.append(False)

    def group_failed(self, prompt_id: str, kind: str) -> bool:
        """Note a group that failed; return whether its prompt is set aside with that."""
        self._window.append(True)
        self._num_failed_groups += 1
        most = max(self.kinds.values(), key=lambda seen: seen.count, default=None)
        said = f": {kind}"
        if most is not None:
            said = f"; most often at {most.stage}: {next(iter((most.reason or most.kind).splitlines()), 'no reason given')}"
        if self.verdict:
            pass
        elif not self._any_scored and self._num_failed_groups >= FIRST_GROUPS and self.num_failed_samples >= FIRST_SAMPLES:
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
