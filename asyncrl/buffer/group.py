"""Groups: their state and counts, whether a scored group is ready or dropped, which groups a step takes, and their staleness.

A group's deadline is `oldest version + eta`, the last step that may train it. Under `wait`, each step trains exactly B groups.
Then it is not enough that a step takes the groups due at that step, because more than B groups may be due at a later one. A step
must leave, for every later step k', at most `(k' - step) * B` groups due by k' (Hall's condition); admission guarantees that
this is always possible. Taking ready groups in order of deadline achieves it whenever it is possible. So the rule is: earliest
deadline first, unless too few of the groups due by some k' are ready; then wait for those. Proof in docs/buffer.md.

The staleness of a token at step k is k minus its version; the staleness of a sample is that of its oldest trained token. The
in-flight part of a sample's staleness is newest minus oldest version (versions changed while it was generated); the in-queue part
is k minus the newest version.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.algorithms.screening import Member, Screen, objection, trained_members
from asyncrl.buffer import events as ev

MOST_REASONS = 32
OTHER_REASONS = "other reasons"
"""Reason under which further reasons are counted once there are many: error texts may differ each time."""
Policy = Literal["wait", "drop", "mask"]
STALE = "stale"
"""Reason for dropping a group that would exceed eta."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """The buffer's settings."""

    groups_per_step: int
    """B."""
    max_staleness: int
    """Eta."""
    policy: Policy = "wait"
    min_group_members: int = 1
    """Number of scored members that a group needs; at most its size."""
    max_group_retries: int = 3
    """How often a group is handed out again after its generator died, and how often a failed group's prompt is issued again."""
    reissue_dropped: bool = True
    screen: Screen = field(default_factory=Screen)
    """Decides which groups are worth training."""
    max_resamples: int = 20
    """Number of groups that the screen may drop in a row, in multiples of B; then it lets groups pass."""
    max_running_groups: int = 0
    """Maximum number of groups issued and not yet ready; 0: limited only by slots."""
    max_groups: int | None = None
    """Maximum number of groups that may hold a place in the whole run (num_steps x B); None: unlimited."""
    as_needed: bool = False
    """Generate ahead only as far as needed to keep the learner busy, not as far as eta allows."""


@dataclass(slots=True)
class StepRecord:
    """The groups of one step; they never change."""

    step: int
    group_ids: tuple[int, ...]
    mask_below: int
    max_staleness: int = 0
    """Largest staleness of a token that the step trains."""
    trained: bool = False
    trained_before: bool = False
    """Whether it was trained at least once, perhaps by a learner that has gone back to a checkpoint since."""


class GroupsRestored(ev.BufferEvent, frozen=True):
    """Event: the contents of a ledger. If it comes, it is the machine's first event."""

    groups: tuple[Group, ...]
    """Running, scoring and ready groups, by id."""
    steps: tuple[StepRecord, ...]
    """Steps that may be repeated."""
    next_group_id: int
    dropped: dict[str, int]
    """Groups by reason; so are those that failed."""
    failed: dict[str, int]
    returned: dict[int, int]
    """As `BufferState.returned`."""
    forgotten_steps: int
    """Steps before this one cannot be repeated."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Groups per state; `issued` is the sum of all others."""

    issued: int = 0
    running: int = 0
    scoring: int = 0
    ready: int = 0
    taken: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason; so are those that failed."""
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Return the number of places held: all groups except dropped and failed ones."""
        return self.running + self.scoring + self.ready + self.taken + self.trained

    @property
    def total(self) -> int:
        """Return the sum over all states, which must equal `issued`."""
        return self.held + sum(self.dropped.values()) + sum(self.failed.values())


def count_reason(counts: Counter[str], reason: str, num_groups: int = 1) -> None:
    """Count groups by reason; once there are many reasons, groups with new reasons are counted together."""
    known = reason in counts or len(counts) < MOST_REASONS
    counts[reason if known else OTHER_REASONS] += num_groups


@dataclass(slots=True)
class Group:
    """A live group: running, scoring or ready."""

    group_id: int
    prompt_id: str
    size: int
    version: int
    """The version live on the generator when the group was issued; no token of the group is older."""
    generator: str = ""
    """The generator that generates it now; empty if there is none."""
    attempt: int = 0
    holders: dict[int, str] = field(default_factory=dict)
    """The generator of each attempt, since this controller started."""
    losses: int = 0
    """Number of generators that died while they held it."""
    retries: int = 0
    """Number of failed groups that had this prompt before."""
    external: bool = False
    state: ev.GroupState = "running"
    members: list[ev.MemberState] = field(default_factory=list)
    version_counts: list[ev.VersionCounts | None] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    """Rewards of scored members."""
    truncated: set[int] = field(default_factory=set)
    """Members cut off by the length limit."""
    trained: tuple[int, ...] | None = None
    """Members whose tokens will be trained; None before the group is ready."""
    ready_s: float = 0.0
    last_failure: str = ""
    oldest: int = 0
    """Oldest version in the members that may be trained (once ready: that are trained); `version` until all are generated."""
    newest: int = 0

    def __post_init__(self) -> None:
        if not self.members:
            self.members = ["pending"] * self.size
            self.version_counts = [None] * self.size
        if self.generator:
            self.holders[self.attempt] = self.generator
        self.refresh_age()

    @property
    def pending(self) -> tuple[int, ...]:
        """Return the members still to be generated."""
        return tuple(index for index, state in enumerate(self.members) if state == "pending")

    @property
    def unscored(self) -> tuple[int, ...]:
        """Return the members generated and not yet scored."""
        return tuple(index for index, state in enumerate(self.members) if state == "generated")

    @property
    def scored(self) -> tuple[int, ...]:
        """Return the members that have a reward."""
        return tuple(index for index, state in enumerate(self.members) if state == "scored")

    @property
    def judged(self) -> tuple[Member, ...]:
        """Return the scored members in the form that screening needs."""
        return tuple(Member(index, self.rewards.get(index, 0.0), index in self.truncated) for index in self.scored)

    def settle(self, judged: Sequence[Member], screen: Screen) -> None:
        """Set which of the scored members are trained, and their oldest and newest version."""
        self.trained = trained_members(judged, screen)
        self.refresh_age()

    def refresh_age(self) -> None:
        """Compute `oldest` and `newest` again."""
        held = [
            counts
            for index, counts in enumerate(self.version_counts)
            if counts and (self.members[index] != "failed" if self.trained is None else index in self.trained)
        ]
        self.newest = max([counts[-1][0] for counts in held], default=self.version)
        oldest = min([counts[0][0] for counts in held], default=self.version)
        self.oldest = min(oldest, self.version) if "pending" in self.members else oldest

    def is_fit(self, step: int, limits: BufferLimits) -> bool:
        """Return whether a ready group has tokens to train at a step that the staleness bound allows."""
        age = self.newest if limits.policy == "mask" else self.oldest
        return bool(self.trained) and age >= step - limits.max_staleness


def choose(step: int, live: Iterable[Group], num_ready: int, limits: BufferLimits) -> tuple[int, ...] | ev.Wait:
    """Return the groups of `step`, in ascending order, or what the step waits for.

    Args:
        step: The next step.
        live: All running, scoring and ready groups; every ready group is fit for this step.
        num_ready: How many of them are ready. This is called often: groups are examined only if enough are ready.
        limits: B, eta and the policy are read.
    """
    size = limits.groups_per_step
    if num_ready < size:
        return ev.Wait(step, f"{num_ready} of {size} groups are ready for step {step}")
    ready, unfinished = list[tuple[int, int]](), list[tuple[int, int]]()
    for group in live:  # oldest version first, which is the earliest deadline, then in order of issue
        (ready if group.state == "ready" else unfinished).append((group.oldest, group.group_id))
    if limits.policy == "wait":
        # Steps left until the deadline, to groups. Those past it are left out: nobody can wait for them.
        last_step = limits.max_staleness - step
        due_ready, due_unfinished = (
            Counter(slack for oldest, _ in groups if (slack := oldest + last_step) >= 0) for groups in (ready, unfinished)
        )
        num_due = num_unfinished = 0
        for slack in sorted(due_ready.keys() | due_unfinished.keys()):  # of the others none asks for more than the one before it
            num_due += due_ready[slack]
            num_unfinished += due_unfinished[slack]
            if num_due < min(num_due + num_unfinished - slack * size, size):
                groups = f"{num_unfinished} group{'s' * (num_unfinished > 1)} not finished yet"
                reason = f"step {step} must leave room for {groups} that must be trained by step {step + slack}"
                return ev.Wait(step, reason if slack else f"step {step} is the last chance of {groups}")
    return tuple(sorted(group_id for _, group_id in sorted(ready)[:size]))


def judge(group: Group, limits: BufferLimits, num_in_row: int) -> tuple[str, int, list[ev.BufferInstruction]]:
    """Decide about a group whose last member is scored: it is ready, or dropped because it gives no training signal.

    Without preferences, at most `max_resamples` x B groups are dropped in a row; then every group becomes ready, until the screen
    accepts one. A group without a preference pair is never ready, since a step of such groups could not be trained. A run that
    finds no pair continues sampling, warns at every further `max_resamples` x B, and is ended by the stall detector.

    Args:
        group: Its trained members are set here.
        limits: `screen`, `max_resamples` and `groups_per_step` are read.
        num_in_row: Number of groups refused in a row before this one.

    Returns:
        Why it must be dropped (empty: it is ready), `num_in_row` including this group, and instructions for warnings.
    """
    judged, most = group.judged, limits.max_resamples * limits.groups_per_step
    group.settle(judged, limits.screen)
    if not (reason := objection(judged, limits.screen)):
        return "", 0, []
    num_in_row += 1
    if limits.screen.preference is not None:
        return reason, num_in_row, [] if num_in_row % most else [ev.ScreenStands(group.group_id, reason, num_in_row)]
    if num_in_row <= most:
        return reason, num_in_row, []
    return "", num_in_row, [ev.ScreenLifted(group.group_id, reason, most)] if num_in_row == most + 1 else []


def staleness_figures(
    step: int, samples: Iterable[ev.VersionCounts], *, mask_below: int = 0, queue_s: Sequence[float] = ()
) -> ev.StalenessFigures:
    """Return the staleness of the trained tokens of a step.

    Args:
        step: The optimizer step, which trains version `step`.
        samples: Version counts of every scored sample of the step.
        mask_below: Tokens of versions below this one are masked.
        queue_s: How long each group was ready before it was taken, in seconds.
    """
    tokens, num_masked = Counter[int](), 0
    oldest, in_flight, in_queue = list[int](), list[int](), list[int]()
    for counts in samples:
        num_masked += sum(count for version, count in counts if version < mask_below)
        if trained := [pair for pair in counts if pair[0] >= mask_below]:
            for version, count in trained:
                tokens[step - version] += count
            first, last = trained[0][0], trained[-1][0]
            oldest.append(step - first)
            in_flight.append(last - first)
            in_queue.append(step - last)
    num_tokens, num_samples = tokens.total(), max(len(oldest), 1)
    metrics = {
        "staleness/masked_tokens": float(num_masked),
        "staleness/token_mean": sum(age * count for age, count in tokens.items()) / max(num_tokens, 1),
        "staleness/token_max": float(max(tokens, default=0)),
        "staleness/mean": sum(oldest) / num_samples,
        "staleness/max": float(max(oldest, default=0)),
        "staleness/in_flight_mean": sum(in_flight) / num_samples,
        "staleness/in_flight_max": float(max(in_flight, default=0)),
        "staleness/in_queue_mean": sum(in_queue) / num_samples,
        "staleness/in_queue_max": float(max(in_queue, default=0)),
        "queue/wait_mean_s": sum(queue_s) / max(len(queue_s), 1),
        "queue/wait_max_s": max(queue_s, default=0.0),
    }
    metrics |= {f"staleness/histogram/{age}": count / num_tokens for age, count in sorted(tokens.items())}
    return ev.StalenessFigures(len(oldest), num_tokens, max(tokens, default=0), metrics)
