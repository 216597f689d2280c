"""`algorithm.kind = "auto"`: picks loss and corrections from the measured staleness and mismatch of the data.

Recipes are ordered from gentle to cautious. A step uses the most cautious recipe for which a signal is over its limit. It returns
to a gentler one only when every signal is well under the limit (RETURN), so that noise at a limit does not change the recipe at
each step. All numbers to tune are in LIMITS. Signals do not depend on the recipe in use: they compare the behaviour policy with
the learner before the step.

Pure: no clock, no tensors, no state; the same measurements and last recipe give the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from asyncrl.config.algorithm import AlgorithmConfig, CorrectionConfig, OffPolicySequenceMask, TruncatedToken

LOSS = "decoupled_ppo"
"""The loss of every recipe; advantage, clip range, aggregation and penalties are those of the config."""
RECIPES: dict[str, tuple[CorrectionConfig, ...]] = {
    "near": (TruncatedToken(cap=2.0),),
    "lagging": (TruncatedToken(cap=2.0), OffPolicySequenceMask(threshold=0.1)),
    "far": (TruncatedToken(cap=1.0), OffPolicySequenceMask(threshold=0.1)),
}
"""The corrections of each recipe, from gentle to cautious. `near` truncates importance weights; `lagging` also drops samples of
negative advantage that are far from the current policy; `far` also limits every weight to 1.

Source: decoupled PPO, Fu et al. 2025 (AReaL); truncated importance sampling, Yao et al. 2025; off-policy sequence masking,
DeepSeek-V3.2 2025. Results: experiments/off_policy.
"""
RECIPE_NAMES = tuple(RECIPES)
FIRST = "lagging"
"""The first recipe, before mismatch is measured: its mask does nothing on data near the policy, and drops data far from it."""
RETURN = 0.7
"""A recipe is left when every signal is under this share of the limit that asks for it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Values of one signal over which a recipe is used; every signal grows with the distance."""

    metric: str
    lagging: float
    far: float
    is_one_minus: bool = False
    """The signal is 1 minus the metric."""
    is_mismatch: bool = True
    """Whether the signal comes from log-probabilities; False: from versions only."""

    @property
    def name(self) -> str:
        """Return the signal's name in reasons."""
        return f"1 - {self.metric}" if self.is_one_minus else self.metric

    def of(self, level: int) -> float:
        """Return the limit of a recipe, given its index in RECIPE_NAMES."""
        return (0.0, self.lagging, self.far)[level]


LIMITS = (
    Limit("staleness/mean", lagging=2.0, far=8.0, is_mismatch=False),
    Limit("staleness/max", lagging=4.0, far=16.0, is_mismatch=False),
    Limit("kl/mean", lagging=0.005, far=0.03),
    Limit("ratio/ess", lagging=0.01, far=0.06, is_one_minus=True),
    Limit("ratio/high_fraction", lagging=0.005, far=0.03),
    Limit("ratio/chi2_sequence", lagging=10.0, far=1000.0),
)
"""If log rho is normal with variance v: kl/mean is v / 2 and 1 - ratio/ess about v."""
SIGNALS = tuple(limit.metric for limit in LIMITS)
"""Metrics that `choose` reads."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe and the reason for it."""

    recipe: str
    """A name in RECIPES."""
    reason: str
    """A sentence with the numbers, for the log."""


def choose(measured: Mapping[str, float], last: str) -> Choice:
    """Pick the recipe of a step.

    Args:
        measured: Metrics of the previous step or (staleness) the present batch; only SIGNALS are read, any may be missing.
        last: The previous recipe; empty: none.

    Returns:
        The recipe and the reason.
    """
    signals: dict[Limit, float] = {}
    for limit in LIMITS:
        if limit.metric in measured:
            value = 1.0 - measured[limit.metric] if limit.is_one_minus else measured[limit.metric]
            signals[limit] = math.inf if math.isnan(value) else value
    asked, asking = _level(signals, 1.0)
    if not any(limit.is_mismatch for limit in signals):
        recipe = RECIPE_NAMES[max(asked, RECIPE_NAMES.index(FIRST))]
        return Choice(recipe, f"recipe {recipe}: {f'{asking}, and ' if recipe != FIRST else ''}no mismatch measured yet")
    asking = asking or ", ".join(f"{limit.name} {value:.3g} is not over {limit.lagging:g}" for limit, value in signals.items())
    if last not in RECIPES or asked >= RECIPE_NAMES.index(last):
        return Choice(RECIPE_NAMES[asked], f"recipe {RECIPE_NAMES[asked]}: {asking}")
    held, holding = _level(signals, RETURN)
    level = min(held, RECIPE_NAMES.index(last))
    if level > asked:
        return Choice(RECIPE_NAMES[level], f"recipe {RECIPE_NAMES[level]} held: {holding} x {RETURN:g}")
    return Choice(RECIPE_NAMES[asked], f"recipe {RECIPE_NAMES[asked]} instead of {last}: {asking}")


def applied(algorithm: AlgorithmConfig, recipe: str) -> AlgorithmConfig:
    """Return the config of a step under a recipe: kind `policy`, with LOSS and the recipe's corrections.

    The proximal policy is recomputed (with one update per step this costs nothing), and dropped tokens stay in the denominator.
    """
    return msgspec.structs.replace(
        algorithm, kind="policy", loss=LOSS, corrections=RECIPES[recipe], proximal="recompute", denominator="all"
    )


def _level(signals: Mapping[Limit, float], share: float) -> tuple[int, str]:
    """Return the most cautious level that a signal over `share` of its limit asks for, and the signals that do so."""
    for level in range(len(RECIPE_NAMES) - 1, 0, -1):
        over = [(limit, value) for limit, value in signals.items() if value > share * limit.of(level)]
        if over:
            return level, ", ".join(f"{limit.name} {value:.3g} is over {limit.of(level):g}" for limit, value in over)
    return 0, ""
