"""From a TOML file and `--set a.b=c` to a checked `RunConfig`. The only place that reads config from outside.

Every error is a `ConfigError` that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncrl.config.algorithm_rules import check_algorithm
from asyncrl.config.data_rules import check_data
from asyncrl.config.explain import explained
from asyncrl.config.inference_rules import check_inference
from asyncrl.config.learner_rules import check_learner
from asyncrl.config.run import RunConfig
from asyncrl.config.stages import ScratchModel, TransformersEngineConfig
from asyncrl.errors import ConfigError


def load_config(
    path: str | Path, overrides: list[str] | tuple[str, ...] = (), presets: list[Path] | tuple[Path, ...] = ()
) -> RunConfig:
    """Read a TOML file, lay `presets` and `overrides` over it, check everything.

    Args:
        path: The TOML file.
        presets: TOML files laid over it one after the other: tables merge, but one that names its
            `kind` and anything that is no table is replaced (configs/algorithms/).
        overrides: `a.b=value` each; the value is TOML, or a bare string where it is not.

    Returns:
        The checked config.

    Raises:
        ConfigError: The file is missing or not TOML, a field is unknown, a value is out of range or does not go with another.
    """
    raw = _read(Path(path))
    for preset in presets:
        raw = _merged(raw, _read(preset))
    for override in overrides:
        _lay_over(raw, override)
    return parse_config(raw, source=" + ".join(map(str, (path, *presets))))


def parse_config(raw: dict[str, Any], source: str = "config") -> RunConfig:
    """Check a config given as plain nested dicts.

    Raises:
        ConfigError: As `load_config`.
    """
    try:
        config = msgspec.convert(raw, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {explained(error, raw, RunConfig)}") from error
    check_config(config)
    return config


def validated(config: RunConfig) -> RunConfig:
    """Check a config that was built in Python, where msgspec's bounds are not applied.

    Raises:
        ConfigError: As `load_config`.
    """
    return parse_config(msgspec.to_builtins(config))


def check_config(config: RunConfig) -> None:
    """Refuse what each field allows on its own but the whole does not.

    Raises:
        ConfigError: Two fields contradict each other; the message names both.
    """
    check_algorithm(config.algorithm, config.learner)
    check_learner(config.learner, config.algorithm)
    check_data(config)
    check_inference(config)
    group_size = config.algorithm.group_size
    if config.buffer.min_group_members > max(group_size, 2):
        raise ConfigError(
            f"buffer.min_group_members must be at most algorithm.group_size ({group_size}), got {config.buffer.min_group_members}"
        )
    engine, response = config.generate.engine, config.generate.sampling.max_new_tokens
    if response >= engine.max_sequence_tokens:
        raise ConfigError(
            f"generate.sampling.max_new_tokens ({response}) must be under generate.engine.max_sequence_tokens "
            f"({engine.max_sequence_tokens}): prompt and response share it"
        )
    if engine.max_sequence_tokens > config.packing.tokens_per_row:
        raise ConfigError(
            f"packing.tokens_per_row ({config.packing.tokens_per_row}) must be at least generate.engine.max_sequence_tokens "
            f"({engine.max_sequence_tokens}): a sample is never split"
        )
    model = config.model
    if isinstance(model, ScratchModel):
        if model.hidden_size % model.num_heads:
            raise ConfigError(
                f"model.hidden_size ({model.hidden_size}) must be a multiple of model.num_heads ({model.num_heads})"
            )
        if isinstance(engine, TransformersEngineConfig) and engine.max_sequence_tokens > model.max_positions:
            raise ConfigError(
                f"generate.engine.max_sequence_tokens ({engine.max_sequence_tokens}) must be at most model.max_positions "
                f"({model.max_positions})"
            )
    if config.generate.num_workers == 0 and (config.eval.at_start or config.eval.at_end or config.eval.every_steps):
        raise ConfigError(
            "generate.num_workers is 0, so nobody can generate evaluation samples: set eval.at_start = false, "
            "eval.at_end = false and eval.every_steps = 0"
        )
    if not config.reward.functions and not config.inference.reward_models:
        raise ConfigError(
            "reward.functions is empty: name at least one reward, for example [[reward.functions]] kind = 'answer_match'"
        )


def dump_config(config: RunConfig) -> str:
    """Return the config as TOML that `load_config` reads back to the same value."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}; see configs/ for examples") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` with `above` laid over it: tables merge, but one that names its `kind` takes the place of the one below."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, dict) and "kind" not in value:
            merged[key] = _merged(under, value)
        else:
            merged[key] = value
    return merged


def _without_none(value: Any) -> Any:  # noqa: ANN401 - plain nested TOML values
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def _lay_over(raw: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set takes a.b=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {key} is not a table")
    table[keys[-1]] = value
