"""From a loss a token to one number: local numerator over the global denominator, chosen by name.

Invariant: over any split of the sequences into micro-batches and ranks, the parts add up to the value of the whole. A sequence
is never split. (A framework that averages gradients over R ranks multiplies the result by R.) Where rejected tokens do not
count, `mask` is of the kept tokens, in numerator and denominator alike. Called by algorithms/loss_terms.py,
algorithms/values.py and, for the counts, by learner/planned_corrections.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.types import Denominators, masked, segment_sum

Aggregation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Denominators], torch.Tensor]
"""(loss [N], mask [N], sequence_ids [N], S, denominators) -> scalar."""


def count_denominators(
    mask: torch.Tensor,
    kept: torch.Tensor,
    sequence_ids: torch.Tensor,
    num_sequences: int,
    *,
    constant: float = 1.0,
    denominator: str = "all",
) -> Denominators:
    """Count what the loss of these tokens divides by; counts of micro-batches and ranks add up.

    Args:
        mask: bool [N], trained tokens.
        kept: bool [N], of `CorrectionOutputs`; read only where `denominator` is `kept`.
        sequence_ids: int64 [N], in [0, S).
        num_sequences: S.
        constant: Handed on.
        denominator: `all`: rejected tokens count; `kept`: they do not, nor does a sequence without a kept token.

    Source: `all`: AReaL, OpenRLHF and NeMo-RL; `kept`: verl's rejection mask and M2PO as AReaL has it.
    """
    counted = mask & kept if denominator == "kept" else mask
    tokens_S = segment_sum(counted.to(torch.float64), sequence_ids, num_sequences)
    return Denominators(
        num_tokens=float(tokens_S.sum().item()), num_sequences=float((tokens_S > 0).sum().item()), constant=constant
    )


def token_mean(
    loss: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, denominators: Denominators
) -> torch.Tensor:
    """Return the sum over trained tokens / all trained tokens of the update. Source: DAPO (arXiv 2503.14476), equation 8."""
    del sequence_ids, num_sequences
    return masked(loss, mask).sum() / _at_least_one(denominators.num_tokens)


def seq_mean_token_mean(
    loss: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, denominators: Denominators
) -> torch.Tensor:
    """Return the sum over sequences of their token mean / all sequences. Source: DeepSeekMath (arXiv 2402.03300), equation 3."""
    sums_S = segment_sum(masked(loss, mask), sequence_ids, num_sequences)
    lengths_S = segment_sum(mask.to(loss.dtype), sequence_ids, num_sequences)
    return (sums_S / lengths_S.clamp(min=1)).sum() / _at_least_one(denominators.num_sequences)


def seq_mean_token_sum(
    loss: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, denominators: Denominators
) -> torch.Tensor:
    """Return the sum over trained tokens / all sequences. Source: REINFORCE over sequences; verl `seq-mean-token-sum`."""
    del sequence_ids, num_sequences
    return masked(loss, mask).sum() / _at_least_one(denominators.num_sequences)


def constant(
    loss: torch.Tensor, mask: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, denominators: Denominators
) -> torch.Tensor:
    """Return the sum over trained tokens / (all sequences x constant). Source: Dr. GRPO (arXiv 2503.20783), section 3.2."""
    return seq_mean_token_sum(loss, mask, sequence_ids, num_sequences, denominators) / denominators.constant


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "constant": constant,
}


def _at_least_one(count: float) -> float:
    """Where corrections rejected everything, the loss is 0 and not 0/0."""
    return max(count, 1.0)
