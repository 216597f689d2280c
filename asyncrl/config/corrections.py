"""Off-policy corrections a run may name, each with its own knobs; `[[algorithm.corrections]]` tables, applied together.

A correction gives every token a weight, or drops it, or both: weights multiply, and a token stays only where all keep it. rho is
proximal / behaviour: per token, or as product or geometric mean over a sequence. The maths is in algorithms/corrections.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.fields import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, _Variant


class TruncatedToken(_Variant, frozen=True, tag="tis_token"):
    """Weight clamp(rho, floor, cap) of each token."""

    cap: PositiveFloat = 2.0
    floor: NonNegativeFloat = 0.0
    normalize: bool = False
    """Divided by their mean over the update's tokens: truncation then moves weight between tokens and takes none away."""


class TruncatedSequence(_Variant, frozen=True, tag="tis_sequence"):
    """Weight clamp(product of rho over the sequence, floor, cap) on each of its tokens."""

    cap: PositiveFloat = 2.0
    floor: NonNegativeFloat = 0.0
    normalize: bool = False
    """Divided by their mean over the update's sequences, each counted once."""


class MaskedToken(_Variant, frozen=True, tag="icepop"):
    """Masked importance sampling: weight rho inside [low, high], the token is dropped outside."""

    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 5.0


class MaskedSequence(_Variant, frozen=True, tag="masked_sequence"):
    """A sequence is dropped where the product of its rho leaves [low, high]."""

    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 5.0
    weight: Literal["sequence", "token", "none"] = "sequence"
    """What survivors weigh: the product (verl, TRL), each token its own rho (OpenRLHF, NeMo-RL), or 1."""


class MaskedGeometric(_Variant, frozen=True, tag="masked_geometric"):
    """A sequence is dropped where the geometric mean of its rho leaves [low, high]."""

    low: NonNegativeFloat = 0.99
    high: PositiveFloat = 1.01
    weight: Literal["geometric", "token", "none"] = "none"
    """What survivors weigh: the geometric mean (AReaL), each token its own rho (OpenRLHF, NeMo-RL), or 1."""


class Veto(_Variant, frozen=True, tag="veto"):
    """A sequence with one token whose rho is under the threshold is dropped whole."""

    threshold: PositiveFloat = 1e-4


class OffPolicySequenceMask(_Variant, frozen=True, tag="opsm"):
    """A sequence of negative advantage is dropped where mean(behaviour - current log-probability) exceeds the threshold."""

    threshold: float = 0.1


class SecondMomentMask(_Variant, frozen=True, tag="m2po_mask"):
    """M2PO as AReaL does it: the tokens of largest (log rho)^2 are dropped, as few as possible, until the mean is under it."""

    threshold: PositiveFloat = 0.04


class SecondMomentClip(_Variant, frozen=True, tag="m2po_clip"):
    """M2PO as its authors' code does it: one clip range for the whole update, from the second moment of the harmful tokens."""

    threshold: PositiveFloat = 0.04


class StalenessWeight(_Variant, frozen=True, tag="staleness_weight"):
    """Weight decay^(versions between the token and the learner)."""

    decay: Fraction = 0.9


class StalenessMask(_Variant, frozen=True, tag="staleness_mask"):
    """Tokens more than `max_versions` behind the learner are dropped (a soft bound under the hard one, buffer.max_staleness)."""

    max_versions: NonNegativeInt = 1


class PythonCorrection(_Variant, frozen=True, tag="python"):
    """A user's own, `module:function` or `file.py:function`: (LossInputs, this struct) -> CorrectionOutputs."""

    path: str
    parameter: float = 0.0
    """Handed on; whatever the function makes of it."""


CorrectionConfig = (
    TruncatedToken
    | TruncatedSequence
    | MaskedToken
    | MaskedSequence
    | MaskedGeometric
    | Veto
    | OffPolicySequenceMask
    | SecondMomentMask
    | SecondMomentClip
    | StalenessWeight
    | StalenessMask
    | PythonCorrection
)

READS_CURRENT_POLICY = (OffPolicySequenceMask, PythonCorrection)
"""Corrections of a row alone whose answer may change with every update of a step; of a user's own nothing is known."""
WEIGHTING = (TruncatedToken, TruncatedSequence, MaskedToken)
"""Corrections whose weight is an importance weight (masked_sequence and masked_geometric too, unless `weight` is none)."""
MASKS_BY_RHO = (MaskedToken, MaskedSequence, MaskedGeometric, Veto, SecondMomentMask)
"""Corrections that drop tokens by rho."""


def is_importance_weight(item: CorrectionConfig) -> bool:
    """Return whether a correction of ours weighs tokens by rho; of a user's own nothing is known."""
    return isinstance(item, WEIGHTING) or (isinstance(item, MaskedSequence | MaskedGeometric) and item.weight != "none")


Probability = Annotated[float, Meta(ge=0, le=1)]


def sees_whole_update(item: CorrectionConfig) -> bool:
    """Return whether the correction looks at all tokens of an update at once."""
    normalizes = isinstance(item, TruncatedToken | TruncatedSequence) and item.normalize
    return normalizes or isinstance(item, SecondMomentMask | SecondMomentClip)
