"""The adaptive recipe: monotone in every signal, steady at a limit, safe before anything is measured, valid as a config."""

import math

import msgspec
import pytest

from asyncrl.algorithms.auto import FIRST, LIMITS, RECIPE_NAMES, RETURN, SIGNALS, applied, choose
from asyncrl.config.algorithm import AlgorithmConfig, KLConfig
from asyncrl.config.algorithm_table import algorithm_faults
from asyncrl.config.learner import LearnerConfig

ON_POLICY = dict.fromkeys(SIGNALS, 0.0) | {"ratio/ess": 1.0}


def at(limit, value):
    """Measurements that are on-policy but for one signal."""
    return ON_POLICY | {limit.metric: 1.0 - value if limit.is_one_minus else value}


@pytest.mark.parametrize(("measured", "last", "expected"), [
    ({}, "", FIRST),
    ({"staleness/mean": 0.0, "staleness/max": 0.0}, "", FIRST),
    ({"staleness/mean": 12.0, "staleness/max": 12.0}, "", "far"),
    *((ON_POLICY, last, "near") for last in ("", *RECIPE_NAMES, "removed_recipe")),
    *((at(limit, math.inf), "near", "far") for limit in LIMITS),
    *((ON_POLICY | {limit.metric: math.nan}, "near", "far") for limit in LIMITS),
])  # fmt: skip
def test_nothing_known_is_safe_on_policy_near_and_what_is_no_number_far(measured, last, expected):
    assert choose(measured, last).recipe == expected


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.metric)
@pytest.mark.parametrize("wanted", [1, 2])
def test_each_signal_alone_asks_for_caution_with_its_number_and_lets_go_well_under_its_limit(limit, wanted):
    bound, recipe = limit.of(wanted), RECIPE_NAMES[wanted]
    choice = choose(at(limit, 1.01 * bound), "near")
    assert choice.recipe == recipe
    assert f"{limit.name} {1.01 * bound:.3g} is over {bound:g}" in choice.reason
    assert choose(at(limit, 0.99 * bound), "near").recipe == RECIPE_NAMES[wanted - 1]
    held = choose(at(limit, (1 + RETURN) / 2 * bound), recipe)
    assert held.recipe == recipe
    assert "held" in held.reason
    assert choose(at(limit, 0.99 * RETURN * bound), recipe).recipe in RECIPE_NAMES[:wanted]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("algorithm", [
    AlgorithmConfig(kind="auto"),
    AlgorithmConfig(kind="auto", loss="aipo", corrections=(), denominator="kept", kl=KLConfig()),
    AlgorithmConfig(kind="auto", loss="gspo", proximal="behaviour", clip_high=0.28, advantage="rloo"),
])  # fmt: skip
@pytest.mark.parametrize("updates", [1, 4])
def test_every_recipe_makes_a_config_that_the_rules_accept_and_keeps_what_is_the_users(recipe, algorithm, updates):
    made = applied(algorithm, recipe)
    assert list(algorithm_faults(made, LearnerConfig(minibatches=updates))) == []
    assert msgspec.convert(msgspec.to_builtins(made), AlgorithmConfig) == made
    changed = {name for name in made.__struct_fields__ if getattr(made, name) != getattr(algorithm, name)}
    assert changed <= {"kind", "loss", "corrections", "proximal", "denominator"}
    assert made.kind == "policy"
