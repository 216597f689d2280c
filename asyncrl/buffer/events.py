"""Events that the buffer's state machine handles, and instructions that it returns. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from asyncrl.observe.machine import Value

VersionCounts = tuple[tuple[int, int], ...]
"""(version, number of trained tokens) of one sample, ascending by version, never empty; staleness needs nothing more."""
GroupState = Literal["running", "scoring", "ready", "taken", "trained", "dropped", "failed"]
MemberState = Literal["pending", "generated", "scored", "failed"]


class BufferEvent(Value, frozen=True):
    """Base class of every event."""


# -- events of generators -------------------------------------------------------------------------------------------------


class GeneratorReady(BufferEvent, frozen=True):
    """A generator can take work. It replaces an earlier one with the same name."""

    name: str
    num_slots: int
    version: int
    """Version of the weights it samples with; -1: none yet, so no group is issued to it."""


class GeneratorLeaving(BufferEvent, frozen=True):
    """A generator gets no more work. It finishes what it holds."""

    name: str


class GeneratorGone(BufferEvent, frozen=True):
    """A generator died or left. Its groups are handed out again or failed."""

    name: str


class RoomChanged(BufferEvent, frozen=True):
    """A generator's engine can run this many requests at once from now on; it keeps what it holds."""

    name: str
    num_slots: int
    """At least 1."""


class VersionIsLive(BufferEvent, frozen=True):
    """A generator samples with this version from now on."""

    name: str
    version: int


class MembersStarted(BufferEvent, frozen=True):
    """Other work than groups (evaluation) uses slots of this generator."""

    name: str
    num_members: int


class MembersFinished(BufferEvent, frozen=True):
    """This many members use no slot of this generator any more: they are finished, failed or were never sent."""

    name: str
    num_members: int = 1


class BoundsChanged(BufferEvent, frozen=True):
    """The run's config was changed during the run."""

    max_staleness: int
    """Eta of every step that is not taken yet."""
    max_groups: int | None
    """As `BufferLimits`."""


class IssuePaused(BufferEvent, frozen=True):
    """Hand out nothing until IssueResumed."""


class IssueResumed(BufferEvent, frozen=True):
    """Hand out groups again."""


# -- events of groups and steps -------------------------------------------------------------------------------------------


class GroupIssued(BufferEvent, frozen=True):
    """A prompt was handed to a generator as a new group; ids are given out in order, without a gap."""

    group_id: int
    prompt_id: str
    size: int
    generator: str
    version: int
    """Live on that generator: no token of the group can be older."""
    replaces: int | None = None
    """The dropped or failed group whose prompt is issued again as this group."""
    external: bool = False
    """Whether outside code generated it; `generator` then names that code, and the samples follow at once."""


class GroupPlaced(BufferEvent, frozen=True):
    """The missing members of a running group were handed out again."""

    group_id: int
    generator: str
    version: int


class SamplesFinished(BufferEvent, frozen=True, gc=False):
    """Members were generated."""

    group_id: int
    indices: tuple[int, ...]
    version_counts: tuple[VersionCounts, ...]
    """One per member."""
    truncated: tuple[int, ...] = ()
    """Members cut off by the length limit."""


class SamplesScored(BufferEvent, frozen=True, gc=False):
    """Members have their rewards."""

    group_id: int
    indices: tuple[int, ...]
    rewards: tuple[float, ...]
    """One per member."""


class SampleFailed(BufferEvent, frozen=True):
    """A member will never be trained."""

    group_id: int
    index: int
    reason: str


class TakeStep(BufferEvent, frozen=True):
    """The learner needs the groups of this step; again, if the step was taken before and must be repeated."""

    step: int
    group_ids: tuple[int, ...] = ()
    """Take exactly these, in ascending order; empty: the policy chooses."""


class StepTrained(BufferEvent, frozen=True):
    """The optimizer step that used the groups of this step is done."""

    step: int


class LearnerRestarted(BufferEvent, frozen=True):
    """The learner starts again from this version: steps from here on must be repeated with exactly the same groups."""

    version: int


class GroupDropped(BufferEvent, frozen=True):
    """A caller or the controller decided that this group will not be trained."""

    group_id: int
    reason: str


class StepsForgotten(BufferEvent, frozen=True):
    """Steps before this one can no longer be repeated, because no older checkpoint is kept."""

    before_step: int


class StepSetAside(BufferEvent, frozen=True):
    """The learner dies on this step's batch every time: its groups are dropped, and later steps get the next lower number."""

    step: int
    reason: str


# -- instructions --------------------------------------------------------------------------------------------------------


class StalenessFigures(msgspec.Struct, frozen=True):
    """Staleness of the trained tokens of one step, and of the samples that have trained tokens."""

    num_samples: int
    num_tokens: int
    token_max: int
    """Largest staleness of a token, in versions; 0 if there is no token."""
    metrics: dict[str, float]
    """Metrics by name. Tokens masked because they are older than eta are counted separately; the rest is 0 without samples."""


class ScoreMembers(Value, frozen=True, gc=False):
    """Ask for the scores of these members."""

    group_id: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupMoved:
    """A group changed its state."""

    group_id: int
    before: GroupState
    after: GroupState
    reason: str = ""
    """Reason for `dropped` and `failed`."""
    generator: str = ""
    """For a group that is over: the generator that still generates members of it, whose work is no longer needed."""
    prompt_id: str = field(default="", compare=False)
    """For a group that is over: its prompt."""


class IssueGroup(Value, frozen=True):
    """Send the next prompt, as a new group of all members, to this generator, and enter it with GroupIssued."""

    generator: str
    version: int
    """Live on the generator: no token of the group can be older."""


class ReissueGroup(Value, frozen=True):
    """Send the missing members of this group to this generator, and enter that with GroupPlaced."""

    group_id: int
    generator: str
    version: int


class TakeGroups(Value, frozen=True):
    """Train exactly these groups, in this order."""

    step: int
    group_ids: tuple[int, ...]
    mask_below: int
    """Tokens of versions below this one get loss mask 0."""
    repeat: bool = False
    """Whether the step was taken before, trained or not."""
    staleness: StalenessFigures | None = None
    """None on a repeat."""


class Wait(Value, frozen=True):
    """The step cannot be taken yet."""

    step: int
    reason: str


class ScreenLifted(Value, frozen=True):
    """From this group on, groups become ready although the screen refuses them, until the screen accepts one."""

    group_id: int
    reason: str
    """Why the screen refuses this group."""
    num_dropped: int
    """Number of groups dropped in a row before this one."""


class ScreenStands(Value, frozen=True):
    """Many groups in a row could not be trained at all, this one included; sampling goes on."""

    group_id: int
    reason: str
    num_dropped: int
    """Number of groups dropped in a row, this one included."""


BufferInstruction = ScoreMembers | GroupMoved | TakeGroups | Wait | ScreenLifted | ScreenStands
