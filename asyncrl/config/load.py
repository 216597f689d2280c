"""From a TOML file and `--set a.b=c` to a checked `RunConfig`. The only place that reads config from outside.

Every error is a `ConfigError` that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncrl.config.algorithm_rules import check_algorithm
from asyncrl.config.data_rules import check_data
from asyncrl.config.explain import explained
from asyncrl.config.inference_rules import check_inference
from asyncrl.config.joining_rules import check_joining
from asyncrl.config.launch_rules import at_node, check_launch
from asyncrl.config.learner_rules import check_learner
from asyncrl.config.medium_choice import check_medium
from asyncrl.config.placement_rules import check_placement
from asyncrl.config.run import RunConfig
from asyncrl.config.run_rules import check_run
from asyncrl.config.vllm_server_rules import check_vllm_server
from asyncrl.errors import ConfigError

NODE_ADDRESS = "ASYNCRL_NODE_ADDRESS"
"""Environment variable by which a launcher says how other machines reach this one."""


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
    raw = _in_todays_names(_read(Path(path)))
    for preset in presets:
        raw = _merged(raw, _read(preset))
    for override in overrides:
        _lay_over(raw, override)
    return parse_config(raw, source=" + ".join(map(str, (path, *presets))))


def load_run_config(run_folder: Path) -> RunConfig:
    """Return the config of a run as one of its processes reads it: hosts that are `node` are this machine, as its launcher says.

    Raises:
        ConfigError: As `load_config`.
    """
    return at_node(load_config(run_folder / "config.toml"), os.environ.get(NODE_ADDRESS, "127.0.0.1"))


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
    check_run(config)
    check_medium(config)
    check_placement(config)
    check_joining(config)
    check_launch(config)
    check_vllm_server(config)


def dump_config(config: RunConfig) -> str:
    """Return the config as TOML that `load_config` reads back to the same value.

    TOML cannot say None, so a field that may be None has it as its default (a test sees to it), and `inf` says "free" elsewhere.
    """
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


def _in_todays_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` of an older run in today's names.

    `launcher` was always `local`. `algorithm.correction` and `correction_cap` are from before there were `corrections`:
    ppo_clip had no correction whatever they said, and decoupled_ppo without one was ppo_clip; it now weighs by the bare ratio.
    """
    raw = {key: value for key, value in raw.items() if key != "launcher"}
    algorithm = raw.get("algorithm")
    if not isinstance(algorithm, dict) or not {"correction", "correction_cap"} & algorithm.keys() or "corrections" in algorithm:
        return raw
    kept = {key: value for key, value in algorithm.items() if key not in {"correction", "correction_cap"}}
    kind, loss = algorithm.get("correction", "tis_token"), algorithm.get("loss", "decoupled_ppo")
    if kind == "none" or loss == "ppo_clip":
        renamed: dict[str, Any] = {"loss": "ppo_clip", "corrections": []}
    else:
        renamed = {"corrections": [{"kind": kind, "cap": algorithm.get("correction_cap", 2.0)}]}
    return raw | {"algorithm": kept | renamed}


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
