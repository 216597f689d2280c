"""How a critic is trained and judged: the value loss and explained variance. Pure.

Legend: N tokens of one micro-batch laid end to end, S sequences of it, as in types.py.

Invariants: whatever stands at a masked token (NaN too) changes no value and no gradient; old values and returns carry no
gradient; the losses of micro-batches and ranks add up to that of the whole update. Called by learner/policy_objective.py and
learner/micro_batches.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.types import Denominators, masked


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """One micro-batch, flat."""

    values: torch.Tensor
    """float [N], the critic now, with gradient."""
    old_values: torch.Tensor
    """float [N], the critic before this step's first update."""
    returns: torch.Tensor
    """float [N], what the values are trained towards."""
    mask: torch.Tensor
    """bool [N], true on trained tokens."""
    sequence_ids: torch.Tensor
    """int64 [N], in [0, S)."""
    num_sequences: int
    """S."""
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class ValueOutputs:
    """The scalar to differentiate, and what diagnostics read."""

    loss: torch.Tensor
    """float [], this micro-batch's share of the update's value loss."""
    clipped: torch.Tensor
    """bool [N], the clipped term was strictly larger: the token has no gradient. False at masked tokens."""


def value_loss(inputs: ValueInputs, *, clip: float, aggregation: str) -> ValueOutputs:
    """Compute 0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2), aggregated.

    Args:
        inputs: One micro-batch.
        clip: c, how far a value moves from its old one before its loss stops falling; inf: 0.5 (v - R)^2.
        aggregation: A name in AGGREGATIONS.

    Source: OpenAI baselines `ppo2`; InstructGPT (arXiv 2203.02155); verl `compute_value_loss`.
    """
    values = masked(inputs.values, inputs.mask)
    old_values = masked(inputs.old_values.detach(), inputs.mask)
    returns = masked(inputs.returns.detach(), inputs.mask)
    errors = (values - returns).square()
    clipped_errors = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    clipped = clipped_errors.detach() > errors.detach()
    larger = torch.maximum(errors, clipped_errors)
    loss = AGGREGATIONS[aggregation](0.5 * larger, inputs.mask, inputs.sequence_ids, inputs.num_sequences, inputs.denominators)
    return ValueOutputs(loss, clipped)


@torch.no_grad()
def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Return 1 - var(R - v) / var(R) over the trained tokens: 1 is a perfect critic, 0 no better than a constant.

    Args:
        values: float [N], of the critic before the step: those the returns were made with.
        returns: float [N].
        mask: bool [N]; at least one token is true.

    Returns:
        At most 1; 0 where the returns do not vary beyond rounding: there is nothing to explain.

    Source: Schulman et al., OpenAI baselines `explained_variance`.
    """
    values_M, returns_M = values[mask].double(), returns[mask].double()
    spread = returns_M.var(correction=0).item()
    rounding = torch.finfo(returns.dtype).eps * max(returns_M.abs().max().item(), values_M.abs().max().item())
    if spread <= (4.0 * rounding) ** 2:
        return 0.0
    return 1.0 - (returns_M - values_M).var(correction=0).item() / spread
