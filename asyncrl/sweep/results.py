"""The result of a cell, one line of results.jsonl, and its measurement from a run.

Seconds are training time. They start when version 0 has been evaluated (without this evaluation: one typical step before the end
of the first step), and exclude the time in which an interrupted cell did not run. A line is written once, when its cell ends.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncrl.config import FiniteFloat, PositiveFloat
from asyncrl.config.run import RunConfig
from asyncrl.control.placement.limits import usable_cores
from asyncrl.errors import ConfigError
from asyncrl.observe.steps import read_evals, read_lines, read_steps
from asyncrl.sweep.grid import OUTCOMES, Metric, Plan

CURVE_POINTS = 100
"""Maximum number of points of a stored curve."""

Floats = NDArray[np.float64]
Accuracy = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Code(msgspec.Struct, frozen=True):
    """The code that ran."""

    version: str
    commit: str
    """The commit of the checkout; empty outside a checkout."""
    files: str
    """Hash of the package's Python files; it must be the same in one results file."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The measured values of a cell."""

    fault: str = ""
    """Why it failed; values from before the failure are still measured."""
    steps: int = 0
    samples: int = 0
    train_s: float = 0.0
    seconds_to_bar: float | None = None
    """Until the mean reward of the last `window` steps reached the bar; None if it never did."""
    samples_to_bar: float | None = None
    accuracy_before: float | None = None
    accuracy: float | None = None
    reward: float | None = None
    learner_idle: float | None = None
    """Share of the training seconds."""
    generators_idle: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    values: dict[str, float] = {}
    """The plan's step metrics: means over the last `window` steps that have them."""
    curve: tuple[tuple[float, int, float], ...] = ()
    """Seconds, samples, mean reward; each point is the mean of consecutive steps, at the last of them."""
    evals: tuple[tuple[float, int, float], ...] = ()
    """Seconds, samples, held-out accuracy."""


def value_of(outcome: Outcome, metric: Metric) -> float | None:
    """Return a cell's value of a metric; None if it has none."""
    value: float | None = getattr(outcome, metric) if metric in OUTCOMES else outcome.values.get(metric)
    return value


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of results."""

    arm: str
    seed: int
    outcome: Outcome
    settings: str
    """`Cell.settings`."""
    code: Code
    machine: str
    attempts: int = 1
    """Above 1: it was interrupted and resumed."""
    jobs: int = 1
    """Number of cells that ran at the same time; above 1, times are not reliable."""
    ended: str = ""
    """UTC."""
    plan: Plan


class ExternalResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result.json that an external arm's command writes into {out}."""

    seconds: tuple[PositiveFloat, ...]
    """Seconds since training began, at the end of each step."""
    rewards: tuple[FiniteFloat, ...]
    """Mean reward of each step's samples."""
    accuracy: tuple[Accuracy, Accuracy] | None = None
    """Held-out accuracy of version 0 and of the last version."""


@cache
def code_now() -> Code:
    """Return the version of the running code."""
    package, digest = Path(__file__).parents[1], xxhash.xxh3_64()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    commit = ""
    if (package.parent / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(package.parent), "rev-parse", "--short=12", "HEAD"]
            commit = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=10).strip()  # noqa: S603
    return Code(version("asyncrl"), commit, digest.hexdigest())


@cache
def machine_now() -> str:
    """Return a description of the machine."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        named = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    return f"{model}, {len(usable_cores())} cores"


def read_results(path: Path) -> list[CellResult]:
    """Return the lines of a results file.

    Raises:
        ConfigError: A line is not a result, or a cell appears twice.
    """
    lines = list(read_lines(path, CellResult))
    cells = [(line.arm, line.seed) for line in lines]
    if twice := {cell for cell in cells if cells.count(cell) > 1}:
        raise ConfigError(f"{path} has {', '.join(f'{arm} seed {seed}' for arm, seed in sorted(twice))} twice; take one line out")
    return lines


def measure_run(run_folder: Path, config: RunConfig, plan: Plan, starts_s: Sequence[float], fault: str = "") -> Outcome:
    """Measure a run.

    Args:
        run_folder: The folder of the run, which has ended.
        config: The run's config.
        plan: The sweep's plan.
        starts_s: Clock seconds of each start of its processes: the first start and each resume.
        fault: Why it failed; empty if it did not.
    """
    steps, evals = read_steps(run_folder), read_evals(run_folder)
    judged = [report for report in evals if report.accuracy is not None]
    before = judged[0].accuracy if judged and judged[0].version == 0 else None
    after = judged[-1].accuracy if judged and steps and judged[-1].version == steps[-1].version else None
    if not steps:
        return Outcome(fault=fault, accuracy_before=before)
    ends_N = np.array([report.time_s for report in steps])
    gaps_N = np.diff(ends_N, prepend=evals[0].finished_s if evals and evals[0].version == 0 else np.nan)
    # In the interval between two steps that contains a start, the run was stopped or repeated work.
    resumed = np.searchsorted(ends_N, starts_s[1:])
    gaps_N[resumed[resumed < len(gaps_N)]] = np.nan
    typical_s = float(np.nanmedian(gaps_N)) if not np.isnan(gaps_N).all() else 0.0
    gaps_N = np.where(np.isnan(gaps_N), typical_s, gaps_N)
    seconds_N, weights_N = np.cumsum(gaps_N), np.maximum(gaps_N, 1e-9)
    measured = measure_curve(seconds_N, np.array([report.reward_mean for report in steps]), config.samples_per_step, plan)
    # A controller that is killed between a step and its line leaves the line out.
    num_steps = steps[-1].version
    seconds_by_version = {0: 0.0} | {report.version: float(second) for report, second in zip(steps, seconds_N, strict=True)}
    values = {}
    for name in (metric for metric in plan.metrics if metric not in OUTCOMES):
        if found := [report.metrics[name] for report in steps if name in report.metrics][-plan.window :]:
            values[name] = round(float(np.mean(found)), 5)
    return msgspec.structs.replace(
        measured, steps=num_steps, samples=num_steps * config.samples_per_step, fault=fault, accuracy_before=before,
        accuracy=after, values=values,
        learner_idle=round(float(np.average([report.learner_idle for report in steps], weights=weights_N)), 4),
        generators_idle=round(float(np.average([report.generators_idle for report in steps], weights=weights_N)), 4),
        staleness_mean=round(float(np.mean([report.staleness_mean for report in steps])), 4),
        staleness_max=max(report.staleness_max for report in steps),
        evals=tuple((round(seconds_by_version[report.version], 3), report.version * config.samples_per_step, report.accuracy)
                    for report in evals if report.accuracy is not None and report.version in seconds_by_version),
    )  # fmt: skip


def measure_external(path: Path, config: RunConfig, plan: Plan) -> Outcome:
    """Measure an external arm from its command's result.json.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ExternalResult)
    except (OSError, msgspec.DecodeError) as error:
        said = getattr(error, "strerror", None) or error
        where = f"{path.with_name('command.log')} has the command's output"
        raise ConfigError(f"{path}: {said}; {where}, and docs/experiments.md says what an external arm writes") from error
    if len(found.seconds) != len(found.rewards) or not found.seconds:
        raise ConfigError(
            f"{path} has {len(found.seconds)} seconds and {len(found.rewards)} rewards; it takes one of each a step"
        )
    seconds_N, rewards_N = np.array(found.seconds), np.array(found.rewards)
    if (np.diff(seconds_N) < 0).any():
        raise ConfigError(f"{path} has seconds that fall; they count from the start of training")
    measured = measure_curve(seconds_N, rewards_N, config.samples_per_step, plan)
    if found.accuracy is None:
        return measured
    before, after = found.accuracy
    evals = ((0.0, 0, before), (float(seconds_N[-1]), measured.samples, after))
    return msgspec.structs.replace(measured, accuracy_before=before, accuracy=after, evals=evals)


def measure_curve(seconds_N: Floats, rewards_N: Floats, samples_per_step: int, plan: Plan) -> Outcome:
    """Return the outcome that follows from seconds and mean rewards [num_steps] alone."""
    num_steps, window = len(rewards_N), min(plan.window, len(rewards_N))
    means = np.convolve(rewards_N, np.ones(plan.window) / plan.window, mode="valid") if num_steps >= plan.window else np.array([])
    reached = np.flatnonzero(means >= plan.bar - 1e-12) if plan.bar is not None else np.array([])
    first = int(reached[0]) + plan.window - 1 if len(reached) else None
    parts = np.array_split(np.arange(num_steps), min(num_steps, CURVE_POINTS))
    return Outcome(
        steps=num_steps,
        samples=num_steps * samples_per_step,
        train_s=round(float(seconds_N[-1]), 3),
        seconds_to_bar=None if first is None else round(float(seconds_N[first]), 3),
        samples_to_bar=None if first is None else float((first + 1) * samples_per_step),
        reward=round(float(rewards_N[-window:].mean()), 5),
        curve=tuple((round(float(seconds_N[part[-1]]), 3), int(part[-1] + 1) * samples_per_step,
                     round(float(rewards_N[part].mean()), 5)) for part in parts),
    )  # fmt: skip
