"""Submissions of clients, and how they become checked configs: all faults are reported at once, and nothing is started.

A config can name code of the client: functions, a model's own code, modules for vLLM, model-written programs without a sandbox.
The code is refused unless its file is below one of the daemon's code roots; code without a file needs the root `/`. A config must
never name the daemon's own files, including tokens, and keys of runs.
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
from asyncrl.config.load import SHIPPED, empty_other_kinds, faults_beside, lay_over, leaves_of, read_toml, set_value, take_values
from asyncrl.config.reward import CodeExecReward
from asyncrl.config.run import RayLaunch, RunConfig
from asyncrl.control.tools.choices import examine, start_faults, user_functions
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.serve.machine import Machine, demand_of, misfits, num_gpus
from asyncrl.serve.records import DATABASE, OWN_FILES, PRIVATE, RUNS, Demand, Role

MOST_CONFIG_CHARS = 1 << 16
"""Maximum length of a config as TOML text: the TOML reader's time grows with the square of a key's depth."""
MOST_NAME_CHARS = 100
"""Maximum length of a shipped config's name."""
MOST_DEPTH = 50
"""Maximum depth of nested tables."""
MOST_PATH_CHARS = 4096
"""Linux's limit; in a longer path each part would be looked up before the path is refused."""
MOST_SAID, MOST_SAID_CHARS = 100, 4096
"""Maximum number of faults in one answer, and maximum length of a fault's field, given value and text."""
PLAIN_WORD = re.compile(r"[A-Za-z0-9_-]*", re.ASCII)
"""Values of vLLM's settings that can name neither a path nor a class."""
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
    """Names of shipped configs that override it."""
    set: dict[str, Any] = {}
    """Values by field `a.b`, which override everything else."""
    name: str = ""
    """The run's name; empty: the config's."""
    project: Label = ""
    tags: Labels = ()
    priority: Priority = 0


class Fork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/runs/{run}/fork: a new run from a checkpoint's weights, with a new optimizer."""

    name: str
    checkpoint: str = ""
    """Name of the folder under checkpoints/; empty: the newest."""
    set: dict[str, Any] = {}
    priority: Priority = 0
    project: Label = ""
    tags: Labels = ()


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/runs/{run}/resume; may be left out."""

    num_steps: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    """For an ended run, the new number of steps; 0: as before."""


class NewToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/tokens."""

    name: str
    role: Role


class RefusedError(AsyncRLError):
    """A submission that cannot run, with all its faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        most = MOST_SAID_CHARS
        self.faults = [Fault(one.field[:most], _shown(one.given), one.allowed[:most]) for one in faults[:MOST_SAID]]
        more = [f"and {len(faults) - MOST_SAID} more"] if len(faults) > MOST_SAID else []
        super().__init__("\n".join([*map(str, self.faults), *more]))


def resolve(submission: Submission, folder: Path, code_roots: Sequence[Path], there: Machine) -> tuple[RunConfig, Demand]:
    """Return the config of a run below `folder`, and the resources it needs.

    Raises:
        RefusedError: The submission has faults; all are listed.
    """
    raw, faults = _raw(submission)
    if "folder" in submission.set:
        faults.append(Fault("folder", submission.set["folder"], "the daemon chooses it, below its own folder: leave it out"))
    if submission.name and submission.set.get("name", submission.name) != submission.name:
        faults.append(Fault("name", submission.set["name"], f"the submission's own name is {submission.name!r}: leave one out"))
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
        # Only where all else is right: it reads the task's files and runs its code. The daemon's GPUs may not be the run's.
        said = start_faults(config, imports=not foreign) if faults else examine(config, devices=False).faults
        faults += [one for one in faults_in(config, said) if one.field not in nowhere]
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
    """Return the submission of a run that starts from a checkpoint of another run, with that run's config and project."""
    config = read_toml(checkpoint.parents[1] / "config.toml")
    kept = {field: value for field, value in config["model"].items() if field in PretrainedModel.__struct_fields__}
    return Submission(
        config={**config, "model": {**kept, "kind": "pretrained", "path": str(checkpoint)}}, set=asked.set, name=asked.name,
        priority=asked.priority, tags=asked.tags, project=asked.project or project,
    )  # fmt: skip


def change_faults(config: RunConfig, values: Mapping[str, Any], there: Machine) -> list[Fault]:
    """Return what is wrong with each change of a live run's config.

    More generators than the machine has room for are refused, because the run could not be resumed.
    """
    faults = []
    for field, value in values.items():
        try:
            later, changes = changed(config, {field: value})
            if changes and field == "generate.num_workers":
                demand = demand_of(later, there)
                if demand.memory_bytes > demand_of(config, there).memory_bytes:
                    faults += [Fault(field, value, text) for text in misfits(there, demand)]
        except ConfigError as error:
            faults.append(Fault(field, value, str(error)))
    return faults


def _raw(submission: Submission) -> tuple[dict[str, Any], list[Fault]]:
    """Return the tables of a submission after valid overrides, and the faults of the invalid ones."""
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
    empty_other_kinds(raw, submission.set.items())
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
    """Return a shipped config; a submission can name no other file on this machine."""
    files = {path.relative_to(SHIPPED).as_posix(): path for path in SHIPPED.rglob("*.toml")}
    path = files.get(name.removeprefix("configs/").removesuffix(".toml") + ".toml")
    if path is None:
        short = name[:MOST_NAME_CHARS]
        raise ConfigError(f"{short!r} is not the name of a shipped config; send your own as TOML text, or its tables as JSON")
    return read_toml(path)


def foreign_code(config: RunConfig, code_roots: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the code named by a config that is outside the code roots, with the reason for refusing it."""
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
    """Return paths of a config that are not allowed (the daemon's tokens and records, keys of runs) or do not resolve."""
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
    """Return a value in a form that JSON can hold; a long one is cut."""
    try:
        text = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError):
        return f"a value that is no JSON ({type(value).__name__})"
    return value if len(text) <= MOST_SAID_CHARS else f"{text[:MOST_SAID_CHARS].decode(errors='ignore')}..."


def _is_inside(path: str, roots: Sequence[Path]) -> bool:
    """Return whether a path is below one of the roots; a path that does not resolve is not."""
    try:
        return len(path) <= MOST_PATH_CHARS and any(Path(path).resolve().is_relative_to(root.resolve()) for root in roots)
    except (OSError, RuntimeError, ValueError):
        return False
