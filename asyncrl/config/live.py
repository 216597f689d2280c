"""Which config fields can change during a run, and how each step records the values it is trained with.

A change becomes part of the run's config at a known step. The values that the learner reads are sent with every step's batch and
stored in the ledger with it. So a step that is repeated after a crash is trained with its original values, as far as the config
of the resumed run allows them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.load import ALARMS, dump_config, names_of, resolve_config, value_in
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.folders import write_whole

Settings = dict[str, float | int | None]

OF_STEPS = (
    "num_steps",
    "learner.learning_rate",
    "learner.min_learning_rate_ratio",
    "learner.warmup_steps",
    "learner.max_grad_norm",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.dual_clip",
    "algorithm.max_ratio",
    "algorithm.entropy_coefficient",
    "algorithm.kl.coefficient",
    "checkpoint.every_steps",
    "checkpoint.keep_last",
)
"""Fields that the learner reads at each step."""
UNLIMITED = ("algorithm.clip_high", "algorithm.max_ratio")
"""Fields that may be `inf`, which a step's record has as null; they are never None."""
OF_CONTROLLER = (
    "buffer.max_staleness",
    "eval.every_steps",
    "eval.num_prompts",
    "eval.samples_per_prompt",
    "eval.temperature",
    "generate.sampling.temperature",
    "generate.num_workers",
    "max_run_s",
)
"""Fields that the controller reads; a change applies when it reads them next."""
NOT_OF_THE_RUN = {
    "driven": {*OF_STEPS, *OF_CONTROLLER} - {"generate.num_workers", "max_run_s"},
    "external": {*OF_STEPS, "generate.sampling.temperature"} - {"num_steps"},
}
"""By kind of outside learner: fields that the learner reads from its own copy of the config, or that nothing reads."""
CONFIG_BEFORE = "config.before.toml"
"""The config before a resume, in the run's folder until the resumed run is running."""


class Change(msgspec.Struct, frozen=True):
    """One changed value."""

    field: str
    before: Any
    after: Any


class ChangeResult(msgspec.Struct, frozen=True):
    """Result of a request to change a run."""

    revision: int
    """Revision of the config: 1 is the first change."""
    step: int
    """The first step that is trained with the new values."""
    changes: tuple[Change, ...]
    """Empty if every value was already set."""


def value_at(config: object, field: str) -> Any:  # noqa: ANN401 - a value of the config
    """Return the value of `a.b` in a config; None if `a` is not set."""
    for name in names_of(field):
        if config is None:
            return None
        config = config.get(name) if isinstance(config, dict) else getattr(config, name)
    return config


def settings_of(config: RunConfig) -> Settings:
    """Return all values that the learner reads again at each step."""
    return {field: value_at(config, field) for field in OF_STEPS if field != "algorithm.kl.coefficient" or config.algorithm.kl}


def with_settings(config: RunConfig, settings: Mapping[str, float | int | None]) -> RunConfig:
    """Return the config with a step's settings, except those that it does not allow; the same object if nothing differs."""
    own = settings_of(config)
    settings = {field: math.inf if value is None and field in UNLIMITED else value for field, value in settings.items()}
    different = {field: value for field, value in settings.items() if field in own and own[field] != value}
    if not different:
        return config
    try:
        return resolve_config(config, different)
    except ConfigError:  # the run was resumed with another loss, say: what goes with it is taken
        for field, value in different.items():
            with contextlib.suppress(ConfigError):
                config = resolve_config(config, {field: value})
        return config


def changed(config: RunConfig, values: Mapping[str, Any]) -> tuple[RunConfig, tuple[Change, ...]]:
    """Return the config with new values, and the changes.

    Args:
        config: The current config.
        values: New values by field, such as `buffer.max_staleness`.

    Raises:
        ConfigError: A field cannot change during a run, is unknown, or its value is not allowed; every fault is named.
    """
    fixed = [field for field in values if field not in OF_STEPS + OF_CONTROLLER and not field.startswith(ALARMS)]
    if fixed:
        known = ", ".join((*OF_STEPS, *OF_CONTROLLER, f"{ALARMS}RULE"))
        raise ConfigError(
            f"{', '.join(fixed)} cannot change while the run goes on: fork it, or drain it and `asyncrl resume RUN --set ...`; "
            f"fields that can change: {known}"
        )
    learner = config.learner.kind
    if elsewhere := [field for field in values if field in NOT_OF_THE_RUN.get(learner, ())]:
        raise ConfigError(
            f"{', '.join(elsewhere)} cannot change here: learner.kind = {learner!r}, and the learner's program read it once "
            "at the start; set it there (a session's train_step takes learning_rate), or leave and resume with other values"
        )
    if "algorithm.kl.coefficient" in values and ((kl := config.algorithm.kl) is None or kl.target is not None):
        why = "this run has no [algorithm.kl], so no reference is loaded" if kl is None else "algorithm.kl.target adapts it"
        raise ConfigError(f"algorithm.kl.coefficient cannot change: {why}")
    temperature = config.generate.sampling.temperature
    if values.get("generate.sampling.temperature", temperature) != temperature and config.has_reference_worker:
        raise ConfigError(
            "generate.sampling.temperature cannot change with algorithm.reference.where = 'worker': waiting samples have "
            "the reference's log-probabilities at the old temperature. Drain the run and resume it with --set"
        )
    if "generate.num_workers" in values and (
        config.placement.kind != "disaggregated" or config.generate.engine.kind not in {"transformers", "fake"}
    ):
        raise ConfigError(
            "generate.num_workers can change only with placement.kind = 'disaggregated' and engine 'transformers' or 'fake'"
        )
    raw = msgspec.to_builtins(config)
    for field, value in values.items():
        *parents, last = names_of(field)
        value_in(raw, parents)[last] = value
    new = resolve_config(raw, source="the change")
    pairs = [(field, value_at(config, field), value_at(new, field)) for field in values]
    return new, tuple(Change(*pair) for pair in pairs if pair[1] != pair[2])


def undo_resume(run_folder: Path) -> bool:
    """Bring back the config before a resume that has failed before it was running; return whether there was one."""
    with contextlib.suppress(OSError):
        (run_folder / CONFIG_BEFORE).replace(run_folder / "config.toml")
        return True
    return False


def write_revision(run_folder: Path, revision: int, config: RunConfig, what: str) -> None:
    """Write a new config of the run, and keep the previous one as `revisions/NUMBER.toml`.

    Args:
        run_folder: The run's folder.
        revision: Number of the previous config; 0 is the one the run began with.
        config: The new config.
        what: Who changed what, in one line; the first line of the new file.

    Raises:
        OSError: The folder cannot be written; config.toml is unchanged.
    """
    file, kept = run_folder / "config.toml", run_folder / "revisions"
    before = file.read_text(encoding="utf-8")
    heading = [line for line in before.splitlines(keepends=True) if line.startswith("#")]
    kept.mkdir(exist_ok=True)
    (kept / f"{revision}.toml").write_text(before, encoding="utf-8")
    write_whole(file, "".join(heading) + f"# revision {revision + 1} {what}\n" + dump_config(config))
    (run_folder / CONFIG_BEFORE).unlink(missing_ok=True)  # it lacks what was acknowledged now
