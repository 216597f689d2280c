"""Terms common to all policy losses: corrections, entropy bonus, KL penalty, and aggregation to one number.

Legend: N tokens, S sequences. A loss computes its objective X [N] and passes it to `finish`.

Aggregation divides a local numerator by the global denominator, chosen by name. For any split of the sequences into
micro-batches and ranks, the parts add up to the value of the whole. A sequence is never split. (A framework that averages
gradients over R ranks multiplies the result by R.) If rejected tokens do not count, `mask` has only the kept tokens.

Also here: the KL penalty from its estimators (types.py), and the proximal policy without a separate forward pass, interpolated
between the behaviour and the current policy by version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.types import (
    KL_ESTIMATORS,
    CorrectionOutputs,
    Denominators,
    LossConfig,
    LossInputs,
    LossOutputs,
    log_ratio,
    masked,
    segment_sum,
)
from asyncrl.config.algorithm import KLConfig

MAX_ADAPTIVE_ERROR = 0.2
"""Bound of the relative error that the adaptive coefficient uses."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The policy loss of each token, before corrections, and where it was clipped, bool [N] (None: nowhere)."""

    loss: torch.Tensor
    """float [N], X, with gradient."""
    clipped: torch.Tensor | None = None
    dual_clipped: torch.Tensor | None = None


def corrections_of(inputs: LossInputs, config: LossConfig) -> CorrectionOutputs:
    """Return the update's corrections if the caller has them, else those of this micro-batch."""
    return inputs.corrections if inputs.corrections is not None else correct(inputs, config.corrections)


def known_advantages(inputs: LossInputs) -> torch.Tensor:
    """Return the advantages [N], detached, 0 at masked tokens."""
    return masked(inputs.advantages.detach(), inputs.mask)


def finish(
    inputs: LossInputs, config: LossConfig, objective: Objective, corrections: CorrectionOutputs | None = None
) -> LossOutputs:
    """Weight the objective, add entropy bonus, KL penalty and squared log-ratio, and aggregate.

    Weights multiply only the policy term. Under denominator `all`, a dropped token keeps its entropy bonus and its penalties
    (TRL adds its KL term, and prime-rl its squared log-ratio, after the weights); under `kept` it is removed from every term (as
    in verl, whose rejection changes the mask).

    Args:
        inputs: The micro-batch.
        config: Coefficients, aggregation and denominator.
        objective: X and where it was clipped.
        corrections: Weights and kept tokens; None: the result of `corrections_of`.

    Returns:
        This micro-batch's share of the loss, over the global denominators.
    """
    corrections = corrections_of(inputs, config) if corrections is None else corrections
    loss = objective.loss * corrections.weights
    if config.entropy_coefficient:
        assert inputs.entropy is not None, "entropy_coefficient is set and LossInputs.entropy is missing"
        loss = loss - config.entropy_coefficient * masked(inputs.entropy, inputs.mask)
    if config.log_ratio_penalty:
        distance = log_ratio(inputs.logprobs, inputs.behaviour_logprobs.detach(), inputs.mask)
        loss = loss + config.log_ratio_penalty * distance.square()
    reference_kl = None
    if config.kl is not None:
        assert inputs.reference_logprobs is not None, "a KL penalty is set and LossInputs.reference_logprobs is missing"
        penalty = kl_penalty(inputs.logprobs, inputs.behaviour_logprobs, inputs.reference_logprobs, inputs.mask, config.kl)
        loss = loss + config.kl_coefficient * penalty
        reference_kl = penalty.detach()
    counted = corrections.kept if config.denominator == "kept" else inputs.mask
    total = aggregate(config.aggregation, loss, counted, inputs.sequence_ids, inputs.num_sequences, inputs.denominators)
    nowhere = torch.zeros_like(inputs.mask)
    return LossOutputs(
        loss=total,
        weights=corrections.weights,
        clipped=nowhere if objective.clipped is None else objective.clipped.detach(),
        dual_clipped=nowhere if objective.dual_clipped is None else objective.dual_clipped.detach(),
        kept=corrections.kept,
        reference_kl=reference_kl,
    )


def count_denominators(
    counted: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, constant: float = 1.0
) -> Denominators:
    """Return the denominators for the loss of these tokens; those of micro-batches and ranks add up.

    Args:
        counted: bool [N], trained tokens; under `denominator = "kept"` without those that a correction dropped.
        sequence_ids: int64 [N], in [0, S); a sequence without a counted token does not count.
        num_sequences: S.
        constant: Passed on unchanged.

    Source: all trained tokens: AReaL, OpenRLHF and NeMo-RL; kept tokens: verl's rejection mask, and M2PO in AReaL.
    """
    tokens_S = segment_sum(counted.to(torch.float64), sequence_ids, num_sequences)
    return Denominators(float(tokens_S.sum().item()), float((tokens_S > 0).sum().item()), constant)


AGGREGATIONS: dict[str, Callable[[Denominators], float]] = {
    "token-mean": lambda counts: max(counts.num_tokens, 1.0),
    "token-sum": lambda _: 1.0,
    "seq-mean-token-mean": lambda counts: max(counts.num_sequences, 1.0),
    "seq-mean-token-sum": lambda counts: max(counts.num_sequences, 1.0),
    "seq-mean-token-sum-norm": lambda counts: max(counts.num_sequences, 1.0) * counts.constant,
    "constant": lambda counts: max(counts.num_sequences, 1.0) * counts.constant,
}
"""Divisors of the sum over an update's trained tokens. At least 1: if all tokens are rejected, the loss is 0, not 0/0.

Source: `token-mean`: DAPO (arXiv 2503.14476), equation 8; `token-sum`: verl, Tinker; `seq-mean-token-mean`: DeepSeekMath (arXiv
2402.03300), equation 3, each token first divided by its sequence's length; `seq-mean-token-sum`: REINFORCE over sequences, verl;
`constant`: Dr. GRPO (arXiv 2503.20783), section 3.2, in verl `seq-mean-token-sum-norm`.
"""


def aggregate(
    name: str, loss: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, denominators: Denominators
) -> torch.Tensor:
    """Return this micro-batch's share [] of the loss.

    Args:
        name: A key of AGGREGATIONS.
        loss: float [N].
        mask: bool [N], the tokens that count.
        sequence_ids: int64 [N].
        num_sequences: S.
        denominators: Those of the whole update.
    """
    loss = masked(loss, mask)
    if name == "seq-mean-token-mean":
        lengths_S = segment_sum(mask.to(loss.dtype), sequence_ids, num_sequences)
        loss = segment_sum(loss, sequence_ids, num_sequences) / lengths_S.clamp(min=1)
    return loss.sum() / AGGREGATIONS[name](denominators)


def kl_penalty(
    logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor, config: KLConfig
) -> torch.Tensor:
    """Return the penalty [N] to add to the loss, without coefficient; 0 at masked tokens.

    `config.gradient` sets what is differentiated. `own`: the estimator. `k2`: the value is the estimator's, the gradient is that
    of k2, d (straight through), and 0 where the cap limits the value. `ratio`: the estimator times current / sampler, with the
    gradient through both; value and gradient (k1, k3) are unbiased for a sampler of any age, while the ratio is within
    LOG_RATIO_LIMIT.

    Values are clamped to [-cap, cap], with gradient 0 outside (verl, AReaL and OpenRLHF: 10; TRL: inf).

    Args:
        logprobs: float [N], current policy, with gradient.
        sampler_logprobs: float [N], of the policy that sampled the tokens; read only if `config.gradient` is `ratio`.
        reference_logprobs: float [N].
        mask: bool [N].
        config: `estimator`, `gradient` and `cap` are read.

    Source: `k2`: verl's `k1+` and `k3+` (which keep the gradient beyond the cap) and the gradient analysis of arXiv 2510.01555;
    `ratio`: DeepSeek-V3.2 (arXiv 2512.02556), TRL `use_bias_correction_kl`, which uses the old policy as the sampler.
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


def next_coefficient(coefficient: float, *, measured_kl: float, target: float, horizon: int, num_samples: int) -> float:
    """Return the KL coefficient for the step after the one whose mean KL was measured.

    coefficient * (1 + e * n), e = clip(measured_kl / target - 1, -0.2, 0.2), n = num_samples / horizon, at most 1 (beyond 5 the
    coefficient would turn negative).

    Args:
        coefficient: The present coefficient, greater than 0.
        measured_kl: Mean of the penalty's own estimate over the step's trained tokens.
        target: Greater than 0.
        horizon: Samples.
        num_samples: Samples of the step.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2; verl `AdaptiveKLController`.
    """
    error = min(max(measured_kl / target - 1.0, -MAX_ADAPTIVE_ERROR), MAX_ADAPTIVE_ERROR)
    return coefficient * (1.0 + error * min(num_samples / horizon, 1.0))


@torch.no_grad()
def interpolated_proximal(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, versions: torch.Tensor, *, current_version: int
) -> torch.Tensor:
    """Return behaviour + alpha (current - behaviour) [N], alpha = (v_cur - 1 - v) / (v_cur - v); detached.

    This assumes that the proximal policy is one version before the current one, and that log-probabilities are linear in the
    version. Lags 0 and 1 both give alpha 0, the behaviour policy itself; so does a token of unknown version (negative).

    Args:
        logprobs: float [N], current policy.
        behaviour_logprobs: float [N].
        versions: int64 [N], the version v that sampled each token.
        current_version: v_cur, the version of the weights being trained.

    Source: A-3PO (arXiv 2512.06547); AReaL `compute_prox_logp_approximations`, method `loglinear`.
    """
    lag = (current_version - versions).to(logprobs.dtype)
    alpha = torch.where((versions >= 0) & (lag > 0), (lag - 1) / lag.clamp(min=1), 0.0)
    return behaviour_logprobs + alpha * (logprobs - behaviour_logprobs)
