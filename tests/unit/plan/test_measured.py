"""A scenario out of a run's spans, and that a simulation of it does what the run did."""

import msgspec
import numpy as np
import pytest

from asyncrl.config.load import dump_config, parse_config
from asyncrl.errors import ConfigError
from asyncrl.observe.spans import span
from asyncrl.observe.steps import RunEvent, StepReport
from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.measured import fit_decode, real_figures, scenario_of_run, working_time


def test_the_three_terms_of_decoding_are_found_again():
    rng = np.random.default_rng(0)
    samples, starts = [], []
    for batch in range(40):
        # A batch of n that begins and ends together: every one has n - 1 beside it in its middle.
        size, tokens, start = int(rng.integers(1, 30)), int(rng.integers(5, 200)), batch * 100.0
        seconds = 0.05 + tokens * (0.01 + (size - 1) * 0.0005)
        samples += [span("generate", start, start + seconds, "g", tokens=tokens) for _ in range(size)]
        starts += [start] * size
    assert fit_decode(samples, starts) == pytest.approx((0.05, 0.01, 0.0005), rel=0.02)


def write_run(folder, spans, reports=(), events=(), **settings):
    """A run of one generator of two slots, two samples a step."""
    run = {
        "num_steps": 100, "generate": {"num_workers": 1, "engine": {"kind": "fake", "num_slots": 2}},
        "algorithm": {"groups_per_step": 1, "group_size": 2},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(dump_config(parse_config(run | settings)))
    for name, items in (("spans", spans), ("steps", reports), ("events", events)):
        (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in items))


def sample_spans(step, start, end, scored_s, samples=1):
    generated = span("generate", start, end, "generator-0", tokens=50 * samples, group=step, samples=samples, purpose="train")
    return generated, span("score", end + scored_s, end + 1.5 * scored_s, "reward-0", group=step, samples=samples)


def busy_spans(num_steps, pause_s=0.0):
    """A step every two seconds, with a pause in the middle."""
    for step in range(num_steps):
        now = step * 2.0 + (pause_s if step >= num_steps // 2 else 0.0)
        for group, end in ((2 * step, 0.5), (2 * step + 1, 1.0)):  # of two members, in two slots: the second waits for the first
            yield from sample_spans(group, now, now + end, 0.02, samples=2)
        yield span("wait", now + 1.0, now + 1.1, "learner", step=step)
        yield span("step", now + 1.1, now + 1.6, "learner", step=step, version=step + 1)
        yield span("swap", now + 1.6, now + 1.9, "generator-0", version=step + 1, fetch_ms=200.0, swap_ms=100.0)


def test_a_scenario_says_what_the_spans_said(tmp_path):
    write_run(tmp_path, busy_spans(8))
    made = scenario_of_run(tmp_path)
    assert (made.num_workers, made.num_slots, made.group_size, made.num_steps) == (1, 2, 2, 8)
    assert set(made.lengths.values) == {50}
    assert made.sequence_s + 50 * (made.decode_s + made.decode_s_per_sequence) == pytest.approx(0.5, rel=0.01)
    times = [np.mean(made.reward_s.values), made.hop_s, np.mean(made.step_s.values), np.mean(made.sync_s.values), made.swap_s]
    assert times == pytest.approx([0.01, 0.01, 1.9, 0.2, 0.1], rel=1e-6)
    assert made.reward_workers == 0  # a worker scores many samples at once, and their times have their waits


def test_lengths_begin_with_the_first_group_whose_spans_are_kept(tmp_path):
    write_run(tmp_path, [item for item in busy_spans(16) if item.start_s >= 16.0])
    assert scenario_of_run(tmp_path).lengths.values == (50.0,) * 32


def test_a_pause_is_no_work(tmp_path):
    """With a sample in flight as the run was paused, and finished after."""
    through, paused = tmp_path / "through", tmp_path / "paused"
    for folder, pause_s in ((through, 0.0), (paused, 500.0)):
        in_flight = span("generate", 11.5, 12.2 + pause_s, "generator-0", tokens=50, group=99, samples=1, purpose="eval")
        write_run(folder, [*busy_spans(12, pause_s), in_flight])
    expected, made = scenario_of_run(through), scenario_of_run(paused)
    assert np.mean(made.step_s.values) == pytest.approx(np.mean(expected.step_s.values), rel=0.2)
    assert made.decode_s == pytest.approx(expected.decode_s, rel=1e-6)
    assert working_time(paused)(512.5) == pytest.approx(12.5, abs=0.6)


def test_the_start_after_a_resume_is_no_work(tmp_path):
    """Three seconds, with spans in them."""
    started = [RunEvent(seq=seq, time_s=time_s, kind="phase", subject="starting") for seq, time_s in ((1, -1.0), (2, 12.5))]
    loaded = [span("swap", 13.0 + at, 13.5 + at, "generator-0", version=6, fetch_ms=200.0, swap_ms=100.0) for at in (0, 1)]
    reports = [StepReport(step=at, version=at + 1, time_s=2.0 * at + 1.6 + 3.0 * (at > 5), reward_mean=0.0) for at in range(12)]
    write_run(tmp_path, [*busy_spans(12, 3.0), *loaded], reports, started)
    assert max(scenario_of_run(tmp_path).step_s.values) == pytest.approx(1.9)
    assert real_figures(tmp_path)[0] == pytest.approx(0.5, rel=0.01)


def test_phases_that_take_turns_are_no_scenario(tmp_path):
    write_run(tmp_path, busy_spans(8), placement={"kind": "colocated"}, buffer={"max_staleness": 1})
    with pytest.raises(ConfigError, match=r"placement\.kind = 'colocated', whose phases take turns"):
        scenario_of_run(tmp_path)


@pytest.mark.parametrize("learner", ["builtin", "external"])
def test_a_simulation_of_what_spans_say_gives_the_run_back(tmp_path, learner):
    """Two samples of half a second, then their step, then the next two: staleness 0, a step every 0.8 s."""
    spans, reports = [], []
    for step in range(20):
        now, done = step * 0.8, step * 0.8 + 0.5
        for _ in range(2):
            spans += sample_spans(step, now, done, 0.0)
        spans += [span("wait", now, done, "learner", step=step)] if learner == "builtin" else []
        spans.append(span("step", done, now + 0.8, "learner", step=step, version=step + 1))
        spans.append(span("swap", now + 0.8, now + 0.8, "generator-0", version=step + 1, fetch_ms=0.0, swap_ms=0.0))
        reports.append(StepReport(step=step, version=step + 1, time_s=now + 0.8, reward_mean=0.0))
    write_run(tmp_path, spans, reports, buffer={"max_staleness": 0}, learner={"kind": learner})
    steps_per_s, staleness = real_figures(tmp_path)
    assert steps_per_s == pytest.approx(1 / 0.8)
    made = simulate(scenario_of_run(tmp_path))
    assert made.steps_per_s == pytest.approx(steps_per_s, rel=0.02)
    assert made.mean_staleness == staleness == 0
