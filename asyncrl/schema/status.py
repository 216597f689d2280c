"""The run's reports about itself, and requests of outside code to it."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncrl.schema.samples import Member, Prompt, Sample, ScoredGroup, Scores

Phase = Literal["starting", "warming", "evaluating", "running", "paused", "draining", "stopped", "failed"]

SCREENED: frozenset[str] = frozenset({"no spread", "no pair", "truncated"})
"""Reasons to drop a group that the config asks for."""
RELEASED = "released by its caller"
INTENDED = SCREENED | {RELEASED}
"""Reasons to drop a group that are no loss."""

ENDED: frozenset[str] = frozenset({"stopped", "failed"})
"""Phases after which nothing happens any more."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process of the run."""

    name: str
    kind: str
    pid: int
    """0 until it has one."""
    state: str
    """starting, ready, restarting or dead."""
    deaths: int = 0
    waiting_for: str = ""
    """Empty while it works."""
    waiting_s: float = 0.0
    joined: bool = False
    """A generator that the run did not start (`asyncrl join`)."""
    last_death: str = ""
    """Why it died last; empty if it never died."""


OVER_LIMIT = "over limit"
"""`FailureSeen.stage` of samples on which a reward exceeded time or memory: they score 0 and do not fail."""


class FailureSeen(msgspec.Struct, frozen=True):
    """One kind of failure of samples."""

    kind: str
    """Type and place of the exception, `TypeError at rewards.py:3`."""
    stage: str
    """`generate`, `reward` or OVER_LIMIT."""
    count: int
    """Number of samples that failed in this way, since this controller started."""
    reason: str
    """Reason of the first one, as text."""
    trace: str = ""
    """Its traceback, where there is one."""


AlarmLevel = Literal["info", "warning", "error"]


class Alarm(msgspec.Struct, frozen=True):
    """An alarm that was raised, or has ended."""

    rule: str
    level: AlarmLevel
    version: int
    """The version at which it was raised, or ended."""
    value: float
    threshold: float
    text: str
    """What was observed, and what to do about it."""
    is_over: bool = False


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at one moment."""

    name: str
    run_folder: str
    phase: str
    reason: str = ""
    """Why it ended, or why it is in this phase."""
    resumed: str = ""
    """For a resumed run, once its learner is ready: a text with the step and the checkpoint it resumed from."""
    version: int = -1
    """Newest policy version; -1 before the learner is ready."""
    num_steps: int = 0
    groups: dict[str, int] = {}
    """Ledger counts by state, and `issued`, their sum."""
    dropped: dict[str, int] = {}
    """Groups dropped or failed, by reason."""
    without_place: int = 0
    """Number of requested groups that cannot be issued, because the caller holds all places."""
    failed_share: float = 0.0
    """Share of failed groups among the newest 64 groups that were completed or failed."""
    over_limit_share: float = 0.0
    """Share of the newest 256 scored samples on which a reward exceeded time or memory, which scores 0."""
    failures: tuple[FailureSeen, ...] = ()
    """Kinds of failure so far, in the order of their first occurrence."""
    set_aside: tuple[str, ...] = ()
    """Ids of prompts that are not issued again, because they failed too often."""
    alarms: tuple[Alarm, ...] = ()
    """Active alarms (docs/observability.md)."""
    processes: tuple[ProcessStatus, ...] = ()
    waiting: str = ""
    """Which process waits for what, in one line; empty while nothing is stuck."""
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    """Sampled accuracy on held-out prompts, of version 0 and of the newest later version; None where no rule judges."""
    checkpoint: str = ""
    """Folder of the newest complete checkpoint."""
    refused_messages: int = 0
    refused_samples: int = 0
    uptime_s: float = 0.0
    guests: dict[str, int] = {}
    """Joined generators: `here`, `most`, `came`, `left` in good order, `lost`; empty where none may join."""


class ExternalGroup(msgspec.Struct, frozen=True):
    """Samples of one prompt that outside code generated itself; checked and scored like any other.

    Group id and attempt of the samples are ignored; the run gives its own.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]


class SubmitResult(msgspec.Struct, frozen=True):
    """Result of submitting an `ExternalGroup`."""

    group_id: int
    """The new group's id; -1 if it was refused."""
    refused: str = ""
    """Why it was refused; empty if it was not."""


class Judged(msgspec.Struct, frozen=True):
    """Scores of a program that scores samples itself, and whether it wants more samples."""

    caller: str
    """The program's own unique name."""
    answers: tuple[Scores, ...] = ()
    held: tuple[Member, ...] = ()
    """The first member of every request that it has not answered."""
    wants: bool = True


class GroupAsked(msgspec.Struct, frozen=True):
    """One group that a caller requests."""

    number: int
    """Number within its stream; the same number means the same group."""
    prompt: Prompt | None = None
    """None: given in an earlier request."""
    size: int = 0
    """Members; 0: as the config says."""
    max_new_tokens: int = 0
    """Of each; 0: the config's."""
    is_followed: bool = False
    """Whether its tokens are sent as they are generated."""


class GroupsAsked(msgspec.Struct, frozen=True):
    """The groups that a caller waits for, from one stream of its own, in the order in which it needs them."""

    stream: str
    """The caller's name for the stream, never used twice."""
    groups: tuple[GroupAsked, ...]
    at_least: int = 1
    """For how many of these groups, from the first on, the request waits."""


class GroupGiven(msgspec.Struct, frozen=True):
    """Result for a requested group."""

    group: ScoredGroup | None
    why_over: str = ""
    """Why there is no group; empty if there is one."""


class Released(msgspec.Struct, frozen=True):
    """Groups that a caller will not train: those of a stream, or single groups."""

    stream: str = ""
    groups: tuple[int, ...] = ()
    first: int = 0
    """Number of the stream's first group to release; its earlier groups are kept."""


class ApiEndpoint(msgspec.Struct, frozen=True):
    """How to reach a run's HTTP API; `api.json` in the run folder, mode 0600."""

    url: str
    token: str
    pid: int
    """Of the controller."""
    machine: str = ""
    """Its hostname."""
