"""What a config names outside itself, looked at before a run is started: functions, files, folders, devices, prompts.

A user's code and heavy libraries are imported in a process that ends with that: it sees modules as the run's processes will, and
what an import takes (memory, threads, a GPU) goes with it. Where Ray makes an environment for the run there is nothing to see
here, and what is wrong shows once the run is started.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.algorithm import PythonCorrection
from asyncrl.config.broadcast import FilesMedium
from asyncrl.config.generate import ReplayEngineConfig
from asyncrl.config.learner import PretrainedModel
from asyncrl.config.load import parse_config
from asyncrl.config.reward import PythonReward
from asyncrl.config.run import JsonlTask, PreferencesTask, PythonTask, RunConfig, has_own_environment
from asyncrl.control.placement.memory import check_phase_room
from asyncrl.errors import AsyncRLError, ConfigError, first_line
from asyncrl.generate.rollout import TokenizerCodec
from asyncrl.reward.sandbox.code_exec import check_tests
from asyncrl.tasks.registry import build_task
from asyncrl.user_code import MATHS_ARGUMENTS, REWARD_ARGUMENTS, TASK_ARGUMENTS, load_function

RUN_FOLDERS = ("checkpoints", "keys", "logs", "model", "set_aside", "weights")
RUN_FILES = ("*.json", "*.jsonl", "*.toml", "*.partial", "*.png", "endpoint", "ledger.sqlite*", "keys/*", "logs/*")
"""What a run keeps in its folder."""
TIMEOUT_S = 300.0
MOST_PROMPTS = 2000
"""Prompts whose length is looked at."""
IN_FULL = "in-full"
"""Argument of the other process: it looks at devices and prompts, too."""
NO_TOKENIZER = "has no tokenizer"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


class UserFunction(msgspec.Struct, frozen=True):
    """One function and how it is called."""

    path: str
    field: str
    arguments: tuple[str, ...]


class Findings(msgspec.Struct):
    """What the other process answers."""

    faults: list[str] = []
    figures: dict[str, str] = {}


def user_functions(config: RunConfig) -> list[UserFunction]:
    """Return the functions that the processes of this run will import."""
    found = [UserFunction(config.task.path, "task.path", TASK_ARGUMENTS)] if isinstance(config.task, PythonTask) else []
    found += [
        UserFunction(function.path, "reward.functions", REWARD_ARGUMENTS)
        for function in config.reward.functions
        if isinstance(function, PythonReward)
    ]
    if config.learner.kind == "builtin":
        algorithm = config.algorithm
        maths = [("algorithm.advantage", algorithm.advantage), ("algorithm.loss", algorithm.loss)]
        maths += [("algorithm.corrections", item.path) for item in algorithm.corrections if isinstance(item, PythonCorrection)]
        found += [UserFunction(path, field, MATHS_ARGUMENTS) for field, path in maths if ":" in path]
    return found


def start_faults(config: RunConfig, *, resumed: bool = False, imports: bool = True) -> list[str]:
    """Return what keeps a run from starting: files, folders, functions, a phase without room on its device.

    Args:
        config: Of the run.
        resumed: It has its model in its own folder.
        imports: Functions are imported.
    """
    has_own = has_own_environment(config.launch)  # which this machine cannot see
    faults = [] if has_own else _path_faults(config, resumed=resumed)
    try:
        check_phase_room(config)
    except ConfigError as error:
        faults += beside(faults, error)
    if imports and user_functions(config) and not has_own:
        faults += _ask(config, in_full=False).faults
    return faults


def beside(faults: Sequence[str], error: ConfigError) -> list[str]:
    """Return what an error adds to faults: nothing where it is of a model's folder of which they say that it is not there."""
    fields = {fault.partition(":")[0].partition(" ")[0] for fault in faults if NO_TOKENIZER not in fault}
    return [] if any(str(error).startswith(field) for field in fields) else [str(error)]


def _path_faults(config: RunConfig, *, resumed: bool) -> list[str]:
    """Return which files and folders are missing or cannot be written; a resumed run has the model in its own folder."""
    files = {"path": config.task.path} if isinstance(config.task, JsonlTask | PreferencesTask) else {}
    files |= {"held_out_path": config.task.held_out_path} if isinstance(config.task, JsonlTask) else {}
    faults = [f"task.{field}: there is no file {path}" for field, path in files.items() if path and not Path(path).is_file()]
    if isinstance(config.model, PretrainedModel) and not resumed:
        folder = Path(config.model.path)
        if not folder.is_dir():
            faults.append(f"model.path: there is no folder {folder}; `asyncrl model import` makes one")
        elif not (folder / "config.json").is_file():
            faults.append(f"model.path: {folder} has no config.json")
        elif not any((folder / name).is_file() for name in TOKENIZER_FILES):
            faults.append(f"model.path: {folder} {NO_TOKENIZER} (none of {', '.join(TOKENIZER_FILES)})")
    others = {"algorithm.reference.path": config.algorithm.reference.path if config.algorithm.needs_reference else ""}
    others["algorithm.critic.path"] = config.algorithm.critic.path if config.algorithm.critic is not None else ""
    others |= {f"inference.reward_models {model.name}": model.path for model in config.inference.reward_models}
    faults += [f"{field}: there is no folder {path}" for field, path in others.items() if path and not Path(path).is_dir()]
    written = {"folder": Path(config.folder)}
    if isinstance(config.broadcast.medium, FilesMedium) and config.broadcast.medium.folder:
        written["broadcast.medium.folder"] = Path(config.broadcast.medium.folder)
    for field, path in written.items():
        there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            faults.append(f"{field}: {there} is no folder that can be written")
    return faults


def wrong_kinds(run_folder: Path) -> list[str]:
    """Return what in a run folder should be a folder and is none, and what should be a file and is none."""
    folders = [f"{path} must be a folder" for name in RUN_FOLDERS if (path := run_folder / name).exists() and not path.is_dir()]
    found = (path for pattern in RUN_FILES for path in sorted(run_folder.glob(pattern)))
    return [f"{fault}: move it away" for fault in (*folders, *(f"{path} must be a file" for path in found if not path.is_file()))]


def examine(config: RunConfig) -> Findings:
    """Import functions, build the task, tokenise prompts and open devices; return what is wrong and what was counted."""
    faults = start_faults(config, imports=False)
    found = Findings() if has_own_environment(config.launch) else _ask(config, in_full=not faults)
    return Findings(faults + found.faults, found.figures)


def _ask(config: RunConfig, *, in_full: bool) -> Findings:
    command = (sys.executable, "-P", "-m", "asyncrl.control.tools.inputs", *([IN_FULL] if in_full else []))
    what = ", ".join([f"{one.field} {one.path!r}" for one in user_functions(config)] + ["prompts"] * in_full)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as given:  # no pipe: a process that an import starts
        given.write(msgspec.msgpack.encode(msgspec.to_builtins(config)))  # could hold it open
        given.seek(0)
        try:
            code = subprocess.call(command, stdin=given, stdout=output, stderr=output, timeout=TIMEOUT_S)  # noqa: S603 - ours
        except subprocess.TimeoutExpired:
            return Findings([f"looking at {what} has not ended after {TIMEOUT_S:.0f} s"])
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    try:
        if not code:
            return msgspec.json.decode(said.rpartition("\n")[2], type=Findings)
    except msgspec.MsgspecError:
        pass  # it said something else: what it was to import, or to call, ended the process
    said = said[-2000:] or "it said nothing"
    return Findings([f"looking at {what} ended the process with exit code {code} and no answer: {said}"])


# -- in the other process ------------------------------------------------------------------------------------------------


def main() -> int:
    """Look at the config on standard input; the last line that is said is the answer."""
    config, findings = parse_config(msgspec.msgpack.decode(sys.stdin.buffer.read())), Findings()
    for function in user_functions(config):
        try:
            load_function(function.path, function.field, function.arguments)
        except ConfigError as error:
            findings.faults.append(" ".join(str(error).splitlines()))
    if sys.argv[1:] == [IN_FULL] and not findings.faults:
        devices = {"generate.engine.device": getattr(config.generate.engine, "device", "cpu")}
        if config.learner.kind == "builtin":
            devices["learner.device"] = config.learner.device
        if config.needs_inference:
            devices["inference.device"] = config.inference.device
        named = {field: device for field, device in devices.items() if device not in {"cpu", "auto"}}
        torch: Any = importlib.import_module("torch") if named else None
        for field, device in named.items():
            try:
                torch.empty(1, device=device)
            except Exception as error:  # noqa: BLE001 - the boundary: torch raises what it likes
                findings.faults.append(f"{field} {device!r} cannot be used here: {first_line(error)}")
        try:
            _look_at_prompts(config, findings)
        except AsyncRLError as error:
            findings.faults.append(str(error))
    sys.stderr.flush()
    print("\n" + msgspec.json.encode(findings).decode())  # noqa: T201 - its parent reads it
    return 0


def _look_at_prompts(config: RunConfig, findings: Findings) -> None:
    task = build_task(config.task, config.seed)
    findings.figures["training prompts"] = f"{len(task.train):,}"
    findings.figures["held-out prompts"] = f"{len(task.held_out):,}"
    evaluates = config.eval.at_start or config.eval.at_end or config.eval.every_steps
    if evaluates and len(task.held_out) < config.eval.num_prompts:
        findings.figures["held-out prompts"] += f"  (eval.num_prompts asks for {config.eval.num_prompts}: all of them are taken)"
    for prompts in (task.train, task.held_out):
        try:
            check_tests(config.reward, prompts)
        except ConfigError as error:
            findings.faults.append(str(error))
    if isinstance(config.generate.engine, ReplayEngineConfig):
        return
    room = config.generate.engine.max_sequence_tokens - config.generate.sampling.max_new_tokens
    first = [task.train[index] for index in range(min(len(task.train), MOST_PROMPTS))]
    if isinstance(config.model, PretrainedModel):
        codec = TokenizerCodec(Path(config.model.path), trust_remote_code=config.model.trust_remote_code)
        lengths = [len(codec.encode(prompt)) for prompt in first]
    else:  # a model made from nothing has a token for each character
        lengths = [
            len(prompt.token_ids) // 4 or len(prompt.text or "".join(turn.content for turn in prompt.messages))
            for prompt in first
        ]
    looked_at, over = f"of the first {len(first):,}", sum(length > room for length in lengths)
    findings.figures["tokens of the longest prompt"] = f"{max(lengths)}  ({looked_at}; there is room for {room})"
    if over:
        findings.faults.append(
            f"{over} {looked_at} prompts are over {room} tokens (the longest has {max(lengths)}), which is what "
            "generate.engine.max_sequence_tokens leaves beside generate.sampling.max_new_tokens: they will fail; raise the "
            "one or lower the other"
        )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that an import began, and libraries that break at exit, are no fault of the functions
