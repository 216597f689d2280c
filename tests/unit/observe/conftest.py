"""A made-up run folder that looks like a real one: two generators, a reward worker, a learner, 60 steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from asyncrl.config.load import dump_config
from asyncrl.config.run import RunConfig
from asyncrl.observe.spans import GENERATE, PUBLISH, SCORE, SPANS_FILE, STEP, SWAP, WAIT, Span, span
from asyncrl.observe.steps import EVAL_FILE, STEPS_FILE, EvalReport, JsonLines, StepReport

START_S = 1_700_000_000.0


def made_up_spans(num_steps: int = 60, num_slots: int = 32, seed: int = 1) -> list[Span]:
    rng = random.Random(seed)
    spans: list[Span] = []
    now = START_S + 12.0
    for step in range(num_steps):
        wait, work = rng.choice([0.0, 0.0, 0.15, 0.5]), rng.uniform(1.1, 1.7)
        if wait:
            spans.append(span(WAIT, now, now + wait, "learner", step=step))
        spans.append(span(STEP, now + wait, now + wait + work, "learner", step=step, version=step + 1))
        now += wait + work
        spans.append(span(PUBLISH, now - 0.01, now, "learner", version=step + 1))
        for number in range(2):
            live = now + rng.uniform(0.05, 0.2)
            spans.append(span(SWAP, live - 0.03, live, f"generator-{number}", version=step + 1))
    for number in range(2):
        for slot in range(num_slots):
            at = START_S + 5.0 + rng.uniform(0, 1)
            while at < now:
                length = min(rng.lognormvariate(-0.2, 0.6), 4.0)
                spans.append(span(GENERATE, at, at + length, f"generator-{number}", group=slot, tokens=int(length * 70)))
                judged = at + length + rng.uniform(0, 0.01)
                spans.append(span(SCORE, judged, judged + rng.uniform(0.005, 0.03), "reward-0", reward=1.0))
                at += length + rng.choice([0.0, 0.0, 0.02, 0.3])
    return spans


def made_up_steps(num_steps: int = 60, seed: int = 1) -> list[StepReport]:
    rng = random.Random(seed)
    return [
        StepReport(
            step=step,
            version=step + 1,
            time_s=START_S + 12.0 + 1.6 * (step + 1),
            reward_mean=0.9 - 0.65 * 0.95**step + rng.gauss(0, 0.03),
            reward_std=0.4,
            staleness_mean=min(2.0, 1.1 + rng.gauss(0, 0.2)) if step > 2 else step / 2,
            staleness_max=min(step, 2),
            generated_tokens_per_s=2100.0,
            trained_tokens_per_s=1900.0,
            groups_ready=3,
            groups_running=40,
            groups_scoring=2,
            learner_idle=0.08,
            generators_idle=0.03,
            weight_sync_ms=38.0,
            metrics={"policy/entropy": 0.7},
        )
        for step in range(num_steps)
    ]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(dump_config(RunConfig(name="quickstart", num_steps=60)))
    for file, rows in ((STEPS_FILE, made_up_steps()), (SPANS_FILE, made_up_spans(num_steps=20, num_slots=6))):
        lines: JsonLines[StepReport | Span] = JsonLines(tmp_path / file)
        for row in rows:
            lines.write(row)
        lines.close()
    evals: JsonLines[EvalReport] = JsonLines(tmp_path / EVAL_FILE)
    evals.write(EvalReport(version=0, accuracy=0.27, num_samples=256))
    evals.write(EvalReport(version=60, accuracy=0.84, num_samples=256))
    evals.close()
    return tmp_path
