"""Corrections that drop or fade tokens for another reason than the size of their importance weight.

Legend: N tokens, S sequences; rho = proximal / behaviour. Called through corrections.CORRECTIONS.
"""

from __future__ import annotations

import math

import torch

from asyncrl.algorithms.ratios import log_rho, sequence_mean, sequence_sum
from asyncrl.algorithms.types import CorrectionOutputs, LossInputs, masked
from asyncrl.config.corrections import OffPolicySequenceMask, StalenessMask, StalenessWeight, Veto


def veto(inputs: LossInputs, config: Veto) -> CorrectionOutputs:
    """Drop every sequence that has a token whose rho is under the threshold.

    Source: verl `rollout_token_veto_threshold`; slime `use_mis` veto.
    """
    catastrophic = (log_rho(inputs) < math.log(config.threshold)).to(inputs.behaviour_logprobs.dtype)
    return _keep(inputs, (sequence_sum(catastrophic, inputs) == 0)[inputs.sequence_ids])


def opsm(inputs: LossInputs, config: OffPolicySequenceMask) -> CorrectionOutputs:
    """Drop sequences of negative advantage whose mean of behaviour - current log-probability exceeds the threshold.

    The current policy is meant, not the proximal one, so the answer changes within a step of several updates. A sequence's
    advantage is the sum of its tokens'.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, off-policy sequence masking; TRL `off_policy_mask_threshold`, slime
    `compute_opsm_mask`.
    """
    divergence_S = sequence_mean(inputs.behaviour_logprobs.detach() - inputs.logprobs.detach(), inputs.mask, inputs)
    advantage_S = sequence_sum(inputs.advantages.detach(), inputs)
    return _keep(inputs, ((advantage_S >= 0) | (divergence_S <= config.threshold))[inputs.sequence_ids])


def staleness_weight(inputs: LossInputs, config: StalenessWeight) -> CorrectionOutputs:
    """Weigh each token by decay^staleness; staleness is the learner's version minus the token's, 0 where unknown.

    Source: ours, after staleness-aware asynchronous SGD, Zhang et al. 2016 (arXiv 1511.05950).
    """
    weights = torch.full_like(inputs.behaviour_logprobs, config.decay) ** _staleness(inputs)
    return CorrectionOutputs(weights=masked(weights, inputs.mask), kept=inputs.mask)


def staleness_mask(inputs: LossInputs, config: StalenessMask) -> CorrectionOutputs:
    """Drop tokens more than `max_versions` behind the learner; tokens of unknown version stay.

    Source: ours; the per-token form of the staleness bound of AReaL (arXiv 2505.24298), section 5.1.
    """
    return _keep(inputs, _staleness(inputs) <= config.max_versions)


def _staleness(inputs: LossInputs) -> torch.Tensor:
    assert inputs.versions is not None, "a staleness correction is set and LossInputs.versions is missing"
    return torch.where(inputs.versions >= 0, (inputs.learner_version - inputs.versions).clamp(min=0), 0)


def _keep(inputs: LossInputs, wanted: torch.Tensor) -> CorrectionOutputs:
    kept = inputs.mask & wanted
    return CorrectionOutputs(weights=kept.to(inputs.behaviour_logprobs.dtype), kept=kept)
