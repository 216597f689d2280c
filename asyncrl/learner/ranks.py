"""The learner's ranks as a step sees them: who I am, and sums and collections over all of us.

`OneRank` is the whole group of a run with a single learner process; learner/sharded.py has the real one. Every rank calls the
same methods in the same order with the same shapes (`gather` excepted: first axes may differ). Called by learner/update.py,
learner/measure.py, learner/token_table.py.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    """The group of learner ranks, seen from one of them."""

    @property
    def rank(self) -> int:
        """This one, 0 is the one that speaks to the controller."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `values` (any shape, no gradient)."""
        ...

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return every rank's `values` [N_r, ...] end to end, in the order of ranks, no gradient."""
        ...


class OneRank:
    """A group of one."""

    rank = 0
    size = 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`."""
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`."""
        return values
