"""The algorithms by name, what each requires from the rest of the config, and the checks for that. Imports no torch.

A new loss or advantage is one function in asyncrl/algorithms (losses.py, advantages.py) and one row of the same name here: the
config checks and the function registries both read these tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config import algorithm as kinds
from asyncrl.config.generate import SamplingConfig
from asyncrl.config.learner import LearnerConfig


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """What an advantage requires from the rest of the config."""

    needs_critic: bool = False
    needs_groups: bool = False
    """It compares the members of a group, so a group of one member gives no signal."""
    reads_token_rewards: bool = False
    own_importance_weight: bool = False
    """It contains the weight proximal / behaviour; a loss or correction that weighs tokens would count it twice."""


@dataclass(frozen=True, slots=True)
class LossRule:
    """What a loss requires from the rest of the config."""

    own_importance_weight: bool = False
    """It weighs tokens by current / behaviour itself; a weighting correction would count that twice."""
    weighs_by_rho: bool = False
    """It weighs tokens by proximal / behaviour if no correction does."""
    weighs_sequences: bool = False
    """It weighs by the product of current / behaviour over a sequence."""
    uses_proximal: bool = True
    """It weighs tokens by current / proximal, which is 1 at the start of each step only if the proximal policy is recomputed."""
    has_clip_range: bool = False
    """It clips a token's ratio, in a range that m2po_clip can set."""
    has_dual_clip: bool = False
    needs_log_ratio_penalty: bool = False
    """Without the penalty it is a different loss."""
    reads: tuple[str, ...] = ()
    """Fields of the config that only some losses read, and this one does."""


ADVANTAGE_RULES = {
    "grpo": AdvantageRule(needs_groups=True),
    "grpo_batch": AdvantageRule(needs_groups=True),
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
_RANGE = ("clip_low", "clip_high")
LOSS_RULES = {
    "ppo_clip": LossRule(has_clip_range=True, has_dual_clip=True, reads=_RANGE),
    "decoupled_ppo": LossRule(weighs_by_rho=True, has_clip_range=True, has_dual_clip=True, reads=_RANGE),
    "gspo": LossRule(has_dual_clip=True, reads=_RANGE),
    "gspo_token": LossRule(has_dual_clip=True, reads=_RANGE),
    "rloo_product": LossRule(has_dual_clip=True, reads=_RANGE),
    "gmpo": LossRule(reads=_RANGE),
    "dppo_tv": LossRule(reads=(*_RANGE, "max_ratio")),
    "dppo_kl": LossRule(reads=(*_RANGE, "max_ratio")),
    "cispo": LossRule(reads=("max_ratio",)),
    "sapo": LossRule(reads=("tau_positive", "tau_negative")),
    "reinforce": LossRule(uses_proximal=False),
    "dro": LossRule(uses_proximal=False, needs_log_ratio_penalty=True),
    "importance_sampling": LossRule(own_importance_weight=True, uses_proximal=False),
    "aipo": LossRule(own_importance_weight=True, uses_proximal=False, reads=("max_ratio",)),
    "topr": LossRule(own_importance_weight=True, weighs_sequences=True, uses_proximal=False),
    "vespo": LossRule(
        own_importance_weight=True, weighs_sequences=True, uses_proximal=False, reads=("vespo_positive", "vespo_negative")
    ),
}
OF_SOME_LOSSES = tuple(dict.fromkeys(field for rule in LOSS_RULES.values() for field in rule.reads))
"""Fields that a loss reads only if its rule names them."""

UNUSED_BY_DPO = (
    "advantage", "whiten", "dynamic_sampling", "loss", "dual_clip", "log_ratio_penalty", "proximal", "corrections", "aggregation",
    "denominator", "entropy_coefficient",
)  # fmt: skip
"""Fields of the policy loss. DPO has its own loss, so each must stay at its default."""
PICKED_BY_AUTO = ("loss", "corrections")
"""Fields that `kind = "auto"` chooses, so each must stay at its default."""


def algorithm_faults(algorithm: kinds.AlgorithmConfig, learner: LearnerConfig) -> Iterator[str]:
    """Yield what is wrong (an unknown name, or a combination that cannot work), with the fields and what to write instead."""
    for field, name, known in (("advantage", algorithm.advantage, ADVANTAGE_RULES), ("loss", algorithm.loss, LOSS_RULES)):
        if name not in known and not _names_function(name):
            allowed = f"{', '.join(known)}, or your own function as module:function"
            yield f"algorithm.{field} must be one of {allowed}, got {name!r}"
    yield from _bounds(algorithm)
    if algorithm.kind == "dpo":
        yield from _preferences(algorithm)
        return
    for field in _set_fields(algorithm, PICKED_BY_AUTO) if algorithm.kind == "auto" else ():
        instead = "drop it, or set algorithm.kind = 'policy' to use it"
        yield f"algorithm.kind = 'auto' picks loss and corrections itself and would not read algorithm.{field}: {instead}"
    yield from _advantage(algorithm)
    yield from _corrections(algorithm, learner)
    yield from _weight_counted_once(algorithm)
    yield from _loss(algorithm)


def doubts_about_algorithm(
    algorithm: kinds.AlgorithmConfig, sampling: SamplingConfig | None = None, max_staleness: int = 0
) -> list[str]:
    """Return settings that work but are probably a mistake, each with what to do."""
    default, sampling = kinds.AlgorithmConfig(), sampling or SamplingConfig()
    fields = _set_fields(algorithm, ("proximal", "denominator")) if algorithm.kind == "auto" else []
    doubts = [
        f"algorithm.{field} = {getattr(algorithm, field)!r} is not read: algorithm.kind = 'auto' always takes "
        f"{getattr(default, field)!r}; drop it"
        for field in fields
    ]
    rule = LOSS_RULES.get(algorithm.loss, LossRule(weighs_by_rho=True, reads=OF_SOME_LOSSES))
    is_dpo = algorithm.kind == "dpo"
    loss = "algorithm.kind = 'dpo'" if is_dpo else f"algorithm.loss = {algorithm.loss!r}"
    for field in _set_fields(algorithm, OF_SOME_LOSSES):
        if is_dpo or field not in rule.reads:
            readers = ", ".join(name for name, one in LOSS_RULES.items() if field in one.reads)
            doubts.append(
                f"algorithm.{field} = {getattr(algorithm, field)!r} is not read with {loss}, only with {readers}; drop it"
            )
    sees_age = rule.weighs_by_rho or rule.own_importance_weight or rule.needs_log_ratio_penalty or bool(algorithm.corrections)
    if algorithm.kind == "policy" and algorithm.proximal == "recompute" and not sees_age and max_staleness > 1:
        doubts.append(
            f"algorithm.loss = {algorithm.loss!r} with proximal = 'recompute' and without corrections does not see how old data "
            f"is, and buffer.max_staleness is {max_staleness}: set proximal = 'behaviour', or add a correction"
        )
    if algorithm.kind != "dpo" and (sampling.top_p < 1.0 or sampling.top_k):
        of_sequences = [
            item.kind
            for item in algorithm.corrections
            if isinstance(item, kinds.TruncatedSequence)
            or (isinstance(item, kinds.Rejection) and (item.level not in {"token", "max"} or item.weight == "sequence"))
        ]
        if LOSS_RULES.get(algorithm.loss, LossRule()).weighs_sequences:
            of_sequences.append(algorithm.loss)
        worse = f", and {', '.join(of_sequences)} may drop most samples or weigh them next to 0" if of_sequences else ""
        doubts.append(
            f"generate.sampling.top_p = {sampling.top_p:g} and top_k = {sampling.top_k} leave tokens out: log-probabilities of "
            "samples are of the tokens that are left, and the learner's are of the whole vocabulary. So ratios are under 1 on "
            f"data that is not stale{worse}; set top_p = 1 and top_k = 0"
        )
    return doubts


def _set_fields(algorithm: kinds.AlgorithmConfig, fields: Sequence[str]) -> list[str]:
    """Return those of the fields that are not at their default."""
    default = kinds.AlgorithmConfig()
    return [field for field in fields if getattr(algorithm, field) != getattr(default, field)]


def _names_function(path: str) -> bool:
    """Return whether it is of the form `module:function` or `file.py:function`; it is imported where it is used."""
    module, _, function = path.rpartition(":")
    return bool(module) and function.isidentifier()


def _names(rules: Mapping[str, AdvantageRule | LossRule], flag: str) -> str:
    """Return the names whose rule has this flag."""
    return ", ".join(name for name, rule in rules.items() if getattr(rule, flag))


def _advantage(algorithm: kinds.AlgorithmConfig) -> Iterator[str]:
    """Refuse an advantage without what it reads, or with what it does not read: critic, groups, token rewards."""
    rule, kl, critic = ADVANTAGE_RULES.get(algorithm.advantage), algorithm.kl, algorithm.critic
    name, group_size = f"algorithm.advantage = {algorithm.advantage!r}", algorithm.group_size
    if rule is not None and rule.needs_critic and critic is None:
        yield f"{name} needs a critic: add an [algorithm.critic] table"
    if rule is not None and not rule.needs_critic and critic is not None:
        yield f"{name} has no use for a critic: take {_names(ADVANTAGE_RULES, 'needs_critic')}, or drop [algorithm.critic]"
    if rule is not None and rule.needs_groups and group_size < 2:
        yield f"{name} compares the samples of a group; algorithm.group_size must be at least 2, got {group_size}"
    if algorithm.dynamic_sampling and group_size < 2:
        yield "algorithm.dynamic_sampling drops groups without spread; algorithm.group_size must be at least 2"
    if kl is not None and kl.where == "reward" and rule is not None and not rule.reads_token_rewards:
        instead = f"take one of {_names(ADVANTAGE_RULES, 'reads_token_rewards')}, or kl.where = 'loss'"
        yield f"algorithm.kl.where = 'reward' changes token rewards, which {name} does not read; {instead}"
    if kl is not None and kl.where == "reward" and kl.gradient != "own":
        instead = "a KL in the reward has no gradient; drop it, or set kl.where = 'loss'"
        yield f"algorithm.kl.gradient = {kl.gradient!r} is for algorithm.kl.where = 'loss': {instead}"
    if critic is not None and critic.kind == "head" and critic.path:
        instead = "set critic.kind = 'separate', or drop the path"
        yield f"algorithm.critic.path ({critic.path!r}) is of a critic of its own; kind = 'head' sits on the policy: {instead}"


def _corrections(algorithm: kinds.AlgorithmConfig, learner: LearnerConfig) -> Iterator[str]:
    """Refuse several importance weights, and masks of a ratio that is always 1."""
    weighting = [item.kind for item in algorithm.corrections if kinds.is_importance_weight(item)]
    masks = [item.kind for item in algorithm.corrections if isinstance(item, kinds.MASKS_BY_RHO)]
    if weighting and LOSS_RULES.get(algorithm.loss, LossRule()).own_importance_weight:
        twice = f"the correction {weighting[0]!r} would count it twice: set algorithm.corrections to masks only, or to []"
        yield f"algorithm.loss = {algorithm.loss!r} has its importance weight inside, and {twice}"
    if len(weighting) > 1:
        several = f"{len(weighting)} importance weights ({', '.join(weighting)})"
        yield f"algorithm.corrections has {several}; their product is no importance weight: keep one"
    if algorithm.proximal == "behaviour" and masks:
        nothing = "makes them one, so it would drop nothing: set algorithm.proximal = 'recompute'"
        yield f"the correction {masks[0]!r} compares proximal with behaviour policy; algorithm.proximal = 'behaviour' {nothing}"
    reads_current = any(isinstance(item, kinds.OffPolicySequenceMask) for item in algorithm.corrections)
    if reads_current and algorithm.denominator == "kept" and learner.minibatches * learner.epochs > 1:
        instead = "several updates a step change that: take denominator = 'all', or learner.minibatches = learner.epochs = 1"
        yield f"algorithm.denominator = 'kept' must know before an update which tokens opsm keeps, and {instead}"


def _weight_counted_once(algorithm: kinds.AlgorithmConfig) -> Iterator[str]:
    """Refuse a second importance weight if the advantage already contains one."""
    if not ADVANTAGE_RULES.get(algorithm.advantage, AdvantageRule()).own_importance_weight:
        return
    carries = f"algorithm.advantage = {algorithm.advantage!r} carries its importance weight"
    loss, rule = f"algorithm.loss = {algorithm.loss!r}", LOSS_RULES.get(algorithm.loss, LossRule())
    if algorithm.kind == "auto":
        instead = "take advantage = 'gae', or kind = 'policy' with a loss and corrections that have none"
        yield f"{carries}, and algorithm.kind = 'auto' picks another: {instead}"
    for item in filter(kinds.is_importance_weight, algorithm.corrections):
        instead = "set algorithm.corrections to masks only, or to [], or take advantage = 'gae'"
        yield f"{carries}, and the correction {item.kind!r} would count it twice: {instead}"
    if rule.own_importance_weight or (rule.weighs_by_rho and algorithm.proximal != "behaviour"):
        yield f"{carries}, and {loss} would count it twice: take loss = 'reinforce' (IMPALA), or advantage = 'gae'"
    if rule.uses_proximal and algorithm.proximal != "recompute":
        ratio = f"with algorithm.proximal = {algorithm.proximal!r} the ratio of {loss} would count it twice"
        instead = "set algorithm.proximal = 'recompute' with loss = 'ppo_clip', or take loss = 'reinforce', or advantage = 'gae'"
        yield f"{carries} up to the learner before the step, and {ratio}: {instead}"


def _loss(algorithm: kinds.AlgorithmConfig) -> Iterator[str]:
    """Refuse settings that the loss does not read: a clip range, a dual clip, an aggregation constant."""
    loss, rule = f"algorithm.loss = {algorithm.loss!r}", LOSS_RULES.get(algorithm.loss)
    sets_range = any(isinstance(item, kinds.SecondMomentClip) for item in algorithm.corrections)
    if sets_range and rule is not None and not rule.has_clip_range:
        instead = f"take one of {_names(LOSS_RULES, 'has_clip_range')}, or the correction 'm2po_mask'"
        yield f"the correction 'm2po_clip' sets a clip range, and {loss} has none of a token: {instead}"
    if sets_range and algorithm.proximal == "recompute":
        other = "the loss clips another ratio, which is 1 when the range is chosen: set algorithm.proximal = 'behaviour'"
        yield f"the correction 'm2po_clip' bounds current / behaviour, and with algorithm.proximal = 'recompute' {other}"
    if algorithm.dual_clip is not None and rule is not None and not rule.has_dual_clip:
        instead = (
            f"take one of {_names(LOSS_RULES, 'has_dual_clip')}, or drop algorithm.dual_clip: by a preset whose [algorithm] has "
            f'`kind`, or --set \'algorithm={{kind="policy", loss="{algorithm.loss}"}}\', which replace all of [algorithm]'
        )
        yield f"algorithm.dual_clip bounds a clipped loss, and {loss} does not clip: {instead}"
    if rule is not None and rule.needs_log_ratio_penalty and not algorithm.log_ratio_penalty:
        yield f"{loss} needs algorithm.log_ratio_penalty over 0: half the method's beta"
    name, constant = algorithm.aggregation, algorithm.aggregation_constant
    divides = name in {"constant", "seq-mean-token-sum-norm"}
    if divides and constant == 1.0:
        longest = "give the longest response allowed (generate.sampling.max_new_tokens)"
        yield f"algorithm.aggregation = {name!r} divides by algorithm.aggregation_constant, which is not set: {longest}"
    if not divides and constant != 1.0:
        read = f"is read with algorithm.aggregation = 'constant' only (is {name!r}): set that, or drop it"
        yield f"algorithm.aggregation_constant ({constant:g}) {read}"


def _bounds(algorithm: kinds.AlgorithmConfig) -> Iterator[str]:
    """Refuse contradictory bounds of corrections, and a user's own correction that is not a valid path."""
    for item in algorithm.corrections:
        name = f"algorithm.corrections: {item.kind}"
        if isinstance(item, kinds.PythonCorrection) and not _names_function(item.path):
            yield f"algorithm.corrections: the path of python must be module:function or file.py:function, got {item.path!r}"
        measure, fresh, low, high = "rho", 1.0, 0.0, math.inf
        if isinstance(item, kinds.Truncated):
            low, high = item.floor, item.cap
            if low > high:
                yield f"{name} has floor {low} over cap {high}"
        if isinstance(item, kinds.Rejection):
            is_ratio = item.measure == "ratio"
            measure, fresh = ("rho", 1.0) if is_ratio else (item.measure, 0.0)
            low, high = max(item.low, 0.0) if is_ratio else item.low, item.high
            if math.isinf(item.low) and math.isinf(high):
                yield f"{name} drops nothing without bounds: set low, high or both"
            if item.level == "geometric" and not is_ratio:
                yield f"{name} has level 'geometric', a mean of ratios: set measure = 'ratio', or level = 'mean'"
            if low >= high:
                yield f"{name} keeps what lies in [low, high]; low ({low}) must be under high ({high})"
        if not low <= fresh <= high:
            stale = f"the {measure} of data that is not stale is {fresh:g}: take bounds on both sides of that"
            yield f"{name} lets {measure} be in [{low:g}, {high:g}], and {stale}"


def _preferences(algorithm: kinds.AlgorithmConfig) -> Iterator[str]:
    preference, kind, name = algorithm.preference, "algorithm.kind = 'dpo'", "algorithm.preference"
    for field in _set_fields(algorithm, UNUSED_BY_DPO):
        yield f"{kind} has its own loss and makes no use of algorithm.{field}: drop it"
    if algorithm.group_size < 2:
        yield f"{kind} makes pairs: algorithm.group_size must be at least 2, got {algorithm.group_size}"
    if algorithm.critic is not None:
        yield f"{kind} has no use for algorithm.critic: drop it"
    if algorithm.kl is not None:
        yield f"{kind} is held to the reference by preference.beta and has no use for algorithm.kl: drop it"
    chosen, rejected = preference.chosen_at_least, preference.rejected_at_most
    if preference.pairs == "threshold" and chosen <= rejected:
        yield f"{name}.chosen_at_least ({chosen}) must be over rejected_at_most ({rejected})"
    if preference.label_smoothing and preference.loss in {"ipo", "hinge"}:
        yield f"{name}.label_smoothing is of the sigmoid and robust losses; {preference.loss} has none: set it to 0"
