"""What a client submits, and from there to a checked config: every fault at once, and nothing started.

What a config would have this machine run is code of the client's: functions, a model's own code, what vLLM imports, programs of a
model without a sandbox. It is refused unless its file lies below one of the daemon's code roots; what has no file asks for the
root `/`. The daemon's own files, tokens and keys of runs among them, are not to be named at all.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from asyncrl.config.check import Fault, faults_in
from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.config.learner import PretrainedModel
from asyncrl.config.live import changed
from asyncrl.config.load import SHIPPED, faults_beside, lay_over, leaves_of, read_toml, set_value, take_values
from asyncrl.config.reward import CodeExecReward
from asyncrl.config.run import RayLaunch, RunConfig
from asyncrl.control.tools.choices import start_faults, user_functions
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.serve.machine import Machine, demand_of, misfits, num_gpus
from asyncrl.serve.records import DATABASE, OWN_FILES, PRIVATE, RUNS, Demand, Role

MOST_CONFIG_CHARS = 1 << 16
"""Of a config as TOML text: its reader takes the square of the depth of a key."""
MOST_NAME_CHARS = 100
"""Of a shipped config."""
MOST_DEPTH = 50
"""Of tables in tables."""
MOST_PATH_CHARS = 4096
"""As Linux has it; each part of a longer one would be looked up before it is refused."""
MOST_SAID, MOST_SAID_CHARS = 100, 4096
"""Faults of one answer, and characters of a field, of what was given and of what is said of it."""
PLAIN_WORD = re.compile(r"[A-Za-z0-9_-]*", re.ASCII)
"""Of vLLM's settings those that name neither a path nor a class."""
PATH_FIELD = re.compile(r"(^|[._])(path|folder|file)$")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@-]*", re.ASCII)
"""Names that mean the same in a path, a URL and a metric's label."""

Label = Annotated[str, msgspec.Meta(max_length=200)]
Labels = Annotated[tuple[Label, ...], msgspec.Meta(max_length=100)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]


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
    project: Label = ""
    tags: Labels = ()
    priority: Priority = 0


class Fork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/runs/{run}/fork: a new run from a checkpoint's weights, with a new optimizer."""

    name: str
    checkpoint: str = ""
    """Name of the folder under checkpoints/; left out: the newest."""
    set: dict[str, Any] = {}
    priority: Priority = 0
    project: Label = ""
    tags: Labels = ()


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/runs/{run}/resume; may be left out."""

    num_steps: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    """Of a run that has ended: the goal from now on; 0: as before."""


class NewToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/tokens."""

    name: str
    role: Role


class RefusedError(AsyncRLError):
    """A submission that cannot run, with everything that is wrong with it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        most = MOST_SAID_CHARS
        self.faults = [Fault(one.field[:most], _shown(one.given), one.allowed[:most]) for one in faults[:MOST_SAID]]
        more = [f"and {len(faults) - MOST_SAID} more"] if len(faults) > MOST_SAID else []
        super().__init__("\n".join([*map(str, self.faults), *more]))


def resolve(submission: Submission, folder: Path, code_roots: Sequence[Path], there: Machine) -> tuple[RunConfig, Demand]:
    """Return the config of a run below `folder`, and what it takes.

    Raises:
        RefusedError: With every fault.
    """
    raw, faults = _raw(submission)
    raw["folder"] = str(folder)
    if submission.name:
        raw["name"] = submission.name
    config, wrong, gone = take_values(raw)
    faults += wrong
    if config is None:
        raise RefusedError(faults)
    faults += faults_beside(config, gone)
    if not RUN_NAME.fullmatch(config.name) and not any(fault.field == "name" for fault in faults):
        faults.append(Fault("name", config.name, "letters, digits and . _ - = + @, the first a letter or a digit"))
    if isinstance(config.launch, RayLaunch):
        faults.append(Fault("launch.kind", "ray", "a daemon's runs are of its own machine; use `ray job submit`"))
    foreign = [Fault("functions", path, why) for path, why in foreign_code(config, code_roots)]
    astray = _wrong_paths(config, folder)
    faults += foreign + astray
    try:
        nowhere = {fault.field for fault in astray}
        faults += [one for one in faults_in(config, start_faults(config, imports=not foreign)) if one.field not in nowhere]
    except (OSError, ValueError) as error:
        if not astray:
            faults.append(Fault("config", None, f"a path in it leads nowhere: {str(error)[:200]}"))
    demand = Demand(num_gpus(config))
    try:
        demand = demand_of(config, there)
    except ConfigError as error:
        known = {fault.field for fault in faults}
        faults += [fault for fault in faults_in(config, [str(error)]) if fault.field not in known]
    faults += [Fault("machine", demand, text) for text in misfits(there, demand)]
    if faults:
        raise RefusedError(faults)
    return config, demand


def of_fork(asked: Fork, checkpoint: Path, project: str) -> Submission:
    """Return a run that begins with a checkpoint of another, which has a config beside its checkpoints, and a project."""
    config = read_toml(checkpoint.parents[1] / "config.toml")
    kept = {field: value for field, value in config["model"].items() if field in PretrainedModel.__struct_fields__}
    return Submission(
        config={**config, "model": {**kept, "kind": "pretrained", "path": str(checkpoint)}}, set=asked.set, name=asked.name,
        priority=asked.priority, tags=asked.tags, project=asked.project or project,
    )  # fmt: skip


def change_faults(config: RunConfig, values: Mapping[str, Any], there: Machine) -> list[Fault]:
    """Return what is wrong with each change of a live run's config; one that the machine has no room for cannot be resumed."""
    faults = []
    for field, value in values.items():
        try:
            later, changes = changed(config, {field: value})
            if changes and field == "generate.num_workers" and not misfits(there, demand_of(config, there)):
                faults += [Fault(field, value, text) for text in misfits(there, demand_of(later, there))]
        except ConfigError as error:
            faults.append(Fault(field, value, str(error)))
    return faults


def _raw(submission: Submission) -> tuple[dict[str, Any], list[Fault]]:
    """Return the tables that a submission comes to, without what cannot be laid over them, and that."""
    given, faults = submission.config, list[Fault]()
    if isinstance(given, str) and len(given) > MOST_CONFIG_CHARS:
        raise RefusedError([Fault("config", len(given), f"at most {MOST_CONFIG_CHARS:,} characters of TOML, got {len(given):,}")])
    try:
        if isinstance(given, dict):
            raw = copy.deepcopy(given)
        elif "\n" in given or "=" in given:
            raw = tomllib.loads(given)
        else:
            raw = _shipped(given)
        _check_depth(raw)
    except (ConfigError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RefusedError([Fault("config", given[:200] if isinstance(given, str) else None, str(error))]) from error
    for preset in submission.presets:
        try:
            raw = lay_over(raw, _shipped(preset))
        except ConfigError as error:
            faults.append(Fault("presets", preset, str(error)))
    for key, value in submission.set.items():
        try:
            _check_depth(value, MOST_DEPTH - key.count("."))
            set_value(raw, key, value, f"set {key}")
        except ConfigError as error:
            faults.append(Fault(key, value, str(error)))
    return raw, faults


def _check_depth(table: Any, left: int = MOST_DEPTH) -> None:  # noqa: ANN401 - plain nested values
    if left <= 0:
        raise ConfigError(f"tables and lists are at most {MOST_DEPTH} deep")
    for value in table.values() if isinstance(table, dict) else table if isinstance(table, list) else ():
        _check_depth(value, left - 1)


def _shipped(name: str) -> dict[str, Any]:
    """Return a shipped config; nothing else on this machine can be named."""
    files = {path.relative_to(SHIPPED).as_posix(): path for path in SHIPPED.rglob("*.toml")}
    path = files.get(name.removeprefix("configs/").removesuffix(".toml") + ".toml")
    if path is None:
        short = name[:MOST_NAME_CHARS]
        raise ConfigError(f"{short!r} is not the name of a shipped config; send your own as TOML text, or its tables as JSON")
    return read_toml(path)


def foreign_code(config: RunConfig, code_roots: Sequence[Path]) -> list[tuple[str, str]]:
    """Return what a config would have run that lies outside the code roots, and why not."""
    refused, roots = [], ", ".join(map(str, code_roots)) or "none is set (serve --code-root)"
    if config.trusts_code and isinstance(config.model, PretrainedModel):
        critic, reference = config.algorithm.critic, config.algorithm.reference
        # A reference on a worker runs none of its code.
        is_loaded = config.algorithm.needs_reference and reference.where == "learner"
        folders = {
            "model.path": config.model.path, "generate.model_folder": config.generate.model_folder,
            "algorithm.critic.path": critic.path if critic else "",
            "algorithm.reference.path": reference.path if is_loaded else "",
        }  # fmt: skip
        refused += [
            (path, f"{field}, by model.trust_remote_code: only code below the daemon's code roots is run: {roots}")
            for field, path in folders.items() if path and not _is_inside(path, code_roots)
        ]  # fmt: skip
    for function in user_functions(config):
        file = function.path.rpartition(":")[0]
        if not (file.endswith(".py") and _is_inside(file, code_roots)):
            refused.append((function.path, f"{function.field}: only files below the daemon's code roots are run: {roots}"))
    if not _is_inside("/", code_roots):
        engine, without_file = config.generate.engine, "code of any origin is run only where a code root is `/`"
        arguments = engine.arguments if isinstance(engine, VLLMEngineConfig) else {}
        refused += [
            (name, f"generate.engine.arguments: may load code, and {without_file}")
            for name, value in arguments.items()
            if name == "trust_remote_code" or (isinstance(value, str) and not PLAIN_WORD.fullmatch(value))
        ]
        if any(isinstance(one, CodeExecReward) and one.sandbox == "none" for one in config.reward.functions):
            refused.append(("none", f"reward.functions: sandbox: a model's programs need a sandbox here: {without_file}"))
    return refused


def _wrong_paths(config: RunConfig, runs: Path) -> list[Fault]:
    """Return which paths of a config are the daemon's own, its tokens and records or keys of a run, and which lead nowhere."""
    faults, home = [], runs.resolve().parent
    for field, value in leaves_of(msgspec.to_builtins(config)):
        if PATH_FIELD.search(field) and isinstance(value, str) and value and field != "folder":
            try:
                inside = Path(value[: MOST_PATH_CHARS + 1]).resolve()
                inside.exists()
            except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a zero byte
                faults.append(Fault(field, value, f"leads nowhere: {str(error)[:200]}"))
                continue
            first, *rest = inside.relative_to(home).parts or ("",) if inside.is_relative_to(home) else ("",)
            if first in OWN_FILES or first.startswith(DATABASE) or (first == RUNS and PRIVATE & set(rest[1:])):
                faults.append(Fault(field, value, "is the daemon's own: tokens and keys are not for runs"))
    return faults


def _shown(value: Any) -> Any:  # noqa: ANN401 - what was given
    """Return a value as JSON can have it, a long one cut short."""
    try:
        text = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError):
        return f"a value that is no JSON ({type(value).__name__})"
    return value if len(text) <= MOST_SAID_CHARS else f"{text[:MOST_SAID_CHARS].decode(errors='ignore')}..."


def _is_inside(path: str, roots: Sequence[Path]) -> bool:
    """Return whether a path lies below one of the roots; one that leads nowhere does not."""
    try:
        return len(path) <= MOST_PATH_CHARS and any(Path(path).resolve().is_relative_to(root.resolve()) for root in roots)
    except (OSError, RuntimeError, ValueError):
        return False
