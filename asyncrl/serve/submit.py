"""From what a client submits to a checked config: every fault at once, and nothing started.

A function that a config names is code of the client's that this machine would run. It is refused unless its file lies below one
of the daemon's code roots.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.load import NAMED_CHECKS, fault_of, find_config, lay_over, read_toml, resolve_config, set_value
from asyncrl.config.run import RayLaunch, RunConfig
from asyncrl.control.placement.gpu_share import check_phase_room
from asyncrl.control.tools.inputs import check_user_functions, path_faults, user_functions
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.serve.machine import demand_of
from asyncrl.serve.queue import Machine, misfits
from asyncrl.serve.records import Demand

MOST_FAULTS = 50


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/runs."""

    config: str | dict[str, Any] = "quickstart"
    """TOML text, its tables as JSON, or the name of a shipped config."""
    presets: tuple[str, ...] = ()
    """Names of shipped configs laid over it."""
    set: dict[str, Any] = {}
    """`a.b` to values, laid over all of it."""
    name: str = ""
    """Of the run; left out: the config's."""
    project: str = ""
    tags: tuple[str, ...] = ()
    priority: int = 0


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong with a submission."""

    field: str
    given: Any = None
    allowed: str = ""
    """What is wrong, and what would be right."""


class RefusedError(AsyncRLError):
    """A submission that cannot run, with everything that is wrong with it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(f"{fault.field}: {fault.allowed}" for fault in faults))
        self.faults = list(faults)


def resolve(submission: Submission, folder: Path, code_roots: Sequence[Path], there: Machine) -> tuple[RunConfig, Demand]:
    """Return the config of a run below `folder`, and what it takes.

    Raises:
        RefusedError: With every fault.
    """
    raw = _raw(submission)
    raw["folder"] = str(folder)
    if submission.name:
        raw["name"] = submission.name
    config, faults = _checked(raw)
    faults += [Fault("functions", path, why) for path, why in _foreign_code(config, code_roots)]
    if isinstance(config.launch, RayLaunch):
        faults.append(Fault("launch.kind", "ray", "a daemon's runs are of its own machine; use `ray job submit`"))
    demand = Demand()
    if not faults:
        faults += [_as_fault(text) for text in path_faults(config)]
    if not faults:
        try:
            check_user_functions(config)
            check_phase_room(config)
            demand = demand_of(config, there)
            faults += [Fault("machine", None, text) for text in misfits(there, demand)]
        except ConfigError as error:
            faults.append(_as_fault(str(error)))
    if faults:
        raise RefusedError(faults)
    return config, demand


def _raw(submission: Submission) -> dict[str, Any]:
    given = submission.config
    try:
        if isinstance(given, dict):
            raw = copy.deepcopy(given)
        elif "\n" in given or "=" in given:
            raw = tomllib.loads(given)
        else:
            raw = _shipped(given)
        for preset in submission.presets:
            raw = lay_over(raw, _shipped(preset))
        for key, value in submission.set.items():
            set_value(raw, key, value, f"set {key}")
    except (ConfigError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RefusedError([Fault("config", None, str(error))]) from error
    return raw


def _shipped(name: str) -> dict[str, Any]:
    """Return a shipped config; nothing else on this machine can be named."""
    path = find_config(name)
    if ".." in Path(name).parts or not path.is_relative_to(find_config("quickstart").parent):
        raise ConfigError(f"{name!r} is not the name of a shipped config; send your own as TOML text, or its tables as JSON")
    return read_toml(path)


def _checked(raw: dict[str, Any]) -> tuple[RunConfig, list[Fault]]:
    """Return the config, with what is wrong put back to its default, and what was wrong."""
    faults: list[Fault] = []
    while True:
        try:
            config = msgspec.convert(raw, RunConfig)
            break
        except msgspec.ValidationError as error:
            place, given, said = fault_of(error, raw)
            faults.append(Fault(".".join(map(str, place)), given, said))
            if len(faults) >= MOST_FAULTS or not place or not _remove(raw, place):
                raise RefusedError(faults) from error
    for names, check in NAMED_CHECKS:
        try:
            check(config)
        except ConfigError as error:
            faults.append(Fault(names, None, str(error)))
    if not faults:
        try:
            return resolve_config(config), []
        except ConfigError as error:
            faults.append(_as_fault(str(error)))
    return config, faults


def _remove(raw: Any, place: Sequence[str | int]) -> bool:  # noqa: ANN401 - plain nested values
    """Take out what lies at a place, or the nearest table above it that is there; return whether anything was."""
    *parents, last = place
    for step in parents:
        try:
            raw = raw[step]
        except (KeyError, IndexError, TypeError):
            return False
    try:
        del raw[last]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _foreign_code(config: RunConfig, code_roots: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the functions of a config that lie outside the code roots, and why."""
    refused = []
    for function in user_functions(config):
        file = function.path.rpartition(":")[0]
        inside = file.endswith(".py") and any(Path(file).resolve().is_relative_to(root.resolve()) for root in code_roots)
        if not inside:
            roots = ", ".join(map(str, code_roots)) or "none is set (serve --code-root)"
            refused.append((function.path, f"{function.field}: only files below the daemon's code roots are run: {roots}"))
    return refused


def _as_fault(text: str) -> Fault:
    field, colon, rest = text.partition(": ")
    plain = colon and field.replace(".", "").replace("_", "").isalnum()
    return Fault(field, None, rest) if plain else Fault("config", None, text)
