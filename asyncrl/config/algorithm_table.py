"""The algorithms by name, what each asks of the rest of the config, and the checks that follow from it. Without torch.

A new loss or advantage is one function in asyncrl/algorithms (losses.py, advantages.py) and one row here, of the same name: the
checks of a config and the registries of the functions both read these tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.algorithm import (
    MASKS_BY_RHO,
    AlgorithmConfig,
    MaskedGeometric,
    MaskedSequence,
    MaskedToken,
    OffPolicySequenceMask,
    PythonCorrection,
    SecondMomentClip,
    TruncatedSequence,
    TruncatedToken,
    Veto,
    is_importance_weight,
    sees_whole_update,
)
from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """What an advantage asks of the rest of the config."""

    needs_critic: bool = False
    needs_groups: bool = False
    """Compares the members of a group, so a group of one teaches nothing."""
    reads_token_rewards: bool = False
    own_importance_weight: bool = False
    """Carries proximal / behaviour; a loss or correction that weighs tokens would count that twice."""


@dataclass(frozen=True, slots=True)
class LossRule:
    """What a loss asks of the rest of the config."""

    own_importance_weight: bool = False
    """Weighs tokens by current / behaviour itself; a weighting correction would count that twice."""
    weighs_by_rho: bool = False
    """Weighs tokens by proximal / behaviour where no correction does."""
    uses_proximal: bool = True
    """Weighs tokens by current / proximal, which starts each step at 1 only where the proximal policy is recomputed."""
    has_clip_range: bool = False
    """Clips a token's ratio, in the range that m2po_clip may set."""
    has_dual_clip: bool = False


ADVANTAGE_RULES = {
    "grpo": AdvantageRule(needs_groups=True),
    "dr_grpo": AdvantageRule(needs_groups=True),
    "rloo": AdvantageRule(needs_groups=True),
    "opo": AdvantageRule(needs_groups=True),
    "reinforce_pp": AdvantageRule(reads_token_rewards=True),
    "reinforce_pp_baseline": AdvantageRule(needs_groups=True),
    "remax": AdvantageRule(),
    "reward": AdvantageRule(),
    "gae": AdvantageRule(needs_critic=True, reads_token_rewards=True),
    "vtrace": AdvantageRule(needs_critic=True, reads_token_rewards=True, own_importance_weight=True),
}
LOSS_RULES = {
    "ppo_clip": LossRule(has_clip_range=True, has_dual_clip=True),
    "decoupled_ppo": LossRule(weighs_by_rho=True, has_clip_range=True, has_dual_clip=True),
    "gspo": LossRule(has_dual_clip=True),
    "gspo_token": LossRule(has_dual_clip=True),
    "cispo": LossRule(),
    "sapo": LossRule(),
    "reinforce": LossRule(uses_proximal=False),
    "importance_sampling": LossRule(own_importance_weight=True, uses_proximal=False),
    "aipo": LossRule(own_importance_weight=True, uses_proximal=False),
    "topr": LossRule(own_importance_weight=True, uses_proximal=False),
}

UNUSED_BY_DPO = (
    "advantage",
    "whiten",
    "dynamic_sampling",
    "loss",
    "dual_clip",
    "proximal",
    "corrections",
    "aggregation",
    "denominator",
    "entropy_coefficient",
)
"""What says how a policy loss is made: DPO has its own, so each must be left at its default."""
PICKED_BY_AUTO = ("loss", "corrections")
"""What `kind = "auto"` is there to pick, so each must be left at its default."""


def check_algorithm(algorithm: AlgorithmConfig, learner: LearnerConfig) -> None:
    """Refuse unknown names and mixes that cannot work.

    Raises:
        ConfigError: Names the fields, what they say, and what to write instead.
    """
    _check_name("advantage", algorithm.advantage, list(ADVANTAGE_RULES))
    _check_name("loss", algorithm.loss, list(LOSS_RULES))
    _check_bounds(algorithm)
    if algorithm.kind == "dpo":
        _check_preferences(algorithm)
        return
    if algorithm.kind == "auto":
        for field in _set_fields(algorithm, PICKED_BY_AUTO):
            raise ConfigError(
                f"algorithm.kind = 'auto' picks loss and corrections itself and would not read algorithm.{field}: drop it, or "
                "set algorithm.kind = 'policy' to have it"
            )
    _check_advantage(algorithm)
    _check_corrections(algorithm, learner)
    _check_weight_is_counted_once(algorithm)
    _check_loss(algorithm)
    _check_kl_and_critic(algorithm)


def doubts_about_algorithm(algorithm: AlgorithmConfig) -> list[str]:
    """Return what works but is hardly meant, each with what to do."""
    default = AlgorithmConfig()
    fields = _set_fields(algorithm, ("proximal", "denominator")) if algorithm.kind == "auto" else []
    return [
        f"algorithm.{field} = {getattr(algorithm, field)!r} is not read: algorithm.kind = 'auto' always takes "
        f"{getattr(default, field)!r}; drop it"
        for field in fields
    ]


def _set_fields(algorithm: AlgorithmConfig, fields: Sequence[str]) -> list[str]:
    """Return those of the fields that are not at their default."""
    default = AlgorithmConfig()
    return [field for field in fields if getattr(algorithm, field) != getattr(default, field)]


def _check_name(field: str, name: str, known: list[str]) -> None:
    if name not in known and not _names_function(name):
        raise ConfigError(
            f"algorithm.{field} must be one of {', '.join(known)}, or your own function as module:function, got {name!r}"
        )


def _names_function(path: str) -> bool:
    """Return whether it is of the form `module:function` or `file.py:function`; it is imported where it is used."""
    module, _, function = path.rpartition(":")
    return bool(module) and function.isidentifier()


def _check_advantage(algorithm: AlgorithmConfig) -> None:
    name, rule = algorithm.advantage, ADVANTAGE_RULES.get(algorithm.advantage, AdvantageRule())
    known = algorithm.advantage in ADVANTAGE_RULES
    if rule.needs_critic and algorithm.critic is None:
        raise ConfigError(f"algorithm.advantage = {name!r} needs a critic: add an [algorithm.critic] table")
    if known and not rule.needs_critic and algorithm.critic is not None:
        raise ConfigError(
            f"algorithm.advantage = {name!r} has no use for a critic: take {_names(ADVANTAGE_RULES, 'needs_critic')}, or drop "
            "[algorithm.critic]"
        )
    if rule.needs_groups and algorithm.group_size < 2:
        raise ConfigError(
            f"algorithm.advantage = {name!r} compares the samples of a group; algorithm.group_size must be at least 2, got "
            f"{algorithm.group_size}"
        )
    if algorithm.dynamic_sampling and algorithm.group_size < 2:
        raise ConfigError("algorithm.dynamic_sampling drops groups without spread; algorithm.group_size must be at least 2")
    if algorithm.kl is not None and algorithm.kl.where == "reward" and known and not rule.reads_token_rewards:
        raise ConfigError(
            f"algorithm.kl.where = 'reward' changes token rewards, which algorithm.advantage = {name!r} does not read; take "
            f"one of {_names(ADVANTAGE_RULES, 'reads_token_rewards')}, or kl.where = 'loss'"
        )


def _check_corrections(algorithm: AlgorithmConfig, learner: LearnerConfig) -> None:
    rule = LOSS_RULES.get(algorithm.loss, LossRule())
    weighting = [item for item in algorithm.corrections if is_importance_weight(item)]
    if rule.own_importance_weight and weighting:
        raise ConfigError(
            f"algorithm.loss = {algorithm.loss!r} has its importance weight inside, and the correction "
            f"{_kind(weighting[0])!r} would count it twice: set algorithm.corrections to masks only, or to []"
        )
    if len(weighting) > 1:
        raise ConfigError(
            f"algorithm.corrections has {len(weighting)} importance weights ({', '.join(map(_kind, weighting))}); their product "
            "is no importance weight: keep one"
        )
    masks = [_kind(item) for item in algorithm.corrections if isinstance(item, MASKS_BY_RHO)]
    if algorithm.proximal == "behaviour" and masks:
        raise ConfigError(
            f"the correction {masks[0]!r} compares the proximal with the behaviour policy, and algorithm.proximal = 'behaviour' "
            "makes them one, so it would drop nothing: set algorithm.proximal = 'recompute'"
        )
    if (
        algorithm.denominator == "kept"
        and learner.minibatches * learner.epochs > 1
        and any(isinstance(item, OffPolicySequenceMask) for item in algorithm.corrections)
    ):
        raise ConfigError(
            "algorithm.denominator = 'kept' must know before an update which tokens opsm keeps, and with several updates a step "
            "that depends on the update: take denominator = 'all', or learner.minibatches = learner.epochs = 1"
        )


def _check_weight_is_counted_once(algorithm: AlgorithmConfig) -> None:
    if not ADVANTAGE_RULES.get(algorithm.advantage, AdvantageRule()).own_importance_weight:
        return
    carries = f"algorithm.advantage = {algorithm.advantage!r} carries its importance weight"
    if algorithm.kind == "auto":
        raise ConfigError(f"{carries}, and algorithm.kind = 'auto' picks another: take advantage = 'gae', or kind = 'policy'")
    weighting = [_kind(item) for item in algorithm.corrections if is_importance_weight(item)]
    if weighting:
        raise ConfigError(
            f"{carries}, and the correction {weighting[0]!r} would count it twice: set algorithm.corrections to masks only, or "
            "to [], or take advantage = 'gae'"
        )
    rule = LOSS_RULES.get(algorithm.loss, LossRule())
    if rule.own_importance_weight or (rule.weighs_by_rho and algorithm.proximal != "behaviour"):
        raise ConfigError(
            f"{carries}, and algorithm.loss = {algorithm.loss!r} would count it twice: take loss = 'reinforce' (IMPALA), or "
            "advantage = 'gae'"
        )
    if rule.uses_proximal and algorithm.proximal != "recompute":
        raise ConfigError(
            f"{carries} up to the learner before the step, and with algorithm.proximal = {algorithm.proximal!r} the ratio of "
            f"algorithm.loss = {algorithm.loss!r} would count it twice: set algorithm.proximal = 'recompute' with loss = "
            "'ppo_clip', or take loss = 'reinforce' (IMPALA), or advantage = 'gae'"
        )


def _check_loss(algorithm: AlgorithmConfig) -> None:
    """Refuse what the loss does not read: a clip range, a dual clip, an aggregation's constant."""
    rule = LOSS_RULES.get(algorithm.loss)
    sets_range = any(isinstance(item, SecondMomentClip) for item in algorithm.corrections)
    if sets_range and rule is not None and not rule.has_clip_range:
        raise ConfigError(
            f"the correction 'm2po_clip' sets a clip range, and algorithm.loss = {algorithm.loss!r} has none of a token: take "
            f"one of {_names(LOSS_RULES, 'has_clip_range')}, or the correction 'm2po_mask'"
        )
    if sets_range and algorithm.proximal == "recompute":
        raise ConfigError(
            "the correction 'm2po_clip' bounds current / behaviour, and with algorithm.proximal = 'recompute' the loss clips "
            "another ratio, which is 1 when the range is chosen: set algorithm.proximal = 'behaviour'"
        )
    if algorithm.dual_clip is not None and rule is not None and not rule.has_dual_clip:
        raise ConfigError(
            f"algorithm.dual_clip bounds a clipped loss, and algorithm.loss = {algorithm.loss!r} does not clip: take one of "
            f"{_names(LOSS_RULES, 'has_dual_clip')}, or drop algorithm.dual_clip"
        )
    name, constant = algorithm.aggregation, algorithm.aggregation_constant
    if name == "constant" and constant == 1.0:
        raise ConfigError(
            "algorithm.aggregation = 'constant' divides by algorithm.aggregation_constant, which is not set: give the longest "
            "response allowed (generate.sampling.max_new_tokens)"
        )
    if name != "constant" and constant != 1.0:
        raise ConfigError(
            f"algorithm.aggregation_constant ({constant:g}) is read with algorithm.aggregation = 'constant' only (is {name!r}): "
            "set that, or drop it"
        )


def _names(rules: Mapping[str, AdvantageRule | LossRule], flag: str) -> str:
    """Return the names whose rule has this flag."""
    return ", ".join(name for name, rule in rules.items() if getattr(rule, flag))


def _check_kl_and_critic(algorithm: AlgorithmConfig) -> None:
    kl, critic = algorithm.kl, algorithm.critic
    if kl is not None and kl.where == "reward" and kl.gradient != "own":
        raise ConfigError(
            f"algorithm.kl.gradient = {kl.gradient!r} is for algorithm.kl.where = 'loss': a KL in the reward has no gradient; "
            "drop it, or set kl.where = 'loss'"
        )
    if critic is not None and critic.kind == "head" and critic.path:
        raise ConfigError(
            f"algorithm.critic.path ({critic.path!r}) is of a critic of its own, and kind = 'head' sits on the policy: set "
            "critic.kind = 'separate', or drop the path"
        )


def _check_bounds(algorithm: AlgorithmConfig) -> None:
    """Refuse bounds of corrections that contradict themselves, and a user's own that is no path."""
    for item in algorithm.corrections:
        if isinstance(item, PythonCorrection) and not _names_function(item.path):
            raise ConfigError(
                f"algorithm.corrections: the path of python must be module:function or file.py:function, got {item.path!r}"
            )
        if isinstance(item, MaskedToken | MaskedSequence | MaskedGeometric) and item.low >= item.high:
            raise ConfigError(
                f"algorithm.corrections: {_kind(item)} keeps ratios in [low, high]; low ({item.low}) must be under high "
                f"({item.high})"
            )
        if isinstance(item, TruncatedToken | TruncatedSequence) and item.floor > item.cap:
            raise ConfigError(f"algorithm.corrections: {_kind(item)} has floor {item.floor} over cap {item.cap}")
        match item:
            case MaskedToken() | MaskedSequence() | MaskedGeometric():
                low, high = item.low, item.high
            case TruncatedToken() | TruncatedSequence():
                low, high = item.floor, item.cap
            case _:
                low, high = (item.threshold if isinstance(item, Veto) else 0.0), math.inf
        if not low <= 1.0 <= high:
            raise ConfigError(
                f"algorithm.corrections: {_kind(item)} lets rho be in [{low:g}, {high:g}], and the rho of data that is not stale "
                "is 1, so none of it would be trained as it is: bounds are ratios, one at most 1 and the other at least 1"
            )


def _check_preferences(algorithm: AlgorithmConfig) -> None:
    preference = algorithm.preference
    for field in _set_fields(algorithm, UNUSED_BY_DPO):
        raise ConfigError(f"algorithm.kind = 'dpo' has its own loss and makes no use of algorithm.{field}: drop it")
    if algorithm.group_size < 2:
        raise ConfigError(
            f"algorithm.kind = 'dpo' makes pairs: algorithm.group_size must be at least 2, got {algorithm.group_size}"
        )
    if algorithm.critic is not None:
        raise ConfigError("algorithm.kind = 'dpo' has no use for algorithm.critic: drop it")
    if algorithm.kl is not None:
        raise ConfigError(
            "algorithm.kind = 'dpo' is held to the reference by preference.beta and has no use for algorithm.kl: drop it"
        )
    if preference.pairs == "threshold" and preference.chosen_at_least <= preference.rejected_at_most:
        raise ConfigError(
            f"algorithm.preference.chosen_at_least ({preference.chosen_at_least}) must be over rejected_at_most "
            f"({preference.rejected_at_most})"
        )
    if preference.loss == "ipo" and preference.label_smoothing:
        raise ConfigError("algorithm.preference.label_smoothing is of the sigmoid loss; ipo has none: set it to 0")


def _kind(item: object) -> str:
    return str(type(item).__struct_config__.tag)  # type: ignore[attr-defined]


def looks_at_whole_update(algorithm: AlgorithmConfig) -> bool:
    """Return whether corrections must see every token of an update before its first micro-batch."""
    return algorithm.denominator == "kept" or any(map(sees_whole_update, algorithm.corrections))
