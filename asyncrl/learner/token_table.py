"""A step's tokens as one table, the same on every rank however samples are packed: a line a sample, a column a response token.

What rows compute token by token (log-probabilities, values) is put into a table, what looks at the whole step (advantages,
corrections over an update) reads and makes tables, and rows take their part of it again.

Invariant: lines follow `StepBatch.samples` and columns the response, so no packing and no number of ranks changes a table.
Called by learner/rows.py, learner/micro_batches.py and learner/planned_corrections.py.

Legend: S samples of the step, T the most response tokens of one of them, M targets of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.learner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class RowTargets:
    """Where a row's targets lie in the table."""

    samples: NDArray[np.int64]
    """[M], the line."""
    offsets: NDArray[np.int64]
    """[M], the column."""


class HasTargets(Protocol):
    """A row, as far as a table knows it."""

    @property
    def targets(self) -> RowTargets:
        """Return where its targets lie."""
        ...

    @property
    def is_filler(self) -> bool:
        """Return whether it must not be counted."""
        ...


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The trained tokens of all ranks."""

    mask: NDArray[np.bool_]
    """[S, T], true on trained tokens."""

    @classmethod
    def of(cls, trained: Sequence[NDArray[np.int64]]) -> TokenTable:
        """Return the table of S samples whose response tokens at the places `trained` are trained."""
        width = max((int(offsets[-1]) + 1 for offsets in trained if len(offsets)), default=1)
        mask = np.zeros((len(trained), width), dtype=np.bool_)
        for line, offsets in enumerate(trained):
            mask[line, offsets] = True
        return cls(mask)

    def collect(self, rows: Sequence[HasTargets], values: Sequence[torch.Tensor], ranks: Ranks) -> FloatArray:
        """Return [S, T], every rank's values of its rows, 0 at untrained tokens.

        Args:
            rows: This rank's.
            values: [M] of each of them, on any device.
            ranks: All must call.
        """
        own = [(row.targets, part) for row, part in zip(rows, values, strict=True) if not row.is_filler]
        table = np.zeros(self.mask.shape)
        if ranks.size == 1:
            for targets, part in own:
                table[targets.samples, targets.offsets] = _floats(part)
            return table
        places = [targets.samples * self.mask.shape[1] + targets.offsets for targets, _ in own]
        sent = np.stack([_joined(places), _joined([_floats(part) for _, part in own])], axis=1)
        received = ranks.gather(torch.from_numpy(sent)).cpu().numpy()
        table.reshape(-1)[received[:, 0].astype(np.int64)] = received[:, 1]
        return table

    @staticmethod
    def of_row(table: FloatArray, row: HasTargets) -> torch.Tensor:
        """Return [M], the row's part of a table, on the CPU."""
        targets = row.targets
        return torch.from_numpy(table[targets.samples, targets.offsets])


def _floats(values: torch.Tensor) -> FloatArray:
    array: FloatArray = values.detach().double().cpu().numpy()
    return array


def _joined(parts: Sequence[NDArray[np.int64] | FloatArray]) -> FloatArray:
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts]) if parts else np.zeros(0)
