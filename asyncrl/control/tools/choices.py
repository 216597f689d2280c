"""Checks of a run's config on this machine before the start: the values of `auto`, derived figures, and what the config names.

The values of `auto` are chosen once, by the process that starts the run, before it writes config.toml. Every process reads the
result, so a resumed run computes as before, on any machine. Memory figures are first-order sums of resident memory.

User code and heavy libraries are imported in a separate process that then ends. It finds modules as the run's processes will, and
its end frees what the imports took (memory, threads, a GPU). If Ray makes an environment for the run, this machine cannot check
it; faults appear when the run starts.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncrl.config.algorithm import PythonCorrection
from asyncrl.config.broadcast import FilesMedium
from asyncrl.config.check import doubts_about
from asyncrl.config.generate import ReplayEngineConfig, TransformersEngineConfig, VLLMEngineConfig, gpu_of
from asyncrl.config.learner import PretrainedModel, ScratchModel
from asyncrl.config.load import dump_config, parse_config
from asyncrl.config.places import with_chosen_medium, with_launch_choices
from asyncrl.config.reward import PythonReward
from asyncrl.config.run import JsonlTask, PreferencesTask, PythonTask, RayLaunch, ReasoningGymTask, RunConfig, has_own_environment
from asyncrl.control.launch.processes import plan_processes
from asyncrl.control.placement import limits, memory
from asyncrl.errors import AsyncRLError, ConfigError, first_line
from asyncrl.generate.rollout import TokenizerCodec
from asyncrl.models.memory import BYTES, Part, cache_rows, cache_tokens
from asyncrl.models.number_format import ask_driver, hardware_format
from asyncrl.reward.registry import build_rewards, check_prompts
from asyncrl.schema.samples import Prompt
from asyncrl.tasks.json_lines import FORM
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import TaskData
from asyncrl.user_code import MATHS_ARGUMENTS, REWARD_ARGUMENTS, TASK_ARGUMENTS, load_function

MIB = 1 << 20
KV_CACHE_SHARE = 0.25
"""Maximum share of the memory (the machine's, or the learner's GPU's) for all generators' KV caches if `num_slots` is "auto"."""
RUN_FOLDERS = ("checkpoints", "keys", "logs", "model", "set_aside", "weights")
RUN_FILES = ("*.json", "*.jsonl", "*.toml", "*.partial", "*.png", "endpoint", "ledger.sqlite*", "keys/*", "logs/*")
"""Files and folders in a run folder."""
TIMEOUT_S = 120.0
MOST_PROMPTS = 2000
"""Maximum number of prompts whose length is checked."""
PROMPTS, DEVICES = "prompts", "devices"
"""Arguments of the other process: check these too."""
NO_TOKENIZER = "has no tokenizer"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def with_choices(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the config with every `auto` replaced by its value on this machine, and a line for each choice."""
    config, said = with_launch_choices(config)
    config, medium = with_chosen_medium(config)
    said += [medium] if medium else []
    learner, engine = config.learner, config.generate.engine
    if learner.dtype == "auto":
        dtype, why = _format_of(config, "learner.dtype", learner.device)
        said.append(f"learner.dtype auto is {dtype}: {why}")
        learner = replace(learner, dtype=dtype)
    if isinstance(engine, TransformersEngineConfig):
        if engine.dtype == "auto":
            dtype, why = _format_of(config, "generate.engine.dtype", engine.device)
            said.append(f"generate.engine.dtype auto is {dtype}: {why}")
            engine = replace(engine, dtype=dtype)
        if engine.num_slots == "auto":
            num_slots, why = _slots(config, engine)
            said.append(f"generate.engine.num_slots auto is {num_slots}: {why}")
            engine = replace(engine, num_slots=num_slots)
    return replace(config, learner=learner, generate=replace(config.generate, engine=engine)), said


def _format_of(config: RunConfig, field: str, device: str) -> tuple[str, str]:
    gpu = gpu_of(device)
    if isinstance(config.launch, RayLaunch) and gpu is not None and not ask_driver("compute_cap", gpu):  # often a head node
        raise ConfigError(f"{field} = 'auto' cannot be chosen here: this machine has no GPU; set 'bfloat16' or 'float32'")
    return hardware_format(device)


def _slots(config: RunConfig, engine: TransformersEngineConfig) -> tuple[int, str]:
    """Return the number of slots of a generator: enough for a step's samples in one wave, if memory holds their KV cache.

    With fewer slots a step takes several waves, and slots are empty at the end of each. More slots would hold samples of later
    steps, which only become stale.
    """
    num_workers = max(1, config.generate.num_workers)
    wanted = -(-config.samples_per_step // num_workers)
    why = f"{config.samples_per_step} samples a step over {num_workers} generator{'s' * (num_workers > 1)}"
    try:
        shape = memory.policy_shape(config.model)
    except ConfigError:  # reported when the model is opened
        return wanted, why
    row_bytes = shape.cached_values * cache_tokens(engine.max_sequence_tokens) * BYTES[engine.dtype]
    memory_bytes = memory.gpu_memory_bytes(config) if gpu_of(engine.device) is not None else limits.total_memory()
    if not memory_bytes:
        return wanted, why
    most_rows = int(KV_CACHE_SHARE * memory_bytes / num_workers / row_bytes)
    most = max((slots for slots in range(1, wanted + 1) if cache_rows(slots) <= most_rows), default=1)
    if most == wanted:
        return wanted, why
    return most, f"{why}, but the KV cache of more would take over {KV_CACHE_SHARE:.0%} of {memory_bytes / (1 << 30):.0f} GiB"


# -- what follows from it -------------------------------------------------------------------------------------------------


def describe(config: RunConfig) -> tuple[str, list[str]]:
    """Return the resolved TOML and the derived figures as text, and the faults that would make a run fail."""
    config, said = with_choices(config)
    found = examine(config)
    lines, figures = [dump_config(config), "# derived"], found.figures
    try:
        figures |= derived(config)
    except ConfigError as error:
        found.faults += beside(found.faults, error)
    lines += [f"# {name:34} {value}" for name, value in figures.items()]
    lines += [f"# {choice}" for choice in said]
    lines += [f"# WARNING: {doubt}" for doubt in (*doubts_about(config), *found.doubts)]
    return "\n".join(lines), found.faults


def derived(config: RunConfig) -> dict[str, str]:
    """Return the figures derived from a config without `auto`, by name, some with their formula.

    Raises:
        ConfigError: The folder of a pretrained model has no readable config.json, or that of another model no readable weights.
    """
    algorithm, engine, shape = config.algorithm, config.generate.engine, memory.policy_shape(config.model)
    adapters = shape.adapter_parameters(config.learner.lora)
    lines = {
        "groups per step": f"{algorithm.groups_per_step}",
        "samples per step": f"{config.samples_per_step}  ({algorithm.groups_per_step} groups x {algorithm.members_per_group})",
        "most groups issued and not trained": (
            f"{config.most_groups_ahead}  ((max_staleness {config.buffer.max_staleness} + 1) x {algorithm.groups_per_step})"
        ),
        "most samples in flight": f"{config.most_samples_in_flight}",
        "slots over all generators": f"{config.generate.num_workers * engine.slots}",
        "samples the whole run trains": f"{config.samples_per_step * config.num_steps}",
        "most tokens of one sample": f"{engine.max_sequence_tokens}",
        "parameters": ("about " if isinstance(config.model, ScratchModel) else "")
        + f"{shape.parameters:,}"
        + (f"  (trained: {adapters:,} of the adapters)" if adapters else ""),
    }
    if config.learner.kind == "builtin":
        where = "the learner" if config.learner.ranks == 1 else "each learner rank"
        lines |= {f"{name} on {where}": _shown(parts, config) for name, parts in memory.learner_parts(config).items()}
    if parts := memory.generator_parts(config):
        lines["memory of each generator"] = _sum(parts)
    if parts := memory.inference_parts(config):
        lines["memory of each inference worker"] = _sum(parts, " + activations")
    counts = Counter(item.kind for item in plan_processes(config))
    workers = {"generators": counts["generator"], "reward workers": counts["reward"], "inference workers": counts["inference"]}
    ranks = f" of {config.learner.ranks} ranks" if config.learner.ranks > 1 else ""
    learner = f"{counts['learner']} learner{ranks}" if counts["learner"] else "learner outside"
    processes = ["1 controller", *(f"{count} {name}" for name, count in workers.items() if count), learner]
    lines["bytes of one weight version"] = f"{memory.version_bytes(config) / MIB:,.1f} MiB"
    if limits.shares_device(config):
        memory.check_shares(config)
        if mps := limits.generator_environment(config):
            percentage = mps[limits.MPS_PERCENTAGE]
            lines["time of each generator"] = f"{percentage} % of the GPU's multiprocessors, where MPS runs"
        else:
            share = config.placement.generation_share
            cores = sorted(limits.own_cores(share, limits.usable_cores(), limits.core_quota()))
            lines["cores of all generators"] = f"{cores}  (floor({share:g} x {limits.num_cores():g}))"
    return {**lines, "processes": ", ".join(processes), "weights travel by": config.broadcast.medium.kind}


def _shown(parts: Sequence[Part], config: RunConfig) -> str:
    """Return one rank's share of a model, by location."""
    names = {"device": " + activations", "host": " in host memory", "pageable": " in pageable memory"}
    places = [
        _sum(there, text, config.learner.ranks)
        for place, text in names.items()
        if (there := [part for part in parts if part.place == place])
    ]
    return "; ".join(places)


def _sum(parts: Sequence[Part], extra: str = "", ranks: int = 1) -> str:
    """Return the sum of the parts, and their names."""
    total = sum(part.num_bytes for part in parts) / ranks
    return f"{total / MIB:,.1f} MiB{extra}  ({', '.join(part.name for part in parts)})"


# -- what it names outside itself ------------------------------------------------------------------------------------------


class UserFunction(msgspec.Struct, frozen=True):
    """One user function and the arguments of its call."""

    path: str
    field: str
    arguments: tuple[str, ...]


class Findings(msgspec.Struct):
    """The answer of the other process."""

    faults: list[str] = []
    figures: dict[str, str] = {}
    doubts: list[str] = []


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
    """Return the faults that prevent a start: in files, folders and functions, or a phase that does not fit its device.

    Args:
        config: The run's config.
        resumed: Whether the run has its model in its own folder.
        imports: Whether to import the functions.
    """
    has_own = has_own_environment(config.launch)  # this machine cannot import from it
    faults = [] if has_own else _path_faults(config, resumed=resumed)
    has_turns = isinstance(config.task, ReasoningGymTask) or getattr(config.task, "chat", False)
    is_bare = isinstance(config.model, ScratchModel) and isinstance(config.generate.engine, TransformersEngineConfig)
    if has_turns and is_bare and config.learner.kind != "driven":  # else the caller gives prompts
        instead = "set model.kind = 'pretrained'" + (", or task.chat = false" if hasattr(config.task, "chat") else "")
        faults.append(f"model.kind 'scratch' has no chat template, and the prompts of this task are chat turns: {instead}")
    for check in (memory.check_engine_cache, memory.check_phase_room, *(() if has_own else (memory.check_shares,))):
        try:
            check(config)
        except ConfigError as error:
            faults += beside(faults, error)
    if imports and user_functions(config) and not has_own:
        faults += _ask(config).faults
    return faults


def beside(faults: Sequence[str], error: ConfigError) -> list[str]:
    """Return the error as a further fault, unless the faults already report its field (for example a missing model folder)."""
    fields = {fault.partition(":")[0].partition(" ")[0] for fault in faults if NO_TOKENIZER not in fault}
    return [] if any(str(error).startswith(field) for field in fields) else [str(error)]


def _path_faults(config: RunConfig, *, resumed: bool) -> list[str]:
    """Return the files and folders that are missing or not writable; a resumed run has the model in its own folder."""
    files = {"path": config.task.path} if isinstance(config.task, JsonlTask | PreferencesTask) else {}
    files |= {"held_out_path": config.task.held_out_path} if isinstance(config.task, JsonlTask) else {}
    faults = [
        f"task.{field}: " + (f"{path} is a folder; {FORM}" if Path(path).is_dir() else f"there is no file {path}")
        for field, path in files.items()
        if path and not Path(path).is_file()
    ]
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
    written = {} if resumed else {"folder": Path(config.folder)}
    if isinstance(config.broadcast.medium, FilesMedium) and config.broadcast.medium.folder:
        written["broadcast.medium.folder"] = Path(config.broadcast.medium.folder)
    for field, path in written.items():
        there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            faults.append(f"{field}: {there} is no folder that can be written")
    return faults


def wrong_kinds(run_folder: Path) -> list[str]:
    """Return the paths in a run folder that should be a folder but are not, or should be a file but are not."""
    folders = [f"{path} must be a folder" for name in RUN_FOLDERS if (path := run_folder / name).exists() and not path.is_dir()]
    found = (path for pattern in RUN_FILES for path in sorted(run_folder.glob(pattern)))
    return [f"{fault}: move it away" for fault in (*folders, *(f"{path} must be a file" for path in found if not path.is_file()))]


def examine(config: RunConfig, *, devices: bool = True) -> Findings:
    """Import functions, build the task, tokenise prompts and, unless told not to, open devices; return the faults and figures."""
    faults = start_faults(config, imports=False)
    asked = () if faults else (PROMPTS, DEVICES) if devices else (PROMPTS,)
    found = Findings() if has_own_environment(config.launch) else _ask(config, *asked)
    return replace(found, faults=faults + found.faults)


def _ask(config: RunConfig, *asked: str) -> Findings:
    command = (sys.executable, "-P", "-m", "asyncrl.control.tools.choices", *asked)
    what = ", ".join([*(f"{one.field} {one.path!r}" for one in user_functions(config)), *asked])
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as given:  # not a pipe: a process that an import starts
        given.write(msgspec.msgpack.encode(msgspec.to_builtins(config)))  # could hold it open
        given.seek(0)
        try:
            code = subprocess.call(command, stdin=given, stdout=output, stderr=output, timeout=TIMEOUT_S)  # noqa: S603 - ours
        except subprocess.TimeoutExpired:
            return Findings([f"checking {what} has not ended after {TIMEOUT_S:.0f} s"])
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    try:
        if not code:
            return msgspec.json.decode(said.rpartition("\n")[2], type=Findings)
    except msgspec.MsgspecError:
        pass  # other output: the code that it imported or called ended the process
    said = said[-2000:] or "it said nothing"
    return Findings([f"checking {what} ended the process with exit code {code} and no answer: {said}"])


# -- in the other process ------------------------------------------------------------------------------------------------


def main() -> int:
    """Check the config on standard input; the last line of output is the answer."""
    config, findings = parse_config(msgspec.msgpack.decode(sys.stdin.buffer.read())), Findings()
    for function in user_functions(config):
        try:
            load_function(function.path, function.field, function.arguments)
        except ConfigError as error:
            findings.faults.append(" ".join(str(error).splitlines()))
    if PROMPTS in sys.argv and not findings.faults:
        devices = {"generate.engine.device": getattr(config.generate.engine, "device", "cpu")}
        if config.learner.kind == "builtin":
            devices["learner.device"] = config.learner.device
        if config.needs_inference:
            devices["inference.device"] = config.inference.device
        here = DEVICES in sys.argv and not isinstance(config.launch, RayLaunch)  # its processes may be on other machines
        named = {field: device for field, device in devices.items() if device not in {"cpu", "auto"} and here}
        torch: Any = importlib.import_module("torch") if named else None
        for field, device in named.items():
            try:
                torch.empty(1, device=device)
            except Exception as error:  # noqa: BLE001 - the boundary: torch raises what it likes
                findings.faults.append(f"{field} {device!r} cannot be used here: {first_line(error)}")
        for look in (_look_at_rewards, _look_at_model, _look_at_vllm, _look_at_prompts):
            try:
                look(config, findings)
            except AsyncRLError as error:
                findings.faults.append(str(error))
    sys.stderr.flush()
    print("\n" + msgspec.json.encode(findings).decode())  # noqa: T201 - its parent reads it
    return 0


def _look_at_rewards(config: RunConfig, _: Findings) -> None:
    if not config.reward.is_caller:
        build_rewards(config.reward)


def _look_at_model(config: RunConfig, findings: Findings) -> None:
    """Look for what a model lacks for this config; of a pretrained one, only config and headers of the weights are read."""
    model, engine, lora = config.model, config.generate.engine, config.learner.lora
    trains_here = config.learner.kind == "builtin" and config.learner.fake_step_s is None
    if config.learner.fake_step_s is not None or (lora is None and not isinstance(model, PretrainedModel)):
        return
    transformers, causal = importlib.import_module("transformers"), importlib.import_module("asyncrl.models.causal")
    if isinstance(model, PretrainedModel):
        if trains_here:
            causal.refuse_adapters(Path(model.path))
            memory.stored_elements(model.path, "model.path")
        try:
            described = transformers.AutoConfig.from_pretrained(
                model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
            )
            positions = causal.most_positions(described)
        except Exception as error:  # the boundary: a model's own code raises what it likes
            raise ConfigError(f"model.path: {model.path} cannot be opened: {first_line(error)}") from error
    else:
        described, positions = transformers.LlamaConfig(), 0
    if lora is not None and trains_here:
        made = None
        with contextlib.suppress(Exception), importlib.import_module("torch").device("meta"):  # some models need their weights
            made = transformers.AutoModelForCausalLM.from_config(described, trust_remote_code=config.trusts_code)
        if made is not None:
            importlib.import_module("asyncrl.models.adapters").add_adapters(made, lora, config.seed)
    if isinstance(engine, TransformersEngineConfig) and 0 < positions < engine.max_sequence_tokens:
        findings.faults.append(
            f"generate.engine.max_sequence_tokens is {engine.max_sequence_tokens}; the model was made for {positions} positions: "
            "set it to at most that"
        )


def _look_at_vllm(config: RunConfig, _: Findings) -> None:
    """Check what vLLM refuses before it starts, and what this machine's vLLM lacks; with Ray another machine's may run."""
    engine, model = config.generate.engine, config.model
    if not isinstance(engine, VLLMEngineConfig):
        return
    vllm = importlib.import_module("asyncrl.generate.vllm.launch")
    if isinstance(model, PretrainedModel):
        checkpoint = importlib.import_module("asyncrl.generate.vllm.checkpoint")
        folder = checkpoint.read_folder(Path(model.path), trust_remote_code=model.trust_remote_code)
        vllm.engine_arguments(engine, folder, on_cpu=False)
        head_size = folder.head_size
    else:
        head_size = memory.policy_shape(model).head_size
    if importlib.util.find_spec("vllm") is not None and not isinstance(config.launch, RayLaunch):
        vllm.check_settings(engine, head_size)


def _look_at_prompts(config: RunConfig, findings: Findings) -> None:
    task = build_task(config.task, config.seed)
    findings.figures["training prompts"] = f"{len(task.train):,}"
    findings.figures["held-out prompts"] = f"{len(task.held_out):,}"
    evaluates = config.eval.at_start or config.eval.at_end or config.eval.every_steps
    if evaluates and len(task.held_out) < config.eval.num_prompts:
        findings.figures["held-out prompts"] += f"  (eval.num_prompts asks for {config.eval.num_prompts}: all of them are taken)"
    for prompts in (task.train, task.held_out):
        try:
            check_prompts(config.reward, prompts)
        except ConfigError as error:
            findings.faults.append(str(error))
    if isinstance(config.generate.engine, ReplayEngineConfig):
        return
    room = config.generate.engine.max_sequence_tokens - config.generate.sampling.max_new_tokens
    first = [task.train[index] for index in range(min(len(task.train), MOST_PROMPTS))]
    if isinstance(config.model, PretrainedModel):
        codec = TokenizerCodec(Path(config.model.path), trust_remote_code=config.model.trust_remote_code)
        encoded = [codec.encode(prompt) for prompt in first]
        lengths, highest = [len(ids) for ids in encoded], max(map(max, filter(len, encoded)), default=0)
        size = memory.number_of_model(config.model.path, "vocab_size")
        if size and (stop := max(config.generate.sampling.stop_token_ids, default=0)) >= size:
            findings.faults.append(
                f"generate.sampling.stop_token_ids must be under {size}, the size of the model's vocabulary: {stop}"
            )
        if size and highest >= size:
            findings.faults.append(
                f"model.path: its tokenizer gives the token id {highest}, and the model's vocabulary has {size} tokens: the "
                "tokenizer is of another model"
            )
    else:  # a scratch model has a token for each character
        if isinstance(config.model, ScratchModel) and config.learner.kind == "builtin" and config.learner.fake_step_s is None:
            findings.faults += _scratch_faults(config.model, task, first)
        lengths = [
            len(prompt.token_ids) // 4 or len(prompt.text or "".join(turn.content for turn in prompt.messages))
            for prompt in first
        ]
    looked_at, over = f"of the first {len(first):,}", sum(length > room for length in lengths)
    findings.figures["tokens of the longest prompt"] = f"{max(lengths)}  ({looked_at}; there is room for {room})"
    if over:
        is_fault = over >= config.supervision.max_failed_share * len(first)
        (findings.faults if is_fault else findings.doubts).append(
            f"{over} {looked_at} prompts are over {room} tokens (the longest has {max(lengths)}), the room that "
            "generate.engine.max_sequence_tokens leaves beside generate.sampling.max_new_tokens: they will fail; raise the "
            "first or lower the second"
        )


def _scratch_faults(model: ScratchModel, task: TaskData, first: Sequence[Prompt]) -> Iterator[str]:
    if model.warm_start is not None and not task.worked_examples:
        instead = "remove it ([model] with its kind, in a preset, replaces the table), or give TaskData.worked_examples"
        yield f"model.warm_start: this task has no worked examples; {instead}"
    texts = (prompt.text or "".join(turn.content for turn in prompt.messages) for prompt in first if not prompt.token_ids)
    if absent := "".join(sorted(set().union(*texts) - {*task.alphabet})):
        what = f"a scratch model has a token for each character of TaskData.alphabet, and {absent!r} are not in it"
        yield f"model.kind = 'scratch': {what}; prompts have them"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips threads that an import began, and libraries that fail at exit: they are not faults of the functions
