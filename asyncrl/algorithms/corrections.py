"""Off-policy corrections: from each kind of config struct to its function, and all of a run's applied together.

Legend: N tokens of a micro-batch or of a whole update (its micro-batches laid end to end, sequences numbered through), S
sequences; rho = proximal / behaviour. A correction is `(LossInputs, its struct) -> CorrectionOutputs`.

Invariants: everything is detached; a token that is masked or dropped weighs exactly 0; a correction without a weight gives 1; on
policy every correction gives weight 1 and keeps all. Those that `config.corrections.sees_whole_update` means something else on a
part of an update, so the caller runs `correct` on the whole of it and hands each micro-batch its slice (`combined` with those
that read the current policy).

Called by algorithms/loss_terms.py, learner/policy_loss.py, learner/planned_corrections.py and learner/start.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from asyncrl.algorithms.corrections_importance import icepop, masked_geometric, masked_sequence, tis_sequence, tis_token
from asyncrl.algorithms.corrections_m2po import m2po_clip, m2po_mask
from asyncrl.algorithms.corrections_masks import opsm, staleness_mask, staleness_weight, veto
from asyncrl.algorithms.types import CorrectionOutputs, LossInputs, masked
from asyncrl.algorithms.user_function import load_own, wrong_shape
from asyncrl.config.corrections import (
    CorrectionConfig,
    MaskedGeometric,
    MaskedSequence,
    MaskedToken,
    OffPolicySequenceMask,
    PythonCorrection,
    SecondMomentClip,
    SecondMomentMask,
    StalenessMask,
    StalenessWeight,
    TruncatedSequence,
    TruncatedToken,
    Veto,
)

Correction = Callable[[LossInputs, Any], CorrectionOutputs]


def python(inputs: LossInputs, config: PythonCorrection) -> CorrectionOutputs:
    """Ask a user's own function; its answer is detached by `correct` like any other.

    Raises:
        ConfigError: The path names no function.
        LearnerError: It raised, or its answer is not one token's weight each.
    """
    return load_correction(config.path)(inputs, config)


CORRECTIONS: dict[type, Correction] = {
    TruncatedToken: tis_token,
    TruncatedSequence: tis_sequence,
    MaskedToken: icepop,
    MaskedSequence: masked_sequence,
    MaskedGeometric: masked_geometric,
    Veto: veto,
    OffPolicySequenceMask: opsm,
    SecondMomentMask: m2po_mask,
    SecondMomentClip: m2po_clip,
    StalenessWeight: staleness_weight,
    StalenessMask: staleness_mask,
    PythonCorrection: python,
}


def correct(inputs: LossInputs, corrections: tuple[CorrectionConfig, ...]) -> CorrectionOutputs:
    """Apply all corrections: weights multiply, a token stays where all keep it, the narrowest clip range wins.

    Args:
        inputs: A micro-batch, or a whole update laid end to end. `logprobs` are read by `opsm` and `m2po_clip` only, as the
            current policy's.
        corrections: In any order; none of them sees another's answer.

    Returns:
        Weights and kept tokens [N], detached; the clip range where a correction sets one.
    """
    weights, kept = inputs.mask.to(inputs.behaviour_logprobs.dtype), inputs.mask
    clip_low, clip_high = None, None
    for item in corrections:
        outputs = CORRECTIONS[type(item)](inputs, item)
        kept = kept & outputs.kept
        weights = weights * masked(outputs.weights.detach(), inputs.mask)
        clip_low, clip_high = _narrower(clip_low, outputs.clip_low), _narrower(clip_high, outputs.clip_high)
    return CorrectionOutputs(masked(weights, kept), kept, clip_low, clip_high)


def combined(first: CorrectionOutputs, second: CorrectionOutputs) -> CorrectionOutputs:
    """Return what two answers of `correct` for the same tokens say together."""
    kept = first.kept & second.kept
    return CorrectionOutputs(
        masked(first.weights * second.weights, kept),
        kept,
        _narrower(first.clip_low, second.clip_low),
        _narrower(first.clip_high, second.clip_high),
    )


def _narrower(first: float | None, second: float | None) -> float | None:
    return min((value for value in (first, second) if value is not None), default=None)


@functools.cache
def load_correction(path: str) -> Correction:
    """Return a user's own correction; one import a process: a file named by its path would run again at every micro-batch.

    Raises:
        ConfigError: The path names no function.
    """
    return load_own(path, "algorithm.corrections.path", CorrectionOutputs, _fault_in)


def _fault_in(inputs: LossInputs, outputs: CorrectionOutputs) -> str:
    """Return what is wrong with a user's answer."""
    for name in ("weights", "kept"):
        if fault := wrong_shape(name, getattr(outputs, name), tuple(inputs.logprobs.shape), "[N]"):
            return fault
    return "" if outputs.kept.dtype == torch.bool else f"kept must be bool, got {outputs.kept.dtype}"
