"""A made-up run folder of 60 steps: two generators, a reward worker, a learner."""

from pathlib import Path

import pytest

from asyncrl.config.load import dump_config
from asyncrl.config.run import RunConfig
from asyncrl.observe.spans import GENERATE, PUBLISH, SCORE, SPANS_FILE, STEP, SWAP, WAIT, Span, span
from asyncrl.observe.steps import EVAL_FILE, STEPS_FILE, EvalReport, StepReport
from tests.builders import write_rows

NUM_STEPS = 60


def made_up_step(step: int) -> StepReport:
    counts = {"groups_ready": 3, "groups_running": 40, "groups_scoring": 2}
    return StepReport(step=step, version=step + 1, time_s=1.6 * step, reward_mean=0.9 - 0.65 * 0.95**step, **counts)


def made_up_spans(step: int) -> list[Span]:
    done, version = 1.6 * step, step + 1
    spans = [span(WAIT, done - 1.6, done - 1.4, "learner", step=step), span(STEP, done - 1.4, done, "learner", step=step)]
    spans.append(span(PUBLISH, done - 0.01, done, "learner", version=version))
    for generator in ("generator-0", "generator-1"):
        spans.append(span(SWAP, done, done + 0.03, generator, version=version))
        spans.extend(span(GENERATE, done + 0.1 * group, done + 1.5, generator, group=group, tokens=70) for group in range(4))
    return [*spans, span(SCORE, done + 1.5, done + 1.52, "reward-0", reward=1.0)]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(dump_config(RunConfig(name="quickstart", num_steps=NUM_STEPS)))
    write_rows(tmp_path / STEPS_FILE, *map(made_up_step, range(NUM_STEPS)))
    write_rows(tmp_path / SPANS_FILE, *(one for step in range(20) for one in made_up_spans(step)))
    evals = [EvalReport(version=version, accuracy=accuracy, num_samples=256) for version, accuracy in ((0, 0.27), (60, 0.84))]
    write_rows(tmp_path / EVAL_FILE, *evals)
    return tmp_path
