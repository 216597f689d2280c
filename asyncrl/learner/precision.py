"""Dynamic loss scaling for float16, whose smallest gradients vanish and whose largest are infinite.

Invariant: the scale is a power of two, so that scaling and unscaling round nothing. Called by learner/optim.py.
"""

from __future__ import annotations

import torch

FIRST_SCALE = 2.0**16
SMALLEST_SCALE = 1.0
GROWTH_INTERVAL = 2000
"""Good updates in a row after which the scale doubles."""


class LossScale:
    """What float16 losses are multiplied by before the backward pass.

    Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2; numbers of `torch.amp.GradScaler`.

    Example:
        >>> scale = LossScale()
        >>> scale.shrink(), scale.value
        (True, 32768.0)
    """

    def __init__(self) -> None:
        self.value = FIRST_SCALE
        self._good_updates = 0

    def note_update(self) -> None:
        """Count an update that was made."""
        self._good_updates += 1
        if self._good_updates >= GROWTH_INTERVAL:
            self.value, self._good_updates = self.value * 2.0, 0

    def shrink(self) -> bool:
        """Halve the scale after an overflow; return False where it cannot be the scale's fault any more."""
        self._good_updates = 0
        if self.value <= SMALLEST_SCALE:
            return False
        self.value /= 2.0
        return True

    def to_tensor(self) -> torch.Tensor:
        """Return float64 [2], all there is to save."""
        return torch.tensor([self.value, self._good_updates], dtype=torch.float64)

    def load_tensor(self, saved: torch.Tensor) -> None:
        """Take over what `to_tensor` gave."""
        self.value, self._good_updates = float(saved[0]), int(saved[1])
