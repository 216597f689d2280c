"""Estimators of KL(policy || reference) from the sampled token alone, one value a token, and what a penalty makes of them.

Legend: N tokens, d = logprobs - reference. k1 is unbiased and may be negative; k2 is biased, low variance; k3 is unbiased and
never negative. That is said of the values: differentiated as they stand on the policy's own samples, k1's gradient is zero on
average, k3's is that of KL(reference || policy), and k2's is the unbiased one. Source: Schulman 2020, "Approximating KL
divergence"; on the gradients: Liu et al. 2025 (arXiv 2510.01555).

Also here: the proximal policy without a forward pass of its own, between the behaviour and the current policy, by version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.returns import LOG_RATIO_LIMIT
from asyncrl.algorithms.types import log_ratio, masked
from asyncrl.config.algorithm import KLConfig

MAX_ADAPTIVE_ERROR = 0.2
"""Bound of the relative error that the adaptive coefficient answers to."""


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Return exp(-d) - 1 + d, with d held within plus and minus LOG_RATIO_LIMIT (verl does the same)."""
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-difference) + difference


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": k3,
    "abs": torch.abs,
}
"""Of d [N]. `abs` estimates no KL but is 0 where the policies agree (verl)."""


def kl_penalty(
    logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor, config: KLConfig
) -> torch.Tensor:
    """Return the penalty [N] to add to the loss, without coefficient; 0 at masked tokens.

    `config.gradient` says what is differentiated. `own`: the estimator. `k2`: the value stays the estimator's, the gradient is
    that of k2, d (straight through), and 0 where the cap holds the value. `ratio`: the estimator times current / sampler, with
    the gradient through both; value and gradient (k1, k3) are unbiased however old the sampler is, as far as the ratio is within
    LOG_RATIO_LIMIT.

    Values are held in [-cap, cap], with gradient 0 outside (verl, AReaL and OpenRLHF: 10; TRL: inf).

    Args:
        logprobs: float [N], current policy, with gradient.
        sampler_logprobs: float [N], of the policy that sampled the tokens; read only where `config.gradient` is `ratio`.
        reference_logprobs: float [N].
        mask: bool [N].
        config: `estimator`, `gradient` and `cap` are read.

    Source: `k2`: verl's `k1+` and `k3+` (which keep the gradient beyond the cap) and the gradient analysis of arXiv 2510.01555;
    `ratio`: DeepSeek-V3.2 (arXiv 2512.02556), TRL `use_bias_correction_kl`, which takes the old policy for the sampler.
    """
    difference = masked(logprobs, mask) - masked(reference_logprobs.detach(), mask)
    free = KL_ESTIMATORS[config.estimator](difference)
    value = free.clamp(-config.cap, config.cap)
    if config.gradient == "k2":
        square = masked(KL_ESTIMATORS["k2"](difference), free.detach().abs() <= config.cap)
        return value.detach() + square - square.detach()
    if config.gradient == "ratio":
        return value * log_ratio(logprobs, sampler_logprobs.detach(), mask).exp()
    return value


@torch.no_grad()
def kl_for_rewards(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor, config: KLConfig
) -> torch.Tensor:
    """Return the estimate [N] to take from each token's reward, times the coefficient; detached, 0 at masked tokens.

    Args:
        logprobs: float [N], of the policy that the KL is of: the proximal one.
        reference_logprobs: float [N].
        mask: bool [N].
        config: `estimator` and `cap` are read.

    Source: InstructGPT (arXiv 2203.02155), equation 2; verl `apply_kl_penalty`.
    """
    return KL_ESTIMATORS[config.estimator](masked(logprobs - reference_logprobs, mask)).clamp(-config.cap, config.cap)


def next_coefficient(coefficient: float, *, measured_kl: float, target: float, horizon: int, num_samples: int) -> float:
    """Return the KL coefficient after a step whose mean KL was measured.

    coefficient * (1 + e * n), e = clip(measured_kl / target - 1, -0.2, 0.2), n = num_samples / horizon, at most 1 (beyond 5 the
    coefficient would turn negative).

    Args:
        coefficient: The one in force, over 0.
        measured_kl: Mean of the penalty's own estimate over the step's trained tokens.
        target: Over 0.
        horizon: Samples.
        num_samples: Samples of the step.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2; verl `AdaptiveKLController`.
    """
    error = min(max(measured_kl / target - 1.0, -MAX_ADAPTIVE_ERROR), MAX_ADAPTIVE_ERROR)
    return coefficient * (1.0 + error * min(num_samples / horizon, 1.0))


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
