"""Losses on pairs: DPO, label-smoothed and robust DPO, hinge and IPO, from token log-probabilities or given margins. Pure.

Legend: N tokens of one micro-batch, concatenated, S sequences, P pairs of this micro-batch. The margin of a pair is
(policy - reference) of the chosen sequence minus (policy - reference) of the rejected one.

Invariants: a pair's two sequences are in the same micro-batch; the value at a masked token (even NaN) changes no value and no
gradient; sequences without a pair (pair id -1) have no gradient; the loss is the sum over this micro-batch's pairs divided by the
*global* number of pairs, so that micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.types import LossInputs, segment_sum, sequence_sum
from asyncrl.config.algorithm import PreferenceConfig


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which sequences of a micro-batch make pairs."""

    ids: torch.Tensor
    """int64 [S], a number that both sequences of a pair have; -1: no pair."""
    is_chosen: torch.Tensor
    """bool [S]."""
    num_pairs: float
    """Pairs of the whole update: all micro-batches, all ranks."""


MarginLoss = Callable[[torch.Tensor, PreferenceConfig], torch.Tensor]


def sigmoid(margins: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Return the losses [P] of margins D [P], with label smoothing e.

    -(1 - e) log s(beta D) - e log s(-beta D), where s is the logistic function.

    Source: Rafailov et al. 2023 (DPO, equation 7); the smoothed form is Mitchell 2023, "A note on DPO with noisy preferences".
    """
    logits = config.beta * margins
    return -(1.0 - config.label_smoothing) * logsigmoid(logits) - config.label_smoothing * logsigmoid(-logits)


def robust(margins: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Return losses [P] whose mean equals that of plain DPO on clean pairs, if a share e of the pairs is in the wrong order.

    (-(1 - e) log s(beta D) + e log s(-beta D)) / (1 - 2e).

    Source: Chowdhury et al. 2024 (rDPO, arXiv 2403.00409), equation 12; TRL `loss_type="robust"`.
    """
    logits, wrong = config.beta * margins, config.label_smoothing
    return (wrong * logsigmoid(-logits) - (1.0 - wrong) * logsigmoid(logits)) / (1.0 - 2.0 * wrong)


def hinge(margins: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Return max(0, 1 - beta D) for margins D [P].

    Source: SLiC (arXiv 2305.10425) as normalized in RSO (arXiv 2309.06657), section 3.2; TRL `loss_type="hinge"`.
    """
    return (1.0 - config.beta * margins).relu()


def ipo(margins: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Return (D - 1 / (2 beta))^2 for margins D [P].

    Source: Azar et al. 2023 (IPO, equation 17). D from sums in OpenRLHF, from per-token averages in TRL and AReaL.
    """
    return (margins - 1.0 / (2.0 * config.beta)).square()


PREFERENCE_LOSSES: dict[str, MarginLoss] = {"sigmoid": sigmoid, "robust": robust, "hinge": hinge, "ipo": ipo}
"""Losses by the value of `algorithm.preference.loss`."""


def preference_loss(inputs: LossInputs, pairs: Pairs, config: PreferenceConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of one micro-batch of pairs, and metrics of each pair.

    Returns:
        This micro-batch's share [] of the update's loss; and, by metric, one number per pair [P], by ascending pair id, detached:
        its loss; whether its margin is positive (the policy prefers the chosen one more than the reference does); the margin that
        the loss used, from sums or from per-token averages; and beta (policy - reference), always summed over the chosen and over
        the rejected sequence.
    """
    assert inputs.reference_logprobs is not None, "a preference loss needs LossInputs.reference_logprobs"
    log_ratios_S = sequence_sum(inputs.logprobs - inputs.reference_logprobs, inputs)
    lengths_S = segment_sum(inputs.mask.to(log_ratios_S.dtype), inputs.sequence_ids, inputs.num_sequences).clamp(min=1.0)
    scores_S = log_ratios_S / lengths_S if config.average else log_ratios_S
    # The chosen and the rejected sequences, both by ascending pair id.
    sides = []
    for of_side in (pairs.is_chosen, ~pairs.is_chosen):
        sequences = (of_side & (pairs.ids >= 0)).nonzero().flatten()
        sides.append(sequences[pairs.ids[sequences].argsort()])
    chosen_P, rejected_P = sides
    assert torch.equal(pairs.ids[chosen_P], pairs.ids[rejected_P]), "a pair needs one chosen and one rejected sequence"
    margins_P = scores_S[chosen_P] - scores_S[rejected_P]
    losses_P = PREFERENCE_LOSSES[config.loss](margins_P, config)
    rewards_S = config.beta * log_ratios_S.detach()
    figures = {
        "dpo/loss": losses_P.detach(),
        "dpo/accuracy": margins_P.detach() > 0,
        "dpo/margin": margins_P.detach(),
        "dpo/chosen_reward": rewards_S[chosen_P],
        "dpo/rejected_reward": rewards_S[rejected_P],
    }
    return losses_P.sum() / pairs.num_pairs, figures
