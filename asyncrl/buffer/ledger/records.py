"""What the ledger is told, and the contract of a ledger, with the variant that keeps nothing.

A write is a unit: all of its records are committed or none is, and units are committed in the order written. `on_committed` runs
after that, so an acknowledgement sent from it promises what is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from asyncrl.algorithms.screening import Screen
from asyncrl.buffer.events import GroupState
from asyncrl.buffer.staleness import VersionCounts
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Samples, ScoredGroup, Scores

OnCommitted = Callable[[], None]


class StepParams(msgspec.Struct, frozen=True):
    """Beside its groups, all that is needed to build the very same batch of a step again."""

    mask_below: int
    tokens_per_row: int
    temperature: float
    screen: Screen = Screen()
    minibatches: int = 1
    """Updates whose groups share no row."""
    settings: dict[str, float | int | None] = {}
    """What the learner reads anew at each step (config/live.py), by field."""


class Record(msgspec.Struct, frozen=True):
    """What a ledger is told: a new kind is a class with this base."""


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
    """Where the prompt source stands after this prompt."""
    external: bool = False


class PlacedRecord(Record, frozen=True):
    """A group was handed out again."""

    group_id: int
    generator: str
    version: int
    attempt: int
    now: float


class SamplesRecord(Record, frozen=True, gc=False):
    """Generated members, payload and all."""

    samples: Samples
    version_counts: tuple[VersionCounts, ...]
    """One per member."""
    now: float


class ScoresRecord(Record, frozen=True, gc=False):
    """Members' rewards, and their reference log-probabilities where the scores bring some."""

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
    """A group changed its state (taken and trained come with their step instead)."""

    group_id: int
    before: GroupState
    after: GroupState
    reason: str
    now: float
    returns: int = -1
    """How often the prompt failed, where it is to be issued again; else -1."""


class TakenRecord(Record, frozen=True):
    """A step and its groups, in order."""

    step: int
    group_ids: tuple[int, ...]
    params: StepParams
    max_staleness: int
    now: float


class TrainedRecord(Record, frozen=True):
    """The optimizer step of these groups is done."""

    step: int
    group_ids: tuple[int, ...]
    now: float


class RestartedRecord(Record, frozen=True):
    """Steps from `version` on are to be repeated; those before it are trained."""

    version: int
    now: float


class RescoreRecord(Record, frozen=True):
    """Scores of groups not taken yet that brought no reference log-probabilities are to be asked for again."""

    now: float


class ChangedRecord(Record, frozen=True):
    """The run's config changed while it went on: from `step` on."""

    step: int
    what: str
    """Who, and each field from what to what."""
    now: float


class ForgetRecord(Record, frozen=True):
    """Payloads of steps before this one are not needed any more."""

    before_step: int


class SetAsideRecord(Record, frozen=True):
    """The groups of this step are dropped, and later steps move up by one."""

    step: int
    group_ids: tuple[int, ...]
    reason: str
    now: float


class Ledger(Protocol):
    """Where the books are kept."""

    def write(self, records: Sequence[Record], on_committed: OnCommitted | None = None) -> None:
        """Queue one unit; wait while too many are queued. No records: `on_committed` runs once all before it is committed.

        Raises:
            LedgerError: The ledger is closed, or an earlier commit failed.
        """
        ...

    def sync(self, timeout_s: float = 60.0) -> None:
        """Return once everything written so far is committed.

        Raises:
            LedgerError: It took longer than `timeout_s`, or a commit failed.
        """
        ...

    def state_counts(self) -> dict[str, int] | None:
        """Return the number of groups per state, as committed; call `sync` before. None where nothing is kept."""
        ...

    def load_groups(self, group_ids: Sequence[int]) -> list[ScoredGroup]:
        """Return scored groups with their payloads, in the order asked for.

        Raises:
            LedgerError: A payload is gone.
        """
        ...

    def close(self) -> None:
        """Commit what is queued and release the ledger."""
        ...


class MemoryLedger:
    """Keeps nothing: commits at once, and nothing outlives the process. For benchmarks and simulation."""

    def write(self, records: Sequence[Record], on_committed: OnCommitted | None = None) -> None:  # noqa: ARG002 - see Ledger
        """Call back at once."""
        if on_committed is not None:
            on_committed()

    def sync(self, timeout_s: float = 60.0) -> None:
        """Do nothing: everything is committed."""

    def state_counts(self) -> None:
        """Return nothing: nothing is counted."""

    def load_groups(self, group_ids: Sequence[int]) -> list[ScoredGroup]:
        """Raise: nothing is kept once it is trained."""
        raise LedgerError(
            f"groups {list(group_ids)[:4]}... cannot be repeated: buffer.ledger is 'memory'; use 'disk' for runs that may restart"
        )

    def close(self) -> None:
        """Do nothing."""
