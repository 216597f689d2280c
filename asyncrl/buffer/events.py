"""The events that the buffer's state machine handles, and the instructions it returns. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncrl.buffer.staleness import StalenessFigures, VersionCounts

GroupState = Literal["running", "scoring", "ready", "taken", "trained", "dropped", "failed"]
MemberState = Literal["pending", "generated", "scored", "failed"]

# -- events of generators -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GeneratorReady:
    """A generator can take work. One known by that name before is replaced."""

    name: str
    num_slots: int
    version: int
    """Of the weights it samples with; -1: none yet, and no group is issued to it."""


@dataclass(frozen=True, slots=True)
class GeneratorLeaving:
    """A generator gets no more work. It finishes what it holds."""

    name: str


@dataclass(frozen=True, slots=True)
class GeneratorGone:
    """A generator died or left. What it held is handed out again or failed."""

    name: str


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """A generator's engine can run this many requests at once from now on; what it holds stays."""

    name: str
    num_slots: int
    """At least 1."""


@dataclass(frozen=True, slots=True)
class VersionIsLive:
    """A generator samples with this version from now on."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class MembersStarted:
    """Work that is no group (evaluation) holds slots of this generator."""

    name: str
    num_members: int


@dataclass(frozen=True, slots=True)
class MembersFinished:
    """This many members hold no slot of this generator any more: finished, failed or never sent."""

    name: str
    num_members: int = 1


@dataclass(frozen=True, slots=True)
class IssuePaused:
    """Hand out nothing until IssueResumed."""


@dataclass(frozen=True, slots=True)
class IssueResumed:
    """Hand out groups again."""


# -- events of groups and steps -------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class StepSetAside:
    """The batch of this step ends the learner whenever it is tried: its groups are dropped, later steps move up by one."""

    step: int
    reason: str


BufferEvent = (
    GeneratorReady
    | GeneratorLeaving
    | GeneratorGone
    | RoomChanged
    | VersionIsLive
    | MembersStarted
    | MembersFinished
    | IssuePaused
    | IssueResumed
    | GroupIssued
    | GroupPlaced
    | ExternalGroupAdded
    | SampleFinished
    | SampleScored
    | SampleFailed
    | TakeStep
    | StepTrained
    | LearnerRestarted
    | GroupDropped
    | StepsForgotten
    | StepSetAside
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
    prompt_id: str = field(default="", compare=False)
    """Of a group that is over."""


@dataclass(frozen=True, slots=True)
class IssueGroup:
    """Send the next prompt, as a new group of all members, to this generator, and enter it with GroupIssued."""

    generator: str
    version: int
    """Live on the generator: no token of the group can be older."""


@dataclass(frozen=True, slots=True)
class ReissueGroup:
    """Send the missing members of this group to this generator, and enter that with GroupPlaced."""

    group_id: int
    generator: str
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


BufferInstruction = ScoreMember | GroupMoved | ReturnPrompt | TakeGroups | Wait | NotEnough | ScreenLifted | ScreenStands
