"""Losses on pairs: DPO, label-smoothed and robust DPO, hinge and IPO, on token log-probabilities or on given margins. Pure.

Legend: N tokens of one micro-batch laid end to end, S sequences, P pairs of this micro-batch. The margin of a pair is
(policy - reference) of the chosen sequence minus (policy - reference) of the rejected one.

Invariants: a pair's two sequences share a micro-batch; whatever stands at a masked token (NaN too) changes no value and no
gradient; sequences of no pair (pair id -1) have no gradient; the loss is a sum over this micro-batch's pairs over the *global*
number of pairs, so that micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.types import masked, segment_sum
from asyncrl.config.algorithm import PreferenceConfig


@dataclass(frozen=True, slots=True)
class PreferenceInputs:
    """One micro-batch, flat."""

    logprobs: torch.Tensor
    """float [N], current policy, with gradient."""
    reference_logprobs: torch.Tensor
    """float [N]."""
    mask: torch.Tensor
    """bool [N], true on trained tokens."""
    sequence_ids: torch.Tensor
    """int64 [N], in [0, S)."""
    num_sequences: int
    """S."""
    pair_ids: torch.Tensor
    """int64 [S], any number that both sequences of a pair share; -1: of no pair."""
    is_chosen: torch.Tensor
    """bool [S]."""
    num_pairs: float
    """Pairs of the whole update: all micro-batches, all ranks."""


@dataclass(frozen=True, slots=True)
class PreferenceOutputs:
    """The scalar to differentiate, and one number a pair, by rising pair id. All but `loss` are detached."""

    loss: torch.Tensor
    """float [], this micro-batch's share of the update's loss."""
    losses: torch.Tensor
    """float [P]."""
    margins: torch.Tensor
    """float [P], as the loss saw them: from sums, or from per-token averages."""
    correct: torch.Tensor
    """bool [P], the margin is positive: the policy prefers the chosen one more than the reference does."""
    chosen_rewards: torch.Tensor
    """float [P], beta (policy - reference), summed over the chosen sequence whatever the margins are made of."""
    rejected_rewards: torch.Tensor
    """float [P], the same of the rejected one."""


MarginLoss = Callable[[torch.Tensor, PreferenceConfig], torch.Tensor]


def sigmoid(margins: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Return the losses [P] of margins D [P], with label smoothing e.

    -(1 - e) log s(beta D) - e log s(-beta D), where s is the logistic function.

    Source: Rafailov et al. 2023 (DPO, equation 7); the smoothed form is Mitchell 2023, "A note on DPO with noisy preferences".
    """
    logits = config.beta * margins
    return -(1.0 - config.label_smoothing) * logsigmoid(logits) - config.label_smoothing * logsigmoid(-logits)


def robust(margins: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Return the losses [P] whose mean is that of plain DPO on clean pairs, where a share e of the pairs is the wrong way round.

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
"""By `algorithm.preference.loss`."""


def preference_loss(inputs: PreferenceInputs, config: PreferenceConfig) -> PreferenceOutputs:
    """Return the loss of one micro-batch of pairs, and what it says about them."""
    log_ratios_S = segment_sum(
        masked(inputs.logprobs - inputs.reference_logprobs, inputs.mask), inputs.sequence_ids, inputs.num_sequences
    )
    lengths_S = segment_sum(inputs.mask.to(log_ratios_S.dtype), inputs.sequence_ids, inputs.num_sequences).clamp(min=1.0)
    scores_S = log_ratios_S / lengths_S if config.average else log_ratios_S
    chosen_P, rejected_P = _sides(inputs.pair_ids, inputs.is_chosen)
    margins_P = scores_S[chosen_P] - scores_S[rejected_P]
    losses_P = PREFERENCE_LOSSES[config.loss](margins_P, config)
    rewards_S = config.beta * log_ratios_S.detach()
    return PreferenceOutputs(
        loss=losses_P.sum() / inputs.num_pairs,
        losses=losses_P.detach(),
        margins=margins_P.detach(),
        correct=margins_P.detach() > 0,
        chosen_rewards=rewards_S[chosen_P],
        rejected_rewards=rewards_S[rejected_P],
    )


def _sides(pair_ids: torch.Tensor, is_chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences that are chosen [P] and rejected [P], both by rising pair id."""
    sides = []
    for of_side in (is_chosen, ~is_chosen):
        sequences = (of_side & (pair_ids >= 0)).nonzero().flatten()
        sides.append(sequences[pair_ids[sequences].argsort()])
    chosen, rejected = sides
    chosen_ids, rejected_ids = pair_ids[chosen].tolist(), pair_ids[rejected].tolist()
    assert chosen_ids == rejected_ids, (
        f"pairs need one chosen and one rejected sequence each, got {chosen_ids} and {rejected_ids}"
    )
    assert len(set(chosen_ids)) == len(chosen_ids), f"a pair has one chosen sequence, got pair ids {chosen_ids}"
    return chosen, rejected
