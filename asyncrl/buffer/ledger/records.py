"""The records that are written to the ledger."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from asyncrl.algorithms.screening import Screen
from asyncrl.buffer.events import GroupState, VersionCounts
from asyncrl.schema.samples import Prompt, Samples, Scores

OnCommitted = Callable[[], None]


class StepParams(msgspec.Struct, frozen=True):
    """All values besides the groups that are needed to rebuild the identical batch of a step."""

    mask_below: int
    tokens_per_row: int
    temperature: float
    screen: Screen = Screen()
    minibatches: int = 1
    """Number of updates; groups of different updates share no row."""
    settings: dict[str, float | int | None] = {}
    """Config values that the learner reads at each step (config/live.py), by field."""


class Record(msgspec.Struct, frozen=True):
    """Base class of a record of the ledger; a new kind is a subclass."""


class IssuedRecord(Record, frozen=True, gc=False):
    """A new group, with the prompt itself."""

    group_id: int
    prompt: Prompt
    generator: str
    version: int
    size: int
    now: float
    retries: int = 0
    replaces: int | None = None
    cursor: int = 0
    """Position of the prompt source after this prompt."""
    external: bool = False


class PlacedRecord(Record, frozen=True):
    """A group was assigned again."""

    group_id: int
    generator: str
    version: int
    attempt: int
    now: float


class SamplesRecord(Record, frozen=True, gc=False):
    """Generated members, with payload."""

    samples: Samples
    version_counts: tuple[VersionCounts, ...]
    """One per member."""
    now: float


class ScoresRecord(Record, frozen=True, gc=False):
    """Members' rewards, and their reference log-probabilities if the scores have them."""

    scores: Scores
    now: float


class FailureRecord(Record, frozen=True):
    """A member that will never be trained."""

    group_id: int
    index: int
    attempt: int
    stage: str
    reason: str
    now: float


class MovedRecord(Record, frozen=True, gc=False):
    """A group changed its state (but the states taken and trained are recorded with their step)."""

    group_id: int
    after: GroupState
    reason: str
    now: float
    returns: int = -1
    """How often the prompt has failed, if it will be issued again; otherwise -1."""


class WideRecord(Record, frozen=True):
    """A record that changes rows of many groups."""


class TakenRecord(WideRecord, frozen=True):
    """A step and its groups, in order."""

    step: int
    group_ids: tuple[int, ...]
    params: StepParams
    max_staleness: int
    now: float


class TrainedRecord(WideRecord, frozen=True):
    """The optimizer step of these groups is done."""

    step: int
    group_ids: tuple[int, ...]
    now: float


class RestartedRecord(WideRecord, frozen=True):
    """Steps from `version` on are to be repeated; those before it are trained."""

    version: int
    now: float


class RescoreRecord(WideRecord, frozen=True):
    """Request new scores for groups that are not taken yet and whose scores lack this reference's log-probabilities."""

    reference: str
    """What the log-probabilities depend on: the reference's folder and the temperature."""
    now: float


class ChangedRecord(WideRecord, frozen=True):
    """The run's config changed during the run, from `step` on."""

    step: int
    what: str
    """Who changed it, and the old and new value of each field."""
    now: float


class ForgetRecord(WideRecord, frozen=True):
    """Payloads of steps before this one are no longer needed."""

    before_step: int
    before_group: int = 0
    """Groups with a lower id have ended: none is live, waits to be issued again, or is in a step that may be repeated."""


class SetAsideRecord(WideRecord, frozen=True):
    """The groups of this step are dropped, and later steps move up by one."""

    step: int
    group_ids: tuple[int, ...]
    reason: str
    now: float
