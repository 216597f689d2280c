"""The number of generators: what moves it, what does not, and that it settles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.run import ElasticConfig
from asyncrl.control.autoscaler import Balance, ScalingRule


def scaler(wanted: int, **settings: float) -> ScalingRule:
    return ScalingRule(ElasticConfig(**({"max_generators": 8, "patience": 2} | settings)), wanted)  # type: ignore[arg-type]


def starved(generators: int, idle: float = 0.4) -> Balance:
    return Balance(idle, 0.95, generators)


def test_a_learner_that_waits_gets_what_is_missing_after_patience_windows() -> None:
    decided = scaler(3)
    assert decided.decide(starved(3)) == 3
    assert decided.decide(starved(3)) == 5


def test_growth_is_at_most_double() -> None:
    assert scaler(2, patience=1).decide(starved(2, idle=0.99)) == 4


def test_one_window_that_says_otherwise_starts_the_count_again() -> None:
    decided = scaler(3)
    for balance in (starved(3), Balance(0.02, 0.8, 3), starved(3)):
        assert decided.decide(balance) == 3
    assert decided.decide(starved(3)) == 5


def test_a_learner_that_waits_while_slots_are_free_gets_no_generator() -> None:
    assert scaler(2, patience=1).decide(Balance(0.5, 0.3, 2)) == 2


def test_engines_that_are_half_empty_become_one_fewer() -> None:
    assert scaler(4, patience=1).decide(Balance(0.0, 0.4, 4)) == 3


@pytest.mark.parametrize("used", [0.51, 0.59])
def test_no_generator_goes_that_the_others_could_not_replace(used: float) -> None:
    assert scaler(2, patience=1).decide(Balance(0.0, used, 2)) == 2


def test_nothing_is_decided_while_a_wanted_generator_is_not_there() -> None:
    decided = scaler(2, patience=1)
    assert decided.decide(starved(2)) == 4
    assert decided.decide(starved(3)) == 4


def test_the_bounds_hold() -> None:
    assert scaler(8, patience=1).decide(starved(8)) == 8
    assert scaler(2, patience=1, min_generators=2).decide(Balance(0.0, 0.1, 2)) == 2


@given(demand=st.floats(0.2, 12.0), start=st.integers(1, 8))
def test_a_steady_load_is_met_and_then_left_alone(demand: float, start: int) -> None:
    """A learner that takes as much as `demand` generators make: nobody oscillates."""
    decided, numbers = scaler(start), []
    for _ in range(60):
        number = decided.wanted
        idle, used = max(0.0, 1 - number / demand), min(1.0, demand / number)
        numbers.append(decided.decide(Balance(idle, used, number)))
    assert len(set(numbers[-20:])) == 1
    settled = numbers[-1]
    assert 1 <= settled <= 8
    assert settled >= min(demand * 0.9 - 1e-9, 8)
