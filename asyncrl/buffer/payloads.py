"""The samples themselves, and what the buffer answers with.

Payloads of live groups (running, scoring, ready) are held until their step is taken, at most (eta + 1) x B groups by admission.
Those of a taken step are held until it is trained; a repeat after that reads them from the ledger again. The parameters that a
step was packed with are held as long as it may be repeated, so that a repeat is the very same batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from asyncrl.algorithms.screening import members_of, trained_members
from asyncrl.buffer.events import BufferInstruction, TakeGroups
from asyncrl.buffer.ledger.records import Ledger, StepParams
from asyncrl.buffer.staleness import StalenessFigures, staleness_figures
from asyncrl.buffer.validate import examine
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Sample, ScoredGroup, ScoredSample


class WorkOrder(msgspec.Struct, frozen=True):
    """What a GroupWork message needs besides sampling parameters and seed."""

    group_id: int
    attempt: int
    prompt: Prompt
    indices: tuple[int, ...]


class ReturnedPrompt(msgspec.Struct, frozen=True):
    """A prompt to be issued again: pass `replaces` on to `issue`."""

    prompt: Prompt
    replaces: int


class Receipt(msgspec.Struct, frozen=True):
    """What became of something that came in; `on_committed` runs in every case, so acknowledge there and nowhere else."""

    status: Literal["stored", "duplicate", "refused"]
    reason: str = ""
    """Of `refused`."""
    instructions: Sequence[BufferInstruction] = ()
    """Also with `refused`: the member of an invalid sample has failed."""
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

    step: int
    reason: str
    group_ids: tuple[int, ...] = ()
    """The groups it waits for, where it waits for certain ones."""
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


class StepPayloads:
    """Groups and parameters of taken steps.

    Args:
        packed_with: Parameters of new steps, but for `mask_below`.
        params: Of steps that may be repeated.
        lacking: Steps taken with scores that brought no reference log-probabilities.
        needs_reference: Such steps cannot be repeated.
    """

    def __init__(
        self, packed_with: StepParams, params: dict[int, StepParams], lacking: Collection[int], *, needs_reference: bool
    ) -> None:
        self._packed_with = packed_with
        self._params = params
        self._lacking = lacking
        self._needs_reference = needs_reference
        self._groups: dict[int, tuple[ScoredGroup, ...]] = {}

    def first(self, decision: TakeGroups, groups: tuple[ScoredGroup, ...], dropped: Sequence[BufferInstruction]) -> TakenStep:
        """Hold the groups of a new step and return it; `dropped`: what was dropped on the way."""
        assert decision.staleness is not None, "a repeat is no first take"
        step = decision.step
        self._groups[step] = groups
        params = self._params[step] = msgspec.structs.replace(self._packed_with, mask_below=decision.mask_below)
        return TakenStep(step, groups, params, decision.replay, decision.staleness, dropped)

    def repeat(self, decision: TakeGroups, ledger: Ledger, newest_version: int) -> TakenStep:
        """Return a step as it was taken the first time.

        Raises:
            LedgerError: Its payloads are gone or damaged.
        """
        step, params = decision.step, self._params[decision.step]
        groups = self._groups.get(step)
        if groups is None:
            groups = self._groups[step] = tuple(ledger.load_groups(decision.group_ids))
        figures = staleness_figures(
            step,
            (
                examine(scored.sample, newest_version=newest_version, max_tokens=0)
                for group in groups
                for trained in [trained_members(members_of(group), params.screen)]
                for scored in group.members
                if scored.sample.index in trained
            ),
            mask_below=decision.mask_below,
        )
        return TakenStep(step, groups, params, decision.replay, figures)

    def check_repeatable(self, steps: Collection[int]) -> None:
        """Raise LedgerError where one of these steps lacks what this run does not ask of the learner."""
        if self._needs_reference and (reason := without_reference(self._lacking, steps)):
            raise LedgerError(reason)

    def trained(self, step: int) -> None:
        """Let go of the groups of a step that is done."""
        self._groups.pop(step, None)

    def set_aside(self, step: int) -> tuple[ScoredGroup, ...]:
        """Let go of a step that will not be tried again and move later ones up by one; return what is held of it."""
        groups = self._groups.pop(step, ())
        self._params.pop(step, None)
        for later in sorted(key for key in self._params if key > step):
            self._params[later - 1] = self._params.pop(later)
            if later in self._groups:
                self._groups[later - 1] = self._groups.pop(later)
        return groups

    def forget(self, before_step: int) -> None:
        """Let go of the parameters of steps that are never repeated."""
        for step in [step for step in self._params if step < before_step]:
            del self._params[step]


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
