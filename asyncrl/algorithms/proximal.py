"""The proximal policy without a forward of its own: between the behaviour and the current policy, by version.

Legend: N tokens. Called by learner/step.py where `algorithm.proximal` is `loglinear`.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.types import masked


@torch.no_grad()
def interpolated_proximal(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, versions: torch.Tensor, mask: torch.Tensor, *, current_version: int
) -> torch.Tensor:
    """Return behaviour + alpha (current - behaviour) [N], alpha = (v_cur - 1 - v) / (v_cur - v); detached, 0 at masked tokens.

    The proximal policy is taken to be one version before the current one, and log-probabilities to move linearly in the version.
    Lags 0 and 1 both give alpha 0, the behaviour policy itself; so does a token whose version is unknown (negative).

    Args:
        logprobs: float [N], current policy.
        behaviour_logprobs: float [N].
        versions: int64 [N], the version v that sampled each token.
        mask: bool [N].
        current_version: v_cur, the version of the weights being trained.

    Source: A-3PO (arXiv 2512.06547); AReaL `compute_prox_logp_approximations`, method `loglinear`.
    """
    lag = (current_version - versions).to(logprobs.dtype)
    alpha = torch.where((versions >= 0) & (lag > 0), (lag - 1) / lag.clamp(min=1), 0.0)
    return masked(behaviour_logprobs + alpha * (logprobs - behaviour_logprobs), mask)
