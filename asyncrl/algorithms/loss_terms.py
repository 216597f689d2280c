"""What all policy losses share: corrections, entropy bonus, KL penalty, and aggregation to one number.

Legend: N tokens, S sequences. A loss computes its objective X [N] and hands it to `finish`.

Aggregation is by name: local numerator over the global denominator. Over any split of the sequences into micro-batches and
ranks, the parts add up to the value of the whole. A sequence is never split. (A framework that averages gradients over R ranks
multiplies the result by R.) Where rejected tokens do not count, `mask` is of the kept tokens, in numerator and denominator alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.algorithms.corrections import correct
from asyncrl.algorithms.kl import kl_penalty
from asyncrl.algorithms.types import (
    CorrectionOutputs,
    Denominators,
    LossConfig,
    LossInputs,
    LossOutputs,
    log_ratio,
    masked,
    segment_sum,
)


@dataclass(frozen=True, slots=True)
class Objective:
    """A policy loss a token, before corrections, and where it was clipped, bool [N] (None: nowhere)."""

    loss: torch.Tensor
    """float [N], X, with gradient."""
    clipped: torch.Tensor | None = None
    dual_clipped: torch.Tensor | None = None


def corrections_of(inputs: LossInputs, config: LossConfig) -> CorrectionOutputs:
    """Return the update's corrections where the caller has them, else those of this micro-batch."""
    return inputs.corrections if inputs.corrections is not None else correct(inputs, config.corrections)


def known_advantages(inputs: LossInputs) -> torch.Tensor:
    """Return the advantages [N], detached, 0 at masked tokens."""
    return masked(inputs.advantages.detach(), inputs.mask)


def finish(
    inputs: LossInputs, config: LossConfig, objective: Objective, corrections: CorrectionOutputs | None = None
) -> LossOutputs:
    """Weigh the objective, add entropy bonus, KL penalty and squared log-ratio, and aggregate.

    Weights multiply the policy term alone. Under denominator `all`, a dropped token keeps its entropy bonus and its penalties
    (as in TRL, whose KL term is added after the weights, and in prime-rl, whose squared log-ratio is); under `kept` it is out of
    every term (as in verl, whose rejection changes the mask).

    Args:
        inputs: The micro-batch.
        config: What the run says.
        objective: X and where it was clipped.
        corrections: Weights and kept tokens; None: those of `corrections_of`.

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
    """Count what the loss of these tokens divides by; counts of micro-batches and ranks add up.

    Args:
        counted: bool [N], trained tokens; under `denominator = "kept"` without those that a correction dropped.
        sequence_ids: int64 [N], in [0, S); a sequence without a counted token does not count.
        num_sequences: S.
        constant: Handed on.

    Source: all trained tokens: AReaL, OpenRLHF and NeMo-RL; kept ones: verl's rejection mask and M2PO as AReaL has it.
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
"""What the sum over an update's trained tokens is divided by (at least 1: where all is rejected, the loss is 0 and not 0/0).

Source: `token-mean`: DAPO (arXiv 2503.14476), equation 8; `token-sum`: verl, Tinker; `seq-mean-token-mean`: DeepSeekMath (arXiv
2402.03300), equation 3, each token first divided by its sequence's length; `seq-mean-token-sum`: REINFORCE over sequences, verl;
`constant`: Dr. GRPO (arXiv 2503.20783), section 3.2, in verl `seq-mean-token-sum-norm`.
"""


def aggregate(
    name: str, loss: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, denominators: Denominators
) -> torch.Tensor:
    """Return this micro-batch's share [] of the loss.

    Args:
        name: In AGGREGATIONS.
        loss: float [N].
        mask: bool [N], the tokens that count.
        sequence_ids: int64 [N].
        num_sequences: S.
        denominators: Of the whole update.
    """
    loss = masked(loss, mask)
    if name == "seq-mean-token-mean":
        lengths_S = segment_sum(mask.to(loss.dtype), sequence_ids, num_sequences)
        loss = segment_sum(loss, sequence_ids, num_sequences) / lengths_S.clamp(min=1)
    return loss.sum() / AGGREGATIONS[name](denominators)
