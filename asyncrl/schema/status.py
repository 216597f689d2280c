"""What a run says about itself to whoever asks, and what outside code hands to it."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncrl.schema.samples import Member, Prompt, Sample, ScoredGroup, Scores

Phase = Literal["starting", "warming", "evaluating", "running", "paused", "draining", "stopped", "failed"]

SCREENED: frozenset[str] = frozenset({"no spread", "no pair", "truncated"})
"""Reasons to drop a group that the config asks for."""

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


OVER_LIMIT = "over limit"
"""`FailureSeen.stage` of samples that made a reward run out of time or memory: they score 0 and are not failed."""


class FailureSeen(msgspec.Struct, frozen=True):
    """One kind of failure of samples."""

    kind: str
    """Type and place of what was raised, `TypeError at rewards.py:3`."""
    stage: str
    """`generate`, `reward` or OVER_LIMIT."""
    count: int
    """Samples that failed so, since this controller began."""
    reason: str
    """Of the first, in words."""
    trace: str = ""
    """Its traceback, where there is one."""


AlarmLevel = Literal["info", "warning", "error"]


class Alarm(msgspec.Struct, frozen=True):
    """An alarm that was raised, or has ended."""

    rule: str
    level: AlarmLevel
    version: int
    """At which it was raised, or ended."""
    value: float
    threshold: float
    text: str
    """What is seen, and what to do about it."""
    is_over: bool = False


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    name: str
    run_folder: str
    phase: str
    reason: str = ""
    """Why it ended, or why it is in this phase."""
    resumed: str = ""
    """Of a resumed run, once its learner is ready: at which step, from which checkpoint, in words."""
    version: int = -1
    """Newest policy version; -1 before the learner is ready."""
    num_steps: int = 0
    groups: dict[str, int] = {}
    """Ledger counts by state, and `issued`, their sum."""
    dropped: dict[str, int] = {}
    """Groups dropped or failed, by reason."""
    without_place: int = 0
    """Groups that a caller asks for and that cannot be issued: it holds all places."""
    failed_share: float = 0.0
    """Of the newest 64 groups that were completed or failed, the share that failed."""
    over_limit_share: float = 0.0
    """Of the newest 256 samples that were scored, the share that made a reward run out of time or memory, which scores 0."""
    failures: tuple[FailureSeen, ...] = ()
    """Kinds of failure so far, in the order of the first of each."""
    set_aside: tuple[str, ...] = ()
    """Ids of prompts that failed so often that they are not issued again."""
    alarms: tuple[Alarm, ...] = ()
    """Those that stand (docs/observability.md)."""
    processes: tuple[ProcessStatus, ...] = ()
    waiting: str = ""
    """Who waits for whom, in one line; empty while everything moves."""
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    """Sampled accuracy on held-out prompts, first and newest evaluation; None where no rule judges."""
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
    """What became of an `ExternalGroup`."""

    group_id: int
    """-1 where it was refused."""
    refused: str = ""
    """Empty, or why."""


class Judged(msgspec.Struct, frozen=True):
    """What a program that judges samples itself has done, and whether it wants more to judge."""

    caller: str
    """A name of its own."""
    answers: tuple[Scores, ...] = ()
    held: tuple[Member, ...] = ()
    """The first member of every request that it has not answered."""
    wants: bool = True


class GroupAsked(msgspec.Struct, frozen=True):
    """One group that a caller asks for."""

    number: int
    """Within its stream; the same number is the same group."""
    prompt: Prompt | None = None
    """None: as it was said before."""
    size: int = 0
    """Members; 0: as the config says."""
    max_new_tokens: int = 0
    """Of each; 0: the config's."""
    is_followed: bool = False
    """Its tokens are told as they come."""


class GroupsAsked(msgspec.Struct, frozen=True):
    """What a caller waits for: groups of a stream of its own, in the order in which it wants them."""

    stream: str
    """The caller's own name for it, never used twice."""
    groups: tuple[GroupAsked, ...]
    at_least: int = 1
    """How many of the first to wait for."""


class GroupGiven(msgspec.Struct, frozen=True):
    """What became of a group that was asked for."""

    group: ScoredGroup | None
    why_over: str = ""
    """Why there is none."""


class Released(msgspec.Struct, frozen=True):
    """What a caller will not train: a stream with all its groups, or single groups."""

    stream: str = ""
    groups: tuple[int, ...] = ()


class ApiEndpoint(msgspec.Struct, frozen=True):
    """How to reach a run's HTTP API; `api.json` in the run folder, mode 0600."""

    url: str
    token: str
    pid: int
    """Of the controller."""
    machine: str = ""
    """Its hostname."""
