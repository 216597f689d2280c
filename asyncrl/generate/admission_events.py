"""What admission is told and what it asks for: its events and instructions, the words between it and whoever runs it.

Pure data. The controller (control/flow.py) and plan/simulate write events and carry instructions out, generate/admission.py does
the reverse.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GeneratorReady:
    """A generator can take work; one known by that name before is replaced and holds nothing."""

    name: str
    num_slots: int
    version: int
    """Of the weights it samples with; -1: none yet, nothing is issued to it."""


@dataclass(frozen=True, slots=True)
class GeneratorLost:
    """A generator is gone; what it held follows as one GroupLost each."""

    name: str


@dataclass(frozen=True, slots=True)
class GeneratorLeaving:
    """A generator gets nothing more; what it holds it finishes."""

    name: str


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """A generator's engine can run so many requests at once from now on; what it holds already stays."""

    generator: str
    num_slots: int
    """At least 1."""


@dataclass(frozen=True, slots=True)
class VersionIsLive:
    """A generator samples with this version from now on."""

    generator: str
    version: int


@dataclass(frozen=True, slots=True)
class MembersFinished:
    """So many members hold no slot of this generator any more: finished, failed or taken away."""

    generator: str
    num_members: int = 1


@dataclass(frozen=True, slots=True)
class MembersStarted:
    """Work that admission did not hand out (evaluation) holds slots of this generator."""

    generator: str
    num_members: int


@dataclass(frozen=True, slots=True)
class GroupIsReady:
    """A running group became ready."""

    group_id: int


@dataclass(frozen=True, slots=True)
class GroupGone:
    """A group was dropped or failed and gives its place back."""

    group_id: int
    was_ready: bool = False
    """True where it had been reported ready."""


@dataclass(frozen=True, slots=True)
class GroupAdded:
    """Outside code submitted a group; it holds a place like any other."""


@dataclass(frozen=True, slots=True)
class GroupLost:
    """A running group lost these members with its generator and must be handed out again."""

    group_id: int
    num_members: int
    version: int
    """Only a generator at this version or above may get it: its deadline was set by it."""


@dataclass(frozen=True, slots=True)
class IssueReturned:
    """An IssueGroup could not be carried out (no prompt left): the place and the slots are free again, and no more are issued."""

    generator: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Issue nothing until Resumed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Issue again."""


@dataclass(frozen=True, slots=True)
class LimitSet:
    """No more than this many groups may ever hold a place."""

    max_groups: int | None


AdmissionEvent = (
    GeneratorReady
    | GeneratorLost
    | GeneratorLeaving
    | RoomChanged
    | VersionIsLive
    | MembersFinished
    | MembersStarted
    | GroupIsReady
    | GroupGone
    | GroupAdded
    | GroupLost
    | IssueReturned
    | Paused
    | Resumed
    | LimitSet
)


@dataclass(frozen=True, slots=True)
class IssueGroup:
    """Take the next prompt and send it, as a new group of all members, to this generator; its place is already counted."""

    generator: str
    version: int
    """Live on the generator: the group's lower bound."""


@dataclass(frozen=True, slots=True)
class ReissueGroup:
    """Send the missing members of this group to this generator.

    `num_members` slots are already counted; where fewer are missing by now, answer MembersFinished with the difference.
    """

    group_id: int
    generator: str
    version: int
    num_members: int


AdmissionInstruction = IssueGroup | ReissueGroup
