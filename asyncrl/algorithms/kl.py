"""Estimators of KL(policy || reference) from the sampled token alone, one value a token.

k1 is unbiased and may be negative; k2 is biased, low variance; k3 is unbiased and never negative. `cap` bounds a value to
[-cap, cap], with gradient 0 outside. Source: Schulman 2020, "Approximating KL divergence". Called by algorithms/diagnostics.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

KLEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Return d = logprobs - reference."""
    return logprobs - reference_logprobs


def k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Return d^2 / 2."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(-d) - 1 + d."""
    difference = logprobs - reference_logprobs
    return torch.expm1(-difference) + difference


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def capped(kl: torch.Tensor, cap: float) -> torch.Tensor:
    """Return `kl` bounded to [-cap, cap]."""
    return kl.clamp(-cap, cap)
