import dataclasses

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.plan.report import plot, table
from asyncrl.plan.simulator.engine import Member, SimulatedGenerator, simulate, sweep
from asyncrl.plan.simulator.scenario import Scenario, fixed, parse_distribution, scenario_of

SIZES = {"groups_per_step": 4, "group_size": 2, "num_slots": 8, "num_steps": 20}
SCENARIO = Scenario(lengths=fixed(10), decode_s=0.1, step_s=fixed(0.5), **SIZES)


@pytest.mark.parametrize("policy", ["wait", "drop", "mask"])
def test_the_bound_holds_and_nothing_is_lost_whatever_dies(policy):
    made = simulate(dataclasses.replace(
        SCENARIO, policy=policy, num_workers=5, max_staleness=1, failures_per_hour=300, restart_s=2.0, num_steps=60,
        lengths=parse_distribution("lognormal:20:1:200"), reward_s=parse_distribution("exponential:0.2"), reward_workers=3,
        sync_s=parse_distribution("uniform:0.1:1"), swap_s=0.05, hop_s=0.01,
    ))  # fmt: skip
    assert made.lost_generators > 5
    assert made.lost_groups == 0
    assert made.max_staleness <= 1 or policy == "mask"
    assert len(made.step_times_s) == 60


@pytest.mark.parametrize("started_s", [0.0, 1e6 / 3])
@pytest.mark.parametrize("num_tokens", [1, 1000])
def test_a_finish_finishes_something_however_late_its_generator_started(started_s, num_tokens):
    """The rounding of a late time must not leave it for ever just short of the finish."""
    generator = SimulatedGenerator("g", Scenario(), 0, started_s)
    generator.add([Member(0, 0, num_tokens)])
    generator.go_to(generator.next_finish_s())
    assert generator.take_finished() == [(Member(0, 0, num_tokens), ((0, num_tokens),))]


def test_a_sequence_of_a_full_batch_takes_as_long_as_the_fit_of_a_run_says():
    scenario = dataclasses.replace(SCENARIO, sequence_s=0.5, decode_s_per_sequence=0.02)
    generator = SimulatedGenerator("g", scenario, 0, 0.0)
    generator.add([Member(0, index, 10) for index in range(8)])
    assert generator.next_finish_s() == pytest.approx(0.5 + 10 * (0.1 + 7 * 0.02))


@pytest.mark.parametrize("eta", [2, 8])
def test_a_generator_that_is_fast_enough_makes_fresh_data_at_any_bound_and_costs_the_learner_nothing(eta):
    scenario = dataclasses.replace(SCENARIO, decode_s=0.01, max_staleness=eta, num_steps=60)
    needed, allowed = simulate(scenario), simulate(dataclasses.replace(scenario, ahead="as_allowed"))
    assert (needed.mean_staleness, allowed.mean_staleness) == (1.0, float(eta))
    assert needed.steps_per_s == pytest.approx(allowed.steps_per_s, rel=0.01)
    slow = dataclasses.replace(scenario, reward_s=fixed(3.0))  # as long as six steps
    needed, allowed = simulate(slow), simulate(dataclasses.replace(slow, ahead="as_allowed"))
    assert needed.mean_staleness > 0.6 * eta
    assert needed.steps_per_s > 0.7 * allowed.steps_per_s


@pytest.mark.parametrize(
    ("text", "mean"),
    [("2.5", 2.5), ("fixed:3", 3), ("uniform:1:3", 2), ("exponential:4", 4), ("lognormal:64:1", 64), ("lognormal:64:1:1e9", 64)],
)
def test_a_distribution_has_the_mean_it_says(text, mean):
    draw = parse_distribution(text).drawer(np.random.default_rng(0))
    assert np.mean([draw() for _ in range(20_000)]) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    "text", ["", "fast", "uniform:1", "lognormal:0:1", "uniform:-1:2", "uniform:9:3", "gamma:1:2", "fixed:inf"]
)
def test_no_distribution_is_a_config_error(text):
    with pytest.raises(ConfigError):
        parse_distribution(text)


@pytest.mark.parametrize(("text", "said"), [
    ("generators=3", "num_workers"), ("policy=throw", "wait"), ("num_steps=1", "at least 2"), ("num_steps", "FIELD=VALUE"),
    ("num_slots=x", "takes int"), ("num_workers=99999999999", "at most 100000"), ("decode_s=inf", "a finite number"),
    ("hop_s=-0.01", "at least 0"), ("reward_workers=-1", "at least 0"), ("failures_per_hour=-1", "at least 0"),
])  # fmt: skip
def test_a_field_that_cannot_be_is_a_config_error(text, said):
    with pytest.raises(ConfigError, match=said):
        scenario_of(SCENARIO, [text])


def test_a_sweep_is_a_row_a_value_and_a_picture(tmp_path):
    told = []
    rows = sweep(SCENARIO, "max_staleness=0,1,2", lambda *progress: told.append(progress))
    assert told[:2] == [("0", 1, 20), ("0", 2, 20)]
    assert told[-1] == ("2", 20, 20)
    assert [value for value, _ in rows] == ["0", "1", "2"]
    assert rows[1][1].steps_per_s > rows[0][1].steps_per_s
    assert len(table(rows, "max_staleness=0,1,2").splitlines()) == 4
    plot(rows, "max_staleness=0,1,2", tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 5000
    with pytest.raises(ConfigError, match="at least two"):
        plot(rows[:1], "max_staleness=0", tmp_path / "x.png")
