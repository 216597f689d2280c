"""The events that the buffer's state machine handles, the instructions it returns, and what both hold. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from asyncrl.observe.decisions import Value

VersionCounts = tuple[tuple[int, int], ...]
"""(version, number of trained tokens) of one sample, ascending by version, never empty: all that staleness needs to know."""
GroupState = Literal["running", "scoring", "ready", "taken", "trained", "dropped", "failed"]
MemberState = Literal["pending", "generated", "scored", "failed"]


class BufferEvent(Value, frozen=True):
    """What may happen: a new event is a class with this base."""


# -- events of generators -------------------------------------------------------------------------------------------------


class GeneratorReady(BufferEvent, frozen=True):
    """A generator can take work. One known by that name before is replaced."""

    name: str
    num_slots: int
    version: int
    """Of the weights it samples with; -1: none yet, and no group is issued to it."""


class GeneratorLeaving(BufferEvent, frozen=True):
    """A generator gets no more work. It finishes what it holds."""

    name: str


class GeneratorGone(BufferEvent, frozen=True):
    """A generator died or left. What it held is handed out again or failed."""

    name: str


class RoomChanged(BufferEvent, frozen=True):
    """A generator's engine can run this many requests at once from now on; what it holds stays."""

    name: str
    num_slots: int
    """At least 1."""


class VersionIsLive(BufferEvent, frozen=True):
    """A generator samples with this version from now on."""

    name: str
    version: int


class MembersStarted(BufferEvent, frozen=True):
    """Work that is no group (evaluation) holds slots of this generator."""

    name: str
    num_members: int


class MembersFinished(BufferEvent, frozen=True):
    """This many members hold no slot of this generator any more: finished, failed or never sent."""

    name: str
    num_members: int = 1


class BoundsChanged(BufferEvent, frozen=True):
    """The run's config changed while it goes on."""

    max_staleness: int
    """Eta, of every step that is not taken yet."""
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
    """The dropped or failed group whose prompt this is again."""
    external: bool = False
    """Outside code generated it, who is named in place of a generator; its samples follow at once."""


class GroupPlaced(BufferEvent, frozen=True):
    """The missing members of a running group were handed out again."""

    group_id: int
    generator: str
    version: int


class SamplesFinished(BufferEvent, frozen=True, gc=False):
    """Members were generated and are held."""

    group_id: int
    indices: tuple[int, ...]
    version_counts: tuple[VersionCounts, ...]
    """One per member."""
    truncated: tuple[int, ...] = ()
    """Those cut off by the length limit."""


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
    """The learner asks for the groups of this step (again, where the step was taken before and is to be replayed)."""

    step: int
    group_ids: tuple[int, ...] = ()
    """Exactly these, ascending; empty: as the policy chooses."""


class StepTrained(BufferEvent, frozen=True):
    """The optimizer step that used the groups of this step is done."""

    step: int


class LearnerRestarted(BufferEvent, frozen=True):
    """The learner stands at this version again: steps from here on are to be repeated with the very same groups."""

    version: int


class GroupDropped(BufferEvent, frozen=True):
    """Somebody decided that this group will not be trained (at a drain, say)."""

    group_id: int
    reason: str


class StepsForgotten(BufferEvent, frozen=True):
    """No checkpoint can ask for a replay of a step before this one any more."""

    before_step: int


class StepSetAside(BufferEvent, frozen=True):
    """The batch of this step ends the learner whenever it is tried: its groups are dropped, later steps move up by one."""

    step: int
    reason: str


# -- instructions --------------------------------------------------------------------------------------------------------


class StalenessFigures(msgspec.Struct, frozen=True):
    """Of the trained tokens of one step, and of the samples that have some."""

    num_samples: int
    num_tokens: int
    token_max: int
    """Versions; 0 for no token."""
    metrics: dict[str, float]
    """By name. Tokens that are masked for being older than eta are counted apart; all others are 0 for no sample."""


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
    """Of `dropped` and `failed`."""
    generator: str = ""
    """Of a group that is over: who still generates members of it, for nobody."""
    prompt_id: str = field(default="", compare=False)
    """Of a group that is over."""


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


class Wait(Value, frozen=True):
    """The step cannot be taken yet."""

    step: int
    reason: str


class ScreenLifted(Value, frozen=True):
    """From this group on, groups are ready though the screen objects to them, until one comes that it likes."""

    group_id: int
    reason: str
    """What it says about this one."""
    num_dropped: int
    """Groups dropped one after the other before."""


class ScreenStands(Value, frozen=True):
    """Many groups in a row could not be trained at all, this one included; sampling goes on."""

    group_id: int
    reason: str
    num_dropped: int
    """Groups dropped one after the other, this one included."""


BufferInstruction = ScoreMembers | GroupMoved | TakeGroups | Wait | ScreenLifted | ScreenStands
