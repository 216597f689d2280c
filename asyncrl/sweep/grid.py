"""A sweep's TOML file: a base config, axes that change it, seeds, and what is compared. From it, the cells in their order.

An arm is one combination of the axes' values, or a command that is no run of ours (`external`). A cell is an arm with a seed.
Cells go seed by seed, and within a seed in an order drawn by that seed: a sweep that is cut short has whole seeds, and a machine
that grows slower does not do so on one arm.

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
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.observe.metrics import unknown_names

SWEEP_FILE, RESULTS_FILE = "sweep.toml", "results.jsonl"
SIGNIFICANT = 0.05
"""Corrected p below which arms are told apart."""
OWN_FIELDS = {"seed", "name", "folder"}
"""What the sweep sets itself, cell by cell."""

Metric = str
"""One of OUTCOMES, or a metric of steps, as `bias/length_ratio`: its mean over the last `window` steps that have it."""
OUTCOMES = ("seconds_to_bar", "samples_to_bar", "accuracy", "reward")
"""`accuracy`: held out, under the last version. `reward`: mean of the last `window` steps."""


class Axis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that is varied: a field with its values, or a name with choices."""

    field: str = ""
    """As `buffer.max_staleness`."""
    values: tuple[bool | int | float | str, ...] = ()
    name: str = ""
    choices: dict[str, str | dict[str, Any]] = {}
    """By label: tables laid over the config, or a TOML file of them, as presets are."""


class External(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An arm that is a command (docs/experiments.md)."""

    name: str
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """{config}, {seed} and {out} stand for the resolved config's file, the seed and the cell's folder."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared, declared before anything runs. Every line of results has it: a report needs nothing else."""

    name: str
    arms: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    bar: float | None
    window: int

    @property
    def smallest_p(self) -> float:
        """Return the smallest p, corrected for all comparisons, that these seeds can give: (arms - 1) x metrics x 2 / 2^seeds."""
        return min(1.0, (len(self.arms) - 1) * len(self.metrics) * 2.0 ** (1 - len(self.seeds)))


class SweepFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the TOML file says."""

    base: str | tuple[str, ...]
    """A config, or the name of a shipped one, and files laid over it; beside the sweep's file or from the working folder."""
    name: str = ""
    """Left out: the folder's."""
    set: dict[str, Any] = {}
    """`"a.b" = value` for all cells."""
    seeds: Annotated[int, Meta(ge=1)] | Annotated[tuple[int, ...], Meta(min_length=1)] = 8
    """A number counts from 0."""
    metrics: Annotated[tuple[Metric, ...], Meta(min_length=1)] = ("accuracy",)
    """What the report compares; fewer comparisons need fewer seeds."""
    baseline: str = ""
    """The arm that all others are compared with; left out, the first."""
    bar: float | None = None
    """A mean reward, over the last `window` steps."""
    window: Annotated[int, Meta(ge=1)] = 10
    same_settings: bool = False
    """Arms may have the same settings under two names: a null control."""
    axes: tuple[Axis, ...] = ()
    external: tuple[External, ...] = ()


class Cell(msgspec.Struct, frozen=True):
    """One arm with one seed."""

    id: str
    """Name of its folder."""
    arm: str
    seed: int
    config: RunConfig
    command: tuple[str, ...] = ()
    """Of an external arm."""

    @property
    def settings(self) -> str:
        """Return a hash of what decides the outcome; not of where it lies."""
        config = replace(self.config, name="", folder="")
        return str(xxhash.xxh3_64_hexdigest(msgspec.json.encode((config, self.command))))


class Sweep(msgspec.Struct, frozen=True):
    """A sweep, checked."""

    folder: Path
    results: Path
    cells_folder: Path
    plan: Plan
    cells: tuple[Cell, ...]
    """In the order in which they are run."""


def load_sweep(given: Path, results: Path | None = None) -> Sweep:
    """Read and check a sweep.

    Args:
        given: Its file, or the folder with its sweep.toml.
        results: Its file of results; None: results.jsonl beside it. Each has a folder of cells of its own.

    Raises:
        ConfigError: The file or a cell's config is wrong, two cells are the same, or a metric has no bar.
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
    if unknown := unknown_names(metric for metric in file.metrics if metric not in OUTCOMES):
        known = f"{', '.join(OUTCOMES)}, and those of docs/observability.md, as bias/length_ratio"
        raise ConfigError(f"{path}: there is no metric {', '.join(unknown)}; there are {known}")
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
    """Return what each combination of the axes lays over the base, by its label."""
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
    """Return `{"a.b": value}` as tables in tables."""
    nested: dict[str, Any] = {}
    for key, value in table.items():
        if key in OWN_FIELDS:
            raise ConfigError(f"{where}: the sweep itself sets {key}; for seeds there is `seeds`")
        laid = dict[str, Any]()
        set_value(laid, key, value, where)
        nested = lay_over(nested, laid)
    return nested
