"""The number of generators: what moves it, what does not, and that it settles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.run import ElasticConfig
from asyncrl.control.autoscaler import ScalingRule, Window


def scaler(wanted: int, **settings: float) -> ScalingRule:
    return ScalingRule(ElasticConfig(**({"max_generators": 8, "patience": 2} | settings)), wanted)  # type: ignore[arg-type]


def after(rule: ScalingRule, learner_idle: float, slots_used: float, num_ready: int) -> int:
    """Return how many generators are wanted after a window; it is said where that is another number."""
    before = rule.wanted
    said = rule.handle(Window(learner_idle, slots_used, num_ready), 0.0)
    assert said == ([rule.wanted] if rule.wanted != before else [])
    return rule.wanted


@pytest.mark.parametrize(("wanted", "least", "seen", "then"), [
    (3, 1, (0.4, 0.95, 3), 5),  # what is missing
    (2, 1, (0.99, 0.95, 2), 4),  # at most double
    (8, 1, (0.4, 0.95, 8), 8),  # the bound
    (2, 1, (0.5, 0.3, 2), 2),  # the learner waits for something else
    (4, 1, (0.0, 0.4, 4), 3),  # half empty
    (2, 1, (0.0, 0.51, 2), 2),  # the others could not replace it
    (2, 2, (0.0, 0.1, 2), 2),  # the bound
    (4, 1, (0.4, 0.95, 3), 4),  # one that was wanted is not there yet
])  # fmt: skip
def test_what_a_window_changes(wanted: int, least: int, seen: tuple[float, float, int], then: int) -> None:
    assert after(scaler(wanted, patience=1, min_generators=least), *seen) == then


def test_one_window_that_says_otherwise_starts_the_count_again() -> None:
    decided = scaler(3)
    for seen in ((0.4, 0.95, 3), (0.02, 0.8, 3), (0.4, 0.95, 3)):
        assert after(decided, *seen) == 3
    assert after(decided, 0.4, 0.95, 3) == 5


@given(demand=st.floats(0.2, 12.0), start=st.integers(1, 8))
def test_a_steady_load_is_met_and_then_left_alone(demand: float, start: int) -> None:
    """A learner that takes as much as `demand` generators make: nobody oscillates."""
    decided, numbers = scaler(start), []
    for _ in range(60):
        number = decided.wanted
        numbers.append(after(decided, max(0.0, 1 - number / demand), min(1.0, demand / number), number))
    assert len(set(numbers[-20:])) == 1
    settled = numbers[-1]
    assert 1 <= settled <= 8
    assert settled >= min(demand * 0.9 - 1e-9, 8)
