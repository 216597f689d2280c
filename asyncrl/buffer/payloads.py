"""The samples themselves, and what the buffer answers with.

Payloads of live groups (running, scoring, ready) are held until their step is taken, at most (eta + 1) x B groups by admission.
Those of a taken step are held until it is trained; a repeat after that reads them from the ledger again. The parameters that a
step was packed with are held as long as it may be repeated, so that a repeat is the very same batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from asyncrl.buffer.events import BufferInstruction
from asyncrl.buffer.ledger.records import StepParams
from asyncrl.buffer.staleness import StalenessFigures
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What became of something that came in; of a repeat, nothing."""

    stored: tuple[int, ...] = ()
    """Members of the group that it changed."""
    refused: tuple[str, ...] = ()
    """Why others could not be taken, one a member; the member of an invalid sample has failed."""
    instructions: Sequence[BufferInstruction] = ()
    group_id: int = -1
    """With `submit_group`: the id the group was given."""


class TakenStep(msgspec.Struct, frozen=True):
    """One step's groups, by group id, to be packed with these very parameters."""

    step: int
    groups: tuple[ScoredGroup, ...]
    params: StepParams
    replay: bool
    staleness: StalenessFigures
    instructions: Sequence[BufferInstruction] = ()
    """Groups dropped on the way."""


class Waiting(msgspec.Struct, frozen=True):
    """Why there is no step yet; ask again when a group became ready or failed."""

    reason: str
    instructions: Sequence[BufferInstruction] = ()


@dataclass(slots=True)
class HeldGroup:
    """Payloads of a live group: generated members, of which some are scored."""

    prompt: Prompt
    samples: dict[int, Sample] = field(default_factory=dict)
    scored: dict[int, ScoredSample] = field(default_factory=dict)

    def as_scored(self, group_id: int) -> ScoredGroup:
        """Return what is trained, failed members left out."""
        return ScoredGroup(group_id, self.prompt, tuple(self.scored[index] for index in sorted(self.scored)))


def without_reference(lacking: Collection[int], to_repeat: Iterable[int]) -> str:
    """Return why these steps cannot be repeated by a run whose reference is on inference workers, or nothing."""
    steps = [step for step in to_repeat if step in lacking]
    if not steps:
        return ""
    return (
        f"steps {steps[0]} to {steps[-1]} were taken and are to be trained (again), and their samples were scored without "
        "reference log-probabilities: algorithm.reference.where = 'worker' (or a reference that was not there before) can be set "
        "once they are trained and a checkpoint is written; resume with the settings as they were until then"
    )
