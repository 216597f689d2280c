"""What the learner optimises: advantage, loss, off-policy corrections, penalties, critic and preferences, chosen by name.

A correction weighs tokens, drops tokens, or both. Weights of several corrections multiply, and a token is kept only if all of
them keep it. rho is the ratio proximal / behaviour: per token, or as product or geometric mean over a sequence.
algorithm_table.py checks which names can be combined; the maths is in asyncrl/algorithms.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asyncrl.config import (
    BoundedInt,
    FiniteFloat,
    Fraction,
    FreeFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    _Stage,
    _Variant,
)

Level = Literal["token", "sum", "mean", "max", "geometric"]
Weight = Literal["none", "token", "sequence", "geometric"]


class Truncated(_Variant, frozen=True):
    """A truncated importance weight: clamp(rho, floor, cap)."""

    cap: FreeFloat = 2.0
    floor: NonNegativeFloat = 0.0
    normalize: bool = False
    """Divide by the mean over the update's tokens, or sequences, so that truncation does not reduce the total weight."""


class TruncatedToken(Truncated, frozen=True, tag="tis_token"):
    """Truncated weight: each token's rho."""


class TruncatedSequence(Truncated, frozen=True, tag="tis_sequence"):
    """Truncated weight: the product of rho over the sequence, for each of its tokens."""


class TruncatedGeometric(Truncated, frozen=True, tag="tis_geometric"):
    """Truncated weight: the geometric mean of rho over the sequence, for each of its tokens."""


class Rejection(_Variant, frozen=True, kw_only=True, tag="rejection"):
    """Tokens, or whole sequences, are dropped if their `measure` is outside [low, high]."""

    level: Level = "token"
    """What is compared with the bounds: each token's value; or of a sequence the sum (product for `ratio`), the mean, the
    geometric mean (`ratio` only), or every token's value (`max`: one token outside drops the sequence)."""
    measure: Literal["ratio", "k1", "k2", "k3", "tv", "binary_kl"] = "ratio"
    """In this order: rho; -log rho; (log rho)^2 / 2; rho - 1 - log rho; and, with p and q the proximal and behaviour probability
    of the sampled token, |p - q| and the larger of KL(p || q) and KL(q || p), with all other tokens taken as one."""
    low: float = -math.inf
    high: float = math.inf
    weight: Weight = "none"
    """Weight of kept tokens: 1, each token's rho, or the sequence's product or geometric mean of rho."""


class MaskedToken(Rejection, frozen=True, tag="icepop"):
    """`rejection` of tokens by rho; a kept token's rho is also its weight: masked importance sampling."""

    low: float = 0.5
    high: float = 5.0
    weight: Weight = "token"


class MaskedSequence(Rejection, frozen=True, tag="masked_sequence"):
    """`rejection` of sequences by their product of rho. Weight `sequence`: verl, TRL; `token`: OpenRLHF, NeMo-RL."""

    level: Level = "sum"
    low: float = 0.5
    high: float = 5.0
    weight: Weight = "sequence"


class MaskedGeometric(Rejection, frozen=True, tag="masked_geometric"):
    """`rejection` of sequences by their geometric mean of rho. Weight `geometric`: AReaL; `token`: OpenRLHF, NeMo-RL."""

    level: Level = "geometric"
    low: float = 0.99
    high: float = 1.01


class Veto(Rejection, frozen=True, tag="veto"):
    """`rejection` of sequences that have a token with rho under the threshold."""

    level: Level = "max"
    low: float = msgspec.field(default=1e-4, name="threshold")


class OffPolicySequenceMask(_Variant, frozen=True, tag="opsm"):
    """A sequence with negative advantage is dropped if mean(behaviour - current log-probability) exceeds the threshold."""

    threshold: NonNegativeFloat = 0.1


class SecondMomentMask(_Variant, frozen=True, tag="m2po_mask"):
    """M2PO as in AReaL: drops tokens with the largest (log rho)^2, as few as needed, until the mean is under the threshold."""

    threshold: PositiveFloat = 0.04


class SecondMomentClip(_Variant, frozen=True, tag="m2po_clip"):
    """M2PO as in its authors' code: one clip range for the whole update, from the second moment of the harmful tokens."""

    threshold: PositiveFloat = 0.04


class StalenessWeight(_Variant, frozen=True, tag="staleness_weight"):
    """Weight decay^(versions between the token and the learner)."""

    decay: Fraction = 0.9


class StalenessMask(_Variant, frozen=True, tag="staleness_mask"):
    """Tokens more than `max_versions` behind the learner are dropped (a soft bound under the hard one, buffer.max_staleness)."""

    max_versions: NonNegativeInt = 1


class PythonCorrection(_Variant, frozen=True, tag="python"):
    """A user's own correction, `module:function` or `file.py:function`: (LossInputs, this struct) -> CorrectionOutputs."""

    path: str
    parameter: FiniteFloat = 0.0
    """A number for the function's own use."""


CorrectionConfig = (
    TruncatedToken
    | TruncatedSequence
    | TruncatedGeometric
    | Rejection
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
"""Corrections that need only a row and may change with every update of a step; a user's own is assumed to."""
MASKS_BY_RHO = (Rejection, SecondMomentMask)
"""Corrections that drop tokens by rho."""


def is_importance_weight(item: CorrectionConfig) -> bool:
    """Return whether a built-in correction weighs tokens by rho; False for a user's own, about which nothing is known."""
    return isinstance(item, Truncated) or (isinstance(item, Rejection) and item.weight != "none")


def sees_whole_update(item: CorrectionConfig) -> bool:
    """Return whether the correction needs all tokens of an update at once."""
    return isinstance(item, SecondMomentMask | SecondMomentClip) or (isinstance(item, Truncated) and item.normalize)


class ReferenceConfig(_Stage, frozen=True):
    """The frozen policy to which a KL penalty or DPO compares the learner."""

    path: str = ""
    """Hugging Face folder; empty: the run's initial model (with LoRA: the base model without the adapter, no second copy)."""
    where: Literal["learner", "worker"] = "learner"
    """Where its forward passes run: on the learner's devices, or on inference workers during generation (`[inference]`)."""


class KLConfig(_Stage, frozen=True):
    """Penalty for moving away from the reference."""

    coefficient: PositiveFloat = 1e-3
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """verl's `kl`, `mse`, `low_var_kl` and `abs`; its `k1+` and `k3+` are `gradient = "k2"`."""
    where: Literal["loss", "reward"] = "loss"
    """`reward`: subtracted from each token's reward (InstructGPT); needs an advantage that reads token rewards."""
    gradient: Literal["own", "k2", "ratio"] = "own"
    """Only for `where = "loss"`. `k2`: the estimator's value with k2's gradient, unbiased on the policy's own samples; `ratio`:
    multiplied by current / behaviour, with the gradient through that ratio, unbiased on stale samples too (DeepSeek-V3.2)."""
    cap: FreeFloat = 10.0
    """Values are clipped to [-cap, cap], with gradient 0 outside (verl, AReaL, OpenRLHF); inf: no clipping (TRL)."""
    target: PositiveFloat | None = None
    """Adapt the coefficient so that the mean KL approaches this value (Ziegler et al. 2019); None: a fixed coefficient."""
    horizon: PositiveInt = 10_000
    """Number of samples over which the adaptive coefficient changes; larger is slower."""


class CriticConfig(_Stage, frozen=True):
    """A value function, for `gae` and `vtrace`."""

    kind: Literal["head", "separate"] = "separate"
    """`head`: one linear layer on the policy's hidden states, trained with it; `separate`: a model of its own."""
    path: str = ""
    """Hugging Face folder of the separate critic's initial weights; empty: the policy's initial model."""
    learning_rate: PositiveFloat = 1e-5
    """Learning rate of the separate critic or of the value head."""
    coefficient: PositiveFloat = 0.5
    """Weight of the value loss relative to the policy loss (value head)."""
    value_clip: FreeFloat = 0.2
    """How far a value may move from the old value before its loss is clipped; inf: no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps that train only the critic; the policy's learning rate schedule begins after them."""


class PreferenceConfig(_Stage, frozen=True):
    """DPO and related losses (`kind = "dpo"`)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with chosen and rejected exchanged (`sigmoid`: conservative, `robust`: unbiased)."""
    average: bool = False
    """Margins from per-token averages (IPO in TRL and AReaL) instead of sums (OpenRLHF)."""
    pairs: Literal["best_worst", "threshold"] = "best_worst"
    """One pair per group, best against worst; or each sample at or over one threshold against each at or under another."""
    chosen_at_least: FiniteFloat = 1.0
    rejected_at_most: FiniteFloat = 0.0
    max_pairs_per_group: PositiveInt = 1
    """Only for `threshold`: at most this many pairs, in member order, each sample at most once."""


CHOSEN_BY_HAND = {"loss": "decoupled_ppo", "corrections": (TruncatedToken(),), "proximal": "recompute", "denominator": "all"}
"""Fields that `kind = "auto"` does not read, with their defaults. If one of them is set and `kind` is not, `policy` is used."""


class AlgorithmConfig(_Stage, frozen=True):
    """Advantage, loss and off-policy correction, by name."""

    kind: Literal["policy", "auto", "dpo"] | msgspec.UnsetType = msgspec.UNSET
    """`policy`: the loss and corrections named here; `auto`: chosen from measured staleness and mismatch; `dpo`: the loss of
    `preference`, with policy-loss fields at their defaults. Unset: `policy` if a field of CHOSEN_BY_HAND is set, else `auto`."""
    groups_per_step: BoundedInt = 32
    """B: groups one optimizer step consumes."""
    group_size: BoundedInt = 8
    """G: samples of one prompt."""

    advantage: str = "grpo"
    """A name in algorithms/advantages.py, or a user's own `module:function`."""
    advantage_epsilon: PositiveFloat = 1e-6
    gamma: Fraction = 1.0
    """Discount of token rewards (`reinforce_pp`, `gae`, `vtrace`)."""
    gae_lambda: Annotated[float, Meta(ge=0, le=1)] = 1.0
    whiten: bool | Literal["samples"] = False
    """Normalise the step's advantages to mean 0 and variance 1 over all trained tokens (the reinforce_pp forms always do), or
    with `"samples"` over all samples, each counted once."""
    vtrace_rho: FreeFloat = 1.0
    vtrace_c: FreeFloat = 1.0
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, with that reason in the ledger, and generate new prompts instead (DAPO)."""
    max_resamples: PositiveInt = 20
    """Maximum number of groups dropped in a row for equal rewards, in multiples of groups_per_step.

    Later groups are trained anyway, with a warning. Groups without a preference pair cannot be trained: they are still dropped,
    with a warning at every further multiple."""
    mask_truncated: bool = False
    """Do not train samples that the length limit cut off (DAPO's overlong filtering). They still count in their group's mean, but
    not in that of `opo`, which is weighted by trained tokens."""

    loss: str = "decoupled_ppo"
    """A name in algorithms/losses.py, or a user's own `module:function`."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: Annotated[float, Meta(ge=0)] = 0.2
    dual_clip: Annotated[float, Meta(ge=1)] | None = None
    max_ratio: FreeFloat = 5.0
    """Upper bound of the detached ratio itself (not of its distance from 1): `cispo`, `aipo`, `dppo_tv`, `dppo_kl`."""
    tau_positive: PositiveFloat = 1.0
    """Temperature of SAPO's gate for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    vespo_positive: tuple[PositiveFloat, PositiveFloat] = (2.0, 3.0)
    """k and lambda of VESPO's weight for advantages that are not negative."""
    vespo_negative: tuple[PositiveFloat, PositiveFloat] = (3.0, 2.0)
    log_ratio_penalty: NonNegativeFloat = 0.0
    """Coefficient of (log current / behaviour)^2 per token, added to any loss (prime-rl's `kl_tau`); for `dro` it is beta / 2."""
    proximal: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    """Proximal policy: a forward of the learner before the step; interpolated by versions (A-3PO); or the behaviour policy (plain
    PPO)."""
    corrections: tuple[CorrectionConfig, ...] = (TruncatedToken(),)
    """All are applied together; see the corrections above."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "constant"
    ] = "token-mean"
    aggregation_constant: PositiveFloat = 1.0
    """Divisor of each sequence's sum if the aggregation is `constant`, or `seq-mean-token-sum-norm` as verl calls it (Dr. GRPO:
    the longest response allowed)."""
    denominator: Literal["all", "kept"] = "all"
    """Tokens that count in the mean: `all`, also dropped ones (AReaL, OpenRLHF, NeMo-RL), or only `kept` ones (verl, M2PO)."""
    entropy_coefficient: FiniteFloat = 0.0

    kl: KLConfig | None = None
    reference: ReferenceConfig = ReferenceConfig()
    """Loaded only if `kl` or `kind = "dpo"` needs it."""
    critic: CriticConfig | None = None
    preference: PreferenceConfig = PreferenceConfig()

    def __post_init__(self) -> None:
        if self.kind is msgspec.UNSET:
            kind = "policy" if any(getattr(self, field) != default for field, default in CHOSEN_BY_HAND.items()) else "auto"
            msgspec.structs.force_setattr(self, "kind", kind)

    @property
    def needs_reference(self) -> bool:
        """Return whether anything reads reference log-probabilities: kl is set, or kind is dpo."""
        return self.kl is not None or self.kind == "dpo"

    @property
    def has_greedy_baseline(self) -> bool:
        """Return whether each group has one extra member, decoded greedily and never trained (ReMax)."""
        return self.advantage == "remax" and self.kind != "dpo"

    @property
    def members_per_group(self) -> int:
        """Samples generated for one prompt: group_size, plus ReMax's greedy sample."""
        return self.group_size + self.has_greedy_baseline
