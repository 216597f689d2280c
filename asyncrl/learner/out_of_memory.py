"""A step that runs out of device memory makes room, halves its rows and goes on, once.

What is repeated is the forward passes before the first update, or the gradients of one update: both change no weights, so the
step is the same step but for the order of sums. An optimizer that runs out while it changes weights is not repeated.

Invariants: rows are halved at most once a step; what a failed attempt recorded is forgotten. Of several ranks none may repeat
alone, so there the first failure is the last. Called by learner/step.py.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from asyncrl.errors import LearnerError
from asyncrl.learner.passes import Passes, RowValues, run_passes
from asyncrl.learner.plan import StepPlan
from asyncrl.learner.rows import split_row
from asyncrl.learner.trainee import Trainee
from asyncrl.learner.update import Objective

log = logging.getLogger(__name__)

T = TypeVar("T")

KNOBS = "lower packing.tokens_per_row, or set learner.gradient_checkpointing = true or a smaller learner.logprob_chunk_tokens"


class RoomyStep:
    """One step's rows, and whether they had to become smaller.

    Example:
        step = RoomyStep(trainee, plan)
        passes = step.run_passes()
        objective = PolicyObjective(trainee, step.plan, passes)
        shares = step.train_rows(objective, 0)
    """

    def __init__(self, trainee: Trainee, plan: StepPlan) -> None:
        """Begin with the rows as they were packed."""
        self._trainee = trainee
        self.plan = plan
        self._passes = Passes()
        self._has_shrunk = False

    def run_passes(self) -> Passes:
        """Run what the plan needs before its first update.

        Raises:
            LearnerError: There is not enough memory for half the rows either; or see passes.py.
        """
        self._passes = self._with_room(lambda: run_passes(self._trainee, self.plan), lambda: None)
        return self._passes

    def train_rows(self, objective: Objective, number: int) -> torch.Tensor:
        """Add the gradients of an update; return the shares of its losses, float64 [2].

        Raises:
            LearnerError: There is not enough memory for half the rows either.
        """
        objective.begin_update()
        return self._with_room(lambda: self._rows(objective, number), lambda: objective.restart_update(self.plan, self._passes))

    def _rows(self, objective: Objective, number: int) -> torch.Tensor:
        residents = self._trainee.residents
        with contextlib.nullcontext() if residents is None else residents.watch():
            places = range(len(self.plan.prepared.updates[number]))
            return torch.stack([objective.train_row(number, place) for place in places]).sum(dim=0)

    def _with_room(self, work: Callable[[], T], restart: Callable[[], None]) -> T:
        """Do the work; where memory runs out, make room, halve the rows, and do it again."""
        if self._has_shrunk or self._trainee.ranks.size > 1:
            return self._last_attempt(work)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            said = str(error)
        # Only here, after the except block: its traceback held the failed pass's activations.
        self._shrink(said)
        restart()
        return self._last_attempt(work)

    def _last_attempt(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except torch.OutOfMemoryError as error:
            raise LearnerError(
                f"step {self.plan.batch.step} is out of device memory{' with halved rows' if self._has_shrunk else ''}: {error}; "
                f"on the device: {self._residents()}; {KNOBS}"
            ) from error

    def _shrink(self, said: str) -> None:
        self._has_shrunk = True
        gc.collect()  # frames of the failed pass hold each other, and its activations
        for optimizer in (self._trainee.optimizer, self._trainee.critic_optimizer):
            if optimizer is not None:
                optimizer.zero_grad()
        left = "" if self._trainee.residents is None else self._trainee.residents.make_room()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        smaller, passes = halved(self.plan, self._passes)
        if len(smaller.rows) == len(self.plan.rows) and not left:
            raise LearnerError(
                f"step {self.plan.batch.step} is out of device memory and each of its rows is one sample (or pair), which cannot "
                f"be split: {said}; on the device: {self._residents()}; lower generate.sampling.max_new_tokens, or "
                "set learner.gradient_checkpointing = true"
            )
        log.warning(
            "step %d ran out of device memory: its %d rows are now %d%s; it goes on. To spare it the second attempt, %s (%s)",
            self.plan.batch.step,
            len(self.plan.rows),
            len(smaller.rows),
            f", and off the device went {left}" if left else "",
            KNOBS,
            said,
        )
        self.plan, self._passes = smaller, passes

    def _residents(self) -> str:
        residents = self._trainee.residents
        return "all the learner has" if residents is None else residents.describe()


def halved(plan: StepPlan, passes: Passes) -> tuple[StepPlan, Passes]:
    """Return the same step with each row split in two where it has several samples, and what the passes found dealt out anew."""
    split = [[split_row(plan.batch, row) for row in rows] for rows in plan.prepared.updates]
    updates = tuple(tuple(half for halves in rows for half in halves) for rows in split)
    sizes = [[half.num_targets for half in halves] for rows in split for halves in rows]

    def dealt(values: RowValues | None) -> RowValues | None:
        if values is None:
            return None
        return [part for value, counts in zip(values, sizes, strict=True) for part in torch.split(value, counts)]

    smaller = replace(plan, prepared=replace(plan.prepared, updates=updates))
    known = replace(passes, proximal=dealt(passes.proximal), values=dealt(passes.values), reference=dealt(passes.reference))
    return smaller, known
