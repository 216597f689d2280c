"""What can happen to the buffer, and what it asks for: the words that buffer/state.py is spoken to in.

Pure values, no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.buffer.staleness import StalenessFigures, VersionCounts

GroupState = Literal["running", "scoring", "ready", "taken", "trained", "dropped", "failed"]
MemberState = Literal["pending", "generated", "scored", "failed"]

# -- events --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupIssued:
    """A prompt was handed to a generator as a new group; ids are given out in order, without a gap."""

    group_id: int
    prompt_id: str
    size: int
    generator: str
    version: int
    """Live on that generator: no token of the group can be older."""
    replaces: int | None = None
    """The dropped or failed group whose prompt this is again."""


@dataclass(frozen=True, slots=True)
class GroupPlaced:
    """The missing members of a running group were handed out again."""

    group_id: int
    generator: str
    version: int


@dataclass(frozen=True, slots=True)
class ExternalGroupAdded:
    """Outside code submitted a whole generated group."""

    group_id: int
    prompt_id: str
    submitter: str
    version_counts: tuple[VersionCounts, ...]
    """One per member."""
    truncated: tuple[int, ...] = ()
    """Members cut off by the length limit."""


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """A member was generated and is held."""

    group_id: int
    index: int
    version_counts: VersionCounts
    truncated: bool = False
    """Cut off by the length limit."""


@dataclass(frozen=True, slots=True)
class SampleScored:
    """A member has its reward."""

    group_id: int
    index: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleFailed:
    """A member will never be trained."""

    group_id: int
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class GeneratorGone:
    """A generator died; what it held is handed out again or failed."""

    generator: str


@dataclass(frozen=True, slots=True)
class TakeStep:
    """The learner asks for the groups of this step (again, where the step was taken before and is to be replayed)."""

    step: int


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The optimizer step that used the groups of this step is done."""

    step: int


@dataclass(frozen=True, slots=True)
class LearnerRestarted:
    """The learner stands at this version again: steps from here on are to be repeated with the very same groups."""

    version: int


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """Somebody decided that this group will not be trained (at a drain, say)."""

    group_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepsForgotten:
    """No checkpoint can ask for a replay of a step before this one any more."""

    before_step: int


BufferEvent = (
    GroupIssued
    | GroupPlaced
    | ExternalGroupAdded
    | SampleFinished
    | SampleScored
    | SampleFailed
    | GeneratorGone
    | TakeStep
    | StepTrained
    | LearnerRestarted
    | GroupDropped
    | StepsForgotten
)

# -- instructions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoreMember:
    """Ask a reward worker for this member's score."""

    group_id: int
    index: int


@dataclass(frozen=True, slots=True)
class GroupMoved:
    """A group changed its state."""

    group_id: int
    before: GroupState
    after: GroupState
    reason: str = ""
    """Of `dropped` and `failed`."""
    generator: str = ""
    """Of a group that is over: who still generates members of it, for nobody."""


@dataclass(frozen=True, slots=True)
class Reissue:
    """These members must be generated again, by a generator at `version` or above; the group keeps its place."""

    group_id: int
    attempt: int
    indices: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class ReturnPrompt:
    """Issue the prompt of this dropped or failed group again, as a new group."""

    group_id: int
    prompt_id: str


@dataclass(frozen=True, slots=True)
class TakeGroups:
    """Train exactly these, in this order."""

    step: int
    group_ids: tuple[int, ...]
    mask_below: int
    """Tokens of a version under this one get loss mask 0."""
    replay: bool
    """The step was trained before on this line of checkpoints."""
    repeat: bool = False
    """The step was taken before, trained or not."""
    staleness: StalenessFigures | None = None
    """None on a repeat."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The step cannot be taken before these groups are finished: it is their last chance, or the places left run out."""

    step: int
    group_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class NotEnough:
    """Fewer groups are ready than a step needs."""

    step: int
    have: int
    need: int


@dataclass(frozen=True, slots=True)
class ScreenLifted:
    """From this group on, groups are ready though the screen objects to them, until one comes that it likes."""

    group_id: int
    reason: str
    """What it says about this one."""
    num_dropped: int
    """Groups dropped one after the other before."""


@dataclass(frozen=True, slots=True)
class ScreenStands:
    """Many groups in a row could not be trained at all, this one included; sampling goes on."""

    group_id: int
    reason: str
    num_dropped: int
    """Groups dropped one after the other, this one included."""


BufferInstruction = (
    ScoreMember | GroupMoved | Reissue | ReturnPrompt | TakeGroups | Wait | NotEnough | ScreenLifted | ScreenStands
)
