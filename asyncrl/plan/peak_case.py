"""What plan/validate.py asks plan/learner_peak.py, a process of its own, to train."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.plan.models import ModelSize


@dataclass(frozen=True, slots=True)
class PeakCase:
    """A model and a row."""

    model: ModelSize
    tokens_per_row: int
    checkpointing: bool
