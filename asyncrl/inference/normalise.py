"""Raw reward-model scores to rewards: shift and scale by fixed figures, then by running ones, then clip.

Pure arithmetic over one model's scores. Invariant: the scores of one batch are all counted before any of them is normalised, so
that members of a group judged together are compared on one scale. Called by inference/judge.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.config.stages import RewardModel


class RunningMoments:
    """Mean and variance of a stream, without keeping it.

    Source: Welford 1962, Note on a method for calculating corrected sums of squares and products.

    Example:
        >>> moments = RunningMoments()
        >>> for value in (1.0, 2.0, 3.0):
        ...     moments.add(value)
        >>> moments.mean, moments.std
        (2.0, 1.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        """Sum of squared distances from the mean."""

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self._squares += before * (value - self.mean)

    @property
    def std(self) -> float:
        """Return the unbiased standard deviation; 0 of fewer than two values."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0


class ScoreNormaliser:
    """Normalises the scores of one reward model; what `running` has seen is forgotten with the process."""

    def __init__(self, config: RewardModel) -> None:
        self._config = config
        self.moments = RunningMoments()

    def normalise(self, scores: Sequence[float], counts: Sequence[bool]) -> list[float]:
        """Return the reward of each score.

        Args:
            scores: Finite, of one batch.
            counts: Which of them enter the running figures (those of training samples).

        Returns:
            clip((score - mean) / std), and with `running` minus the running mean over the running deviation before the clip (a
            deviation of 0, as of a first score, divides by 1).
        """
        config = self._config
        fixed = [(score - config.mean) / config.std for score in scores]
        if config.normalise == "running":
            for score, is_counted in zip(fixed, counts, strict=True):
                if is_counted:
                    self.moments.add(score)
            fixed = [(score - self.moments.mean) / (self.moments.std or 1.0) for score in fixed]
        if config.clip is None:
            return fixed
        return [min(max(score, -config.clip), config.clip) for score in fixed]
