"""A simulation that is told what a run's spans say does what the run did; the memory formulas add up as they say."""

import msgspec
import pytest

from asyncrl.config.load import dump_config, parse_config
from asyncrl.models.memory import ModelShape
from asyncrl.observe.spans import span
from asyncrl.observe.steps import StepReport
from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.measured import real_figures, scenario_of_run
from asyncrl.plan.validate import planned_peak_bytes

GENERATE_S, STEP_S, NUM_STEPS = 0.5, 0.3, 20


def write_lockstep_run(folder, learner):
    """Two samples of 50 tokens, then their step, then the next two: staleness 0, a step every 0.8 s."""
    config = parse_config({
        "num_steps": NUM_STEPS,
        "generate": {"num_workers": 1, "engine": {"kind": "fake", "num_slots": 2}},
        "algorithm": {"groups_per_step": 1, "group_size": 2},
        "buffer": {"max_staleness": 0},
        "learner": {"kind": learner},
    })  # fmt: skip
    (folder / "config.toml").write_text(dump_config(config))
    spans, reports = [], []
    for step in range(NUM_STEPS):
        now = step * (GENERATE_S + STEP_S)
        done = now + GENERATE_S
        for index in range(2):
            spans.append(span("generate", now, done, "generator-0", tokens=50, group=step, index=index, purpose="train"))
            spans.append(span("score", done, done, "reward-0", group=step, index=index))
        if learner == "builtin":
            spans.append(span("wait", now, done, "learner", step=step))
        spans.append(span("step", done, done + STEP_S, "learner", step=step, version=step + 1))
        spans.append(span("swap", done + STEP_S, done + STEP_S, "generator-0", version=step + 1, fetch_ms=0.0, swap_ms=0.0))
        reports.append(msgspec.structs.replace(EMPTY, step=step, version=step + 1, time_s=done + STEP_S))
    for name, items in (("spans", spans), ("steps", reports)):
        (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in items))


EMPTY = StepReport(
    step=0, version=1, time_s=0.0, reward_mean=0.0, reward_std=0.0, staleness_mean=0.0, staleness_max=0,
    generated_tokens_per_s=0.0, trained_tokens_per_s=0.0, groups_ready=0, groups_running=0, groups_scoring=0,
    learner_idle=0.0, generators_idle=0.0,
)  # fmt: skip


@pytest.mark.parametrize("learner", ["builtin", "external"])
def test_a_simulation_of_what_spans_say_gives_the_run_back(tmp_path, learner):
    write_lockstep_run(tmp_path, learner)
    steps_per_s, staleness = real_figures(tmp_path)
    assert steps_per_s == pytest.approx(1 / (GENERATE_S + STEP_S))
    made = simulate(scenario_of_run(tmp_path))
    assert made.steps_per_s == pytest.approx(steps_per_s, rel=0.02)
    assert made.mean_staleness == staleness == 0


def test_checkpointing_leaves_of_each_layer_its_input_and_of_one_all():
    model = ModelShape(64, 10, 4, 4, 16, 256, 128)
    kept, all_of_it = (planned_peak_bytes(model, 4096, checkpointing=checkpointing) for checkpointing in (True, False))
    # A layer's values: two norms of 3, attention of 5, feed-forward of 4 widths; checkpointed, nine layers keep 1 of them.
    layer = 4 * 4096 * (2 * 3 * 64 + 5 * 64 + 4 * 256)
    assert all_of_it - kept == 9 * layer - 10 * 4 * 4096 * 64
