"""What the learner optimises: advantage, loss, off-policy corrections, penalties, critic and preferences. All by name.

Which name goes with which is checked by config/algorithm_rules.py when the config is read.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.corrections import CorrectionConfig, Probability, TruncatedToken
from asyncrl.config.fields import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, _Stage
from asyncrl.config.learner import LearnerConfig

__all__ = ["AlgorithmConfig", "CriticConfig", "KLConfig", "LearnerConfig", "PreferenceConfig", "ReferenceConfig"]


class ReferenceConfig(_Stage, frozen=True):
    """The frozen policy that a KL penalty or DPO compares with."""

    path: str = ""
    """Hugging Face folder; empty: the run's own initial model (with LoRA: the base, adapter off, no second copy)."""
    where: Literal["learner", "worker"] = "learner"
    """Forward passes on the learner's devices, or on inference workers, overlapped with generation (`[inference]`)."""


class KLConfig(_Stage, frozen=True):
    """Penalty for leaving the reference."""

    coefficient: PositiveFloat = 1e-3
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    """`reward`: subtracted from each token's reward (InstructGPT); needs an advantage that reads token rewards."""
    gradient: Literal["own", "k2", "ratio"] = "own"
    """Only in the loss. `k2`: the estimator's value with k2's gradient, unbiased on the policy's own samples; `ratio`: times
    current / behaviour with the gradient through it, unbiased on stale ones too (DeepSeek-V3.2)."""
    cap: PositiveFloat = 10.0
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
    value_clip: PositiveFloat = 0.2
    """Values move at most this far from the old ones before their loss stops falling; inf: unclipped."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps that train the critic alone."""


class PreferenceConfig(_Stage, frozen=True):
    """DPO and its kin (`kind = "dpo"`)."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    average: bool = False
    """Margins from per-token averages (IPO in TRL and AReaL) instead of sums (OpenRLHF)."""
    pairs: Literal["best_worst", "threshold"] = "best_worst"
    """One pair a group, best against worst; or every sample at or over one threshold against every one at or under the other."""
    chosen_at_least: float = 1.0
    rejected_at_most: float = 0.0
    max_pairs_per_group: PositiveInt = 1
    """Only `threshold`: at most this many, taken in member order, each sample at most once."""


class AlgorithmConfig(_Stage, frozen=True):
    """Advantage, loss and off-policy correction, by name."""

    kind: Literal["policy", "auto", "dpo"] = "policy"
    """`policy`: the loss and corrections named here; `auto`: picked from measured staleness and mismatch; `dpo`: `preference`,
    and all that makes a policy loss stays at its default."""
    groups_per_step: PositiveInt = 32
    """B: groups one optimizer step consumes."""
    group_size: PositiveInt = 8
    """G: samples of one prompt."""

    advantage: str = "grpo"
    """A name in algorithms/advantages.py, or a user's own `module:function`."""
    advantage_epsilon: PositiveFloat = 1e-6
    gamma: Fraction = 1.0
    """Discount of token rewards (`reinforce_pp`, `gae`, `vtrace`)."""
    gae_lambda: Probability = 1.0
    whiten: bool = False
    """Advantages of the step get mean 0 and variance 1 over all trained tokens (the reinforce_pp forms do so always)."""
    vtrace_rho: PositiveFloat = 1.0
    vtrace_c: PositiveFloat = 1.0
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are dropped, with that reason in the ledger, and new prompts take their place (DAPO)."""
    max_resamples: PositiveInt = 20
    """Groups dropped so in a row, in multiples of groups_per_step; then they are trained all the same, with a warning.

    Without a preference pair a group cannot be trained: of such drops there is a warning at every further multiple."""
    mask_truncated: bool = False
    """Samples cut off by the length limit are not trained (DAPO's overlong filtering); they still count in their group's mean."""

    loss: str = "decoupled_ppo"
    """A name in algorithms/losses.py, or a user's own `module:function`."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, Meta(ge=1)] | None = None
    max_ratio: PositiveFloat = 5.0
    """Upper bound of the detached ratio, absolute (not a distance from 1): `cispo`, `aipo`."""
    tau_positive: PositiveFloat = 1.0
    """Temperature of SAPO's gate where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    proximal: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    """Proximal policy: the learner's own forward before the step; interpolated from versions (A-3PO); or none (plain PPO)."""
    corrections: tuple[CorrectionConfig, ...] = (TruncatedToken(),)
    """Applied together; see config/corrections.py."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] = "token-mean"
    aggregation_constant: PositiveFloat = 1.0
    """Divides each sequence's sum where the aggregation is `constant` (Dr.GRPO: the longest response allowed)."""
    denominator: Literal["all", "kept"] = "all"
    """Whether tokens a correction dropped count in the mean: `all` (AReaL, OpenRLHF, NeMo-RL) or `kept` only (verl, M2PO)."""
    entropy_coefficient: float = 0.0

    kl: KLConfig | None = None
    reference: ReferenceConfig = ReferenceConfig()
    """Loaded only where `kl` or `kind = "dpo"` needs it."""
    critic: CriticConfig | None = None
    preference: PreferenceConfig = PreferenceConfig()

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
