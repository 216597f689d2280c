"""What the buffer answers the controller with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.buffer.events import BufferInstruction
from asyncrl.buffer.records import StepParams
from asyncrl.buffer.staleness import StalenessFigures
from asyncrl.schema.samples import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """What a GroupWork message needs besides sampling parameters and seed."""

    group_id: int
    attempt: int
    prompt: Prompt
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReturnedPrompt:
    """A prompt to be issued again: pass `replaces` on to `issue`."""

    prompt: Prompt
    replaces: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of something that came in; `on_committed` runs in every case, so acknowledge there and nowhere else."""

    status: Literal["stored", "duplicate", "refused"]
    reason: str = ""
    """Of `refused`."""
    instructions: Sequence[BufferInstruction] = ()
    """Also with `refused`: the member of an invalid sample has failed."""
    group_id: int = -1
    """With `submit_group`: the id the group was given."""


@dataclass(frozen=True, slots=True)
class TakenStep:
    """One step's groups, by group id, to be packed with these very parameters."""

    step: int
    groups: tuple[ScoredGroup, ...]
    params: StepParams
    replay: bool
    staleness: StalenessFigures
    instructions: Sequence[BufferInstruction] = ()
    """Groups dropped on the way."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why there is no step yet; ask again when a group became ready or failed."""

    step: int
    reason: str
    group_ids: tuple[int, ...] = ()
    """The groups it waits for, where it waits for certain ones."""
    instructions: Sequence[BufferInstruction] = ()


def not_wanted(group_id: int, index: int, standing: str) -> Receipt:
    """Return the receipt of what came for a member that waits for something else, or for nothing any more."""
    if standing == "unknown":
        return Receipt("refused", f"there is no member g{group_id}.{index}")
    if standing == "pending":
        return Receipt("refused", f"g{group_id}.{index} has no sample yet that could be scored")
    return Receipt("duplicate")
