"""What the learner optimises: advantage, loss, off-policy corrections, penalties, critic and preferences. All by name.

A correction gives every token a weight, or drops it, or both: weights multiply, and a token stays only where all keep it. rho is
proximal / behaviour: per token, or as product or geometric mean over a sequence. Which names go together is checked in
algorithm_table.py; the maths is in asyncrl/algorithms.
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
    """An importance weight held in a band: clamp(rho, floor, cap)."""

    cap: FreeFloat = 2.0
    floor: NonNegativeFloat = 0.0
    normalize: bool = False
    """Divided by the mean over the update's tokens, or sequences: truncation then moves weight and takes none away."""


class TruncatedToken(Truncated, frozen=True, tag="tis_token"):
    """Of each token's rho."""


class TruncatedSequence(Truncated, frozen=True, tag="tis_sequence"):
    """Of the product of rho over the sequence, on each of its tokens."""


class TruncatedGeometric(Truncated, frozen=True, tag="tis_geometric"):
    """Of the geometric mean of rho over the sequence, on each of its tokens."""


class Rejection(_Variant, frozen=True, kw_only=True, tag="rejection"):
    """Tokens, or whole sequences, are dropped where what is measured of them leaves [low, high]."""

    level: Level = "token"
    """What is compared: a token's own value; or a sequence's sum (of `ratio` the product), mean, or geometric mean (`ratio`
    only), or each of its tokens' (`max`: one token outside drops the sequence)."""
    measure: Literal["ratio", "k1", "k2", "k3", "tv", "binary_kl"] = "ratio"
    """rho; -log rho; (log rho)^2 / 2; rho - 1 - log rho; or, of p = proximal and q = behaviour probability of the sampled token,
    |p - q|, and the larger of KL(p || q) and KL(q || p) of that token against all others."""
    low: float = -math.inf
    high: float = math.inf
    weight: Weight = "none"
    """What is kept weighs: 1, each token's rho, the sequence's product of rho or its geometric mean."""


class MaskedToken(Rejection, frozen=True, tag="icepop"):
    """`rejection` of tokens by their rho, which is also their weight: masked importance sampling."""

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
    """`rejection` of sequences with one token whose rho is under the threshold."""

    level: Level = "max"
    low: float = msgspec.field(default=1e-4, name="threshold")


class OffPolicySequenceMask(_Variant, frozen=True, tag="opsm"):
    """A sequence of negative advantage is dropped where mean(behaviour - current log-probability) exceeds the threshold."""

    threshold: NonNegativeFloat = 0.1


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
    parameter: FiniteFloat = 0.0
    """Handed on; whatever the function makes of it."""


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
"""Corrections of a row alone whose answer may change with every update of a step; of a user's own nothing is known."""
MASKS_BY_RHO = (Rejection, SecondMomentMask)
"""Corrections that drop tokens by rho."""


def is_importance_weight(item: CorrectionConfig) -> bool:
    """Return whether a correction of ours weighs tokens by rho; of a user's own nothing is known."""
    return isinstance(item, Truncated) or (isinstance(item, Rejection) and item.weight != "none")


def sees_whole_update(item: CorrectionConfig) -> bool:
    """Return whether the correction looks at all tokens of an update at once."""
    return isinstance(item, SecondMomentMask | SecondMomentClip) or (isinstance(item, Truncated) and item.normalize)


class ReferenceConfig(_Stage, frozen=True):
    """The frozen policy that a KL penalty or DPO compares with."""

    path: str = ""
    """Hugging Face folder; empty: the run's own initial model (with LoRA: the base, adapter off, no second copy)."""
    where: Literal["learner", "worker"] = "learner"
    """Forward passes on the learner's devices, or on inference workers, overlapped with generation (`[inference]`)."""


class KLConfig(_Stage, frozen=True):
    """Penalty for leaving the reference."""

    coefficient: PositiveFloat = 1e-3
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """verl's `kl`, `mse`, `low_var_kl` and `abs`; its `k1+` and `k3+` are `gradient = "k2"`."""
    where: Literal["loss", "reward"] = "loss"
    """`reward`: subtracted from each token's reward (InstructGPT); needs an advantage that reads token rewards."""
    gradient: Literal["own", "k2", "ratio"] = "own"
    """Only in the loss. `k2`: the estimator's value with k2's gradient, unbiased on the policy's own samples; `ratio`: times
    current / behaviour with the gradient through it, unbiased on stale ones too (DeepSeek-V3.2)."""
    cap: FreeFloat = 10.0
    """Values are held in [-cap, cap], with gradient 0 outside (verl, AReaL, OpenRLHF); inf: free (TRL)."""
    target: PositiveFloat | None = None
    """Adapt the coefficient so that the mean KL comes here (Ziegler et al. 2019); None: fixed."""
    horizon: PositiveInt = 10_000
    """Samples over which the adaptive coefficient reacts."""


class CriticConfig(_Stage, frozen=True):
    """A value function, for `gae` and `vtrace`."""

    kind: Literal["head", "separate"] = "separate"
    """`head`: one linear layer on the policy's hidden states, trained with it; `separate`: a model of its own."""
    path: str = ""
    """Hugging Face folder the separate critic starts from; empty: the policy's initial model."""
    learning_rate: PositiveFloat = 1e-5
    """Of the separate critic and of a value head."""
    coefficient: PositiveFloat = 0.5
    """Of the value loss beside the policy loss (value head)."""
    value_clip: FreeFloat = 0.2
    """Values move at most this far from the old ones before their loss stops falling; inf: unclipped."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps that train the critic alone; the policy's learning rate begins its schedule after them."""


class PreferenceConfig(_Stage, frozen=True):
    """DPO and its kin (`kind = "dpo"`)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be the wrong way round (`sigmoid`: conservative, `robust`: unbiased)."""
    average: bool = False
    """Margins from per-token averages (IPO in TRL and AReaL) instead of sums (OpenRLHF)."""
    pairs: Literal["best_worst", "threshold"] = "best_worst"
    """One pair a group, best against worst; or every sample at or over one threshold against every one at or under the other."""
    chosen_at_least: FiniteFloat = 1.0
    rejected_at_most: FiniteFloat = 0.0
    max_pairs_per_group: PositiveInt = 1
    """Only `threshold`: at most this many, taken in member order, each sample at most once."""


CHOSEN_BY_HAND = {"loss": "decoupled_ppo", "corrections": (TruncatedToken(),), "proximal": "recompute", "denominator": "all"}
"""What `kind = "auto"` does not read, with its defaults: where one is set and no kind is, it is used."""


class AlgorithmConfig(_Stage, frozen=True):
    """Advantage, loss and off-policy correction, by name."""

    kind: Literal["policy", "auto", "dpo"] | msgspec.UnsetType = msgspec.UNSET
    """`policy`: the loss and corrections named here; `auto`: picked from measured staleness and mismatch; `dpo`: `preference`,
    and all that makes a policy loss stays at its default. Left out: `policy` where one of CHOSEN_BY_HAND is set, else `auto`."""
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
    """Advantages of the step get mean 0 and variance 1 over all trained tokens (the reinforce_pp forms do so always), or, each
    sample counted once, over all `"samples"`."""
    vtrace_rho: FreeFloat = 1.0
    vtrace_c: FreeFloat = 1.0
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are dropped, with that reason in the ledger, and new prompts take their place (DAPO)."""
    max_resamples: PositiveInt = 20
    """Groups dropped so in a row, in multiples of groups_per_step; then they are trained all the same, with a warning.

    Without a preference pair a group cannot be trained: of such drops there is a warning at every further multiple."""
    mask_truncated: bool = False
    """Samples cut off by the length limit are not trained (DAPO's overlong filtering); they still count in their group's mean,
    but not in `opo`'s, which weighs by trained tokens."""

    loss: str = "decoupled_ppo"
    """A name in algorithms/losses.py, or a user's own `module:function`."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: Annotated[float, Meta(ge=0)] = 0.2
    dual_clip: Annotated[float, Meta(ge=1)] | None = None
    max_ratio: FreeFloat = 5.0
    """Upper bound of the detached ratio, absolute (not a distance from 1): `cispo`, `aipo`, `dppo_tv`, `dppo_kl`."""
    tau_positive: PositiveFloat = 1.0
    """Temperature of SAPO's gate where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    vespo_positive: tuple[PositiveFloat, PositiveFloat] = (2.0, 3.0)
    """k and lambda of VESPO's weight where the advantage is not negative."""
    vespo_negative: tuple[PositiveFloat, PositiveFloat] = (3.0, 2.0)
    log_ratio_penalty: NonNegativeFloat = 0.0
    """Times (log current / behaviour)^2 of each token, added to any loss (prime-rl's `kl_tau`); beta / 2 of `dro`."""
    proximal: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    """Proximal policy: the learner's own forward before the step; interpolated from versions (A-3PO); or none (plain PPO)."""
    corrections: tuple[CorrectionConfig, ...] = (TruncatedToken(),)
    """Applied together; see the corrections above."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "constant"
    ] = "token-mean"
    aggregation_constant: PositiveFloat = 1.0
    """Divides each sequence's sum where the aggregation is `constant` or, verl's name of the same, `seq-mean-token-sum-norm`
    (Dr. GRPO: the longest response allowed)."""
    denominator: Literal["all", "kept"] = "all"
    """Whether tokens a correction dropped count in the mean: `all` (AReaL, OpenRLHF, NeMo-RL) or `kept` only (verl, M2PO)."""
    entropy_coefficient: FiniteFloat = 0.0

    kl: KLConfig | None = None
    reference: ReferenceConfig = ReferenceConfig()
    """Loaded only where `kl` or `kind = "dpo"` needs it."""
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
        """Return whether each group has one more member, drawn greedily and never trained (ReMax)."""
        return self.advantage == "remax" and self.kind != "dpo"

    @property
    def members_per_group(self) -> int:
        """Samples generated for one prompt: group_size, and the greedy one of ReMax."""
        return self.group_size + self.has_greedy_baseline
