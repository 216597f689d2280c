"""What taken steps are trained from: their groups, and the parameters they are packed with, so that a repeat is the very same.

Owns the payloads of steps taken and not yet trained, and the parameters of every step that may be repeated. A step that was
trained has let go of its payloads: a repeat reads them from the ledger again. Called by buffer/buffer.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from asyncrl.algorithms.screening import members_of, trained_members
from asyncrl.buffer.events import BufferInstruction, TakeGroups
from asyncrl.buffer.records import Ledger, StepParams
from asyncrl.buffer.replies import TakenStep
from asyncrl.buffer.restore import without_reference
from asyncrl.buffer.staleness import staleness_figures
from asyncrl.buffer.validate import examine
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import ScoredGroup


class StepPayloads:
    """Groups and parameters by step.

    Args:
        packed_with: Parameters of new steps, but for `mask_below`.
        params: Of steps that may be repeated.
        lacking: Steps taken with scores that brought no reference log-probabilities.
        needs_reference: Such steps cannot be repeated.
    """

    def __init__(
        self,
        packed_with: StepParams,
        params: dict[int, StepParams],
        lacking: Collection[int],
        *,
        needs_reference: bool,
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
            LedgerError: Its payloads are gone.
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

    def forget(self, before_step: int) -> None:
        """Let go of the parameters of steps that are never repeated."""
        for step in [step for step in self._params if step < before_step]:
            del self._params[step]
