"""Reads a sweep's TOML file (a base config, axes that change it, seeds, comparisons) and returns its cells in order.

An arm is one combination of the axes' values, or a command of another trainer (`external`). A cell is an arm with a seed. Cells
run seed by seed, and within a seed in an order drawn by that seed: an interrupted sweep has complete seeds, and a machine that
becomes slower does not affect one arm alone.

Invariants: every cell's config is checked before the first runs; no two arms have one label, and none the same settings unless
`same_settings` says so.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta
from msgspec.structs import replace

from asyncrl.config.load import lay_over, read_toml, resolve_config, set_value
from asyncrl.config.reward import OverlongPenalty
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import unknown_names

SWEEP_FILE, RESULTS_FILE = "sweep.toml", "results.jsonl"
SIGNIFICANT = 0.05
"""Significance level for corrected p."""
OWN_FIELDS = {"seed", "name", "folder"}
"""Fields that the sweep sets itself in each cell."""

Metric = str
"""One of OUTCOMES, or a metric of steps, as `bias/length_ratio`: its mean over the last `window` steps that have it."""
OUTCOMES = ("seconds_to_bar", "samples_to_bar", "accuracy", "reward")
"""`accuracy`: held out, under the last version. `reward`: mean of the last `window` steps."""
NOT_OF_STEPS = re.compile(r"eval/|warm_start/|process/(?!generated_tokens/)")
"""Metrics that steps.jsonl does not have."""


class Axis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One varied setting: a field with its values, or a name with choices."""

    field: str = ""
    """A config field, for example `buffer.max_staleness`."""
    values: tuple[bool | int | float | str, ...] = ()
    name: str = ""
    choices: dict[str, str | dict[str, Any]] = {}
    """By label: tables that override the config, or a TOML file of such tables, like a preset."""


class External(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An arm that is a command (docs/experiments.md)."""

    name: str
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """{config}, {seed} and {out} are replaced by the resolved config's file, the seed and the cell's folder."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The comparisons, declared before any cell runs. Every line of results has the plan: a report needs no other file."""

    name: str
    arms: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    bar: float | None
    window: int

    @property
    def measures(self) -> tuple[float | None, int, tuple[Metric, ...]]:
        """Return what a cell is measured by: the bar, the window, the metrics."""
        return self.bar, self.window, self.metrics

    @property
    def smallest_p(self) -> float:
        """Return the smallest p, corrected for all comparisons, that these seeds can give: (arms - 1) x metrics x 2 / 2^seeds."""
        return min(1.0, (len(self.arms) - 1) * len(self.metrics) * 2.0 ** (1 - len(self.seeds)))


class SweepFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the TOML file."""

    base: str | tuple[str, ...]
    """A config (a file or a shipped name) and files that override it; relative to the sweep's folder or the working folder."""
    name: str = ""
    """Default: the folder's name."""
    set: dict[str, Any] = {}
    """`"a.b" = value` for all cells."""
    seeds: Annotated[int, Meta(ge=1)] | Annotated[tuple[int, ...], Meta(min_length=1)] = 8
    """The seeds, or their number (then they count from 0)."""
    metrics: Annotated[tuple[Metric, ...], Meta(min_length=1)] = ("accuracy",)
    """Metrics that the report compares; fewer comparisons need fewer seeds."""
    baseline: str = ""
    """The arm that all others are compared with; default: the first."""
    bar: float | None = None
    """A threshold for the mean reward over the last `window` steps."""
    window: Annotated[int, Meta(ge=1)] = 10
    same_settings: bool = False
    """Whether two arms may have the same settings under different names, as a null control."""
    axes: tuple[Axis, ...] = ()
    external: tuple[External, ...] = ()


class Cell(msgspec.Struct, frozen=True):
    """One arm with one seed."""

    id: str
    """The name of its folder."""
    arm: str
    seed: int
    config: RunConfig
    command: tuple[str, ...] = ()
    """The command of an external arm."""

    @property
    def settings(self) -> str:
        """Return a hash of the settings that determine the outcome; it does not depend on folders."""
        config = replace(self.config, name="", folder="")
        return str(xxhash.xxh3_64_hexdigest(msgspec.json.encode((config, self.command))))


class Sweep(msgspec.Struct, frozen=True):
    """A checked sweep."""

    folder: Path
    results: Path
    cells_folder: Path
    plan: Plan
    cells: tuple[Cell, ...]
    """Cells in run order."""


def load_sweep(given: Path, results: Path | None = None) -> Sweep:
    """Read and check a sweep.

    Args:
        given: The sweep's file, or the folder with its sweep.toml.
        results: The results file; None: results.jsonl beside the sweep. Each results file has its own folder of cells.

    Raises:
        ConfigError: The file or a cell's config is invalid, two cells are the same, or no cell can have a metric.
    """
    path = given / SWEEP_FILE if given.is_dir() else given
    if not path.is_file():
        raise ConfigError(f"{given} is no sweep: it is neither a TOML file nor a folder with a {SWEEP_FILE}")
    raw = read_toml(path)
    try:
        file = msgspec.convert(raw, SweepFile)
    except msgspec.ValidationError as error:
        known = f"; known are {', '.join(SweepFile.__struct_fields__)}" if "unknown field" in str(error) else ""
        raise ConfigError(f"{path}: {error}{known}") from error
    of_steps = [metric for metric in file.metrics if metric not in OUTCOMES]
    if wrong := unknown_names(of_steps) or [metric for metric in of_steps if NOT_OF_STEPS.match(metric)]:
        known = f"{', '.join(OUTCOMES)}, and those of steps in docs/observability.md, as bias/length_ratio"
        raise ConfigError(f"{path}: no step has a metric {', '.join(wrong)}; there are {known}")
    if file.bar is None and (needing := [metric for metric in file.metrics if metric.endswith("_to_bar")]):
        raise ConfigError(f"{path}: {', '.join(needing)} needs a bar, as `bar = 0.8`: without one no cell can reach it")
    arms, base = _arms(file, path), dict[str, Any]()
    for name in (file.base,) if isinstance(file.base, str) else file.base:
        base = lay_over(base, read_toml(_near(path, name)))
    base = lay_over(base, _nested(file.set, f"{path}: set"))
    seeds = tuple(range(file.seeds)) if isinstance(file.seeds, int) else file.seeds
    commands = {one.name: one.command for one in file.external}
    labels = (*arms, *commands)
    ids = {label: re.sub(r"[^A-Za-z0-9.=_]+", "-", label).strip("-") for label in labels}
    twice = [text for names in (seeds, ids.values(), file.metrics) for text, count in Counter(names).items() if count > 1]
    if twice or set(arms) & set(commands):
        raise ConfigError(f"{path}: {', '.join(map(str, twice)) or 'an external arm'} is there twice: every cell is run once")
    if file.baseline and file.baseline not in labels:
        raise ConfigError(f"{path}: baseline {file.baseline!r} is no arm; arms are {'; '.join(labels)}")
    cells, folder = [], path.resolve().parent
    results = folder / RESULTS_FILE if results is None else results.resolve()
    cells_folder = results.parent / ("cells" if results.name == RESULTS_FILE else f"cells-{results.stem}")
    for seed in seeds:
        of_seed, seen = [], dict[str, str]()
        for label in labels:
            raw_arm = lay_over(base, arms.get(label, {}))
            raw_arm |= {"seed": seed, "name": f"{ids[label]}-seed{seed}", "folder": str(cells_folder)}
            config = resolve_config(raw_arm, source=f"{path}, cell {label}")
            cell = Cell(config.name, label, seed, config, commands.get(label, ()))
            judges = any(each.weight > 0 and not isinstance(each, OverlongPenalty) for each in config.reward.functions)
            if "accuracy" in file.metrics and not cell.command and not (config.eval.at_end and judges):
                raise ConfigError(
                    f"{path}, cell {label}: the metric accuracy needs eval.at_end = true and a reward function that judges; "
                    'or compare by another metric, as `metrics = ["reward"]`'
                )
            if file.bar is not None and not cell.command and config.num_steps < file.window:
                raise ConfigError(
                    f"{path}, cell {label}: the bar is for the mean of {file.window} steps (window), and the run has num_steps = "
                    f"{config.num_steps}: set a smaller window"
                )
            if not file.same_settings and (other := seen.setdefault(cell.settings, label)) != label:
                raise ConfigError(
                    f"{path}: {other} and {label} are the same settings under two names; `same_settings = true` allows it"
                )
            of_seed.append(cell)
        random.Random(seed).shuffle(of_seed)
        cells += of_seed
    plan = Plan(
        name=file.name or folder.name, arms=labels, baseline=file.baseline or labels[0], seeds=seeds, metrics=file.metrics,
        bar=file.bar, window=file.window,
    )  # fmt: skip
    return Sweep(folder, results, cells_folder, plan, tuple(cells))


def _near(path: Path, name: str) -> Path:
    return path.parent / name if (path.parent / name).is_file() else Path(name)


def _arms(file: SweepFile, path: Path) -> dict[str, dict[str, Any]]:
    """Return the overrides of each combination of the axes, by label."""
    steps: list[list[tuple[str, dict[str, Any]]]] = []
    for number, axis in enumerate(file.axes, 1):
        where = f"{path}: axis {number}"
        has_field, has_name = bool(axis.field), bool(axis.name)
        if has_field == has_name or bool(axis.values) != has_field or bool(axis.choices) != has_name:
            raise ConfigError(f"{where} takes either field and values, or name and choices")
        if axis.field:
            short = axis.field.rpartition(".")[2]
            labelled = [(f"{short}={value}", _nested({axis.field: value}, where)) for value in axis.values]
        else:
            tables = {label: read_toml(_near(path, given)) if isinstance(given, str) else given
                      for label, given in axis.choices.items()}  # fmt: skip
            labelled = [(label, _nested(table, where)) for label, table in tables.items()]
        steps.append(labelled)
    arms: dict[str, dict[str, Any]] = {}
    if not steps and file.external:
        return arms
    for combination in itertools.product(*steps):
        label, laid = ", ".join(part for part, _ in combination) or "base", dict[str, Any]()
        for _, table in combination:
            laid = lay_over(laid, table)
        if label in arms:
            raise ConfigError(f"{path}: {label} is there twice: every cell is run once")
        arms[label] = laid
    return arms


def _nested(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `{"a.b": value}` as nested tables."""
    nested: dict[str, Any] = {}
    for key, value in table.items():
        if key in OWN_FIELDS:
            raise ConfigError(f"{where}: the sweep itself sets {key}; remove it (for seeds, set `seeds`)")
        laid = dict[str, Any]()
        set_value(laid, key, value, where)
        nested = lay_over(nested, laid)
    return nested
