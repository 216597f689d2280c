"""Rules between the parts of a config, checked when the config is read.

A rule is a condition and the message if it is true: the option, its value, what is allowed, and what to write instead.
The first field that a message names is the faulty one. Every rule is checked, even if others have found faults.
Rules of algorithms are in algorithm_table.py. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from asyncrl.config.algorithm_table import algorithm_faults, doubts_about_algorithm
from asyncrl.config.broadcast import AutoMedium, CUDAIPCMedium, GlooMedium, NCCLMedium, SharedStorageMedium
from asyncrl.config.generate import (
    LOWEST_VLLM_TEMPERATURE,
    TransformersEngineConfig,
    VLLMEngineConfig,
    VLLMServerEngineConfig,
    gpu_of,
)
from asyncrl.config.learner import ScratchModel
from asyncrl.config.places import generators_share_gpus, is_every_interface, is_loopback, needs_of, places_of, shown
from asyncrl.config.reward import AnswerMatchReward, CallerReward, OverlongPenalty, PreferenceReward, reward_names
from asyncrl.config.run import PreferencesTask, RayLaunch, RunConfig
from asyncrl.schema.control import ProcessKind

MOST_NAME_BYTES = 200
REFERENCE = "reference"
"""Name of the reference among an inference worker's models."""
MOST_FAULTS = 50
"""Maximum number of faults to report: invalid values, and broken rules."""
NO_EVALUATION = "set eval.at_start = false, eval.at_end = false and eval.every_steps = 0"
_FIELD = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)*", re.ASCII)


class Fault(msgspec.Struct, frozen=True):
    """One fault of a config."""

    field: str
    given: Any = None
    allowed: str = ""
    """What is wrong, and what is allowed."""

    def __str__(self) -> str:
        return self.allowed if self.field in self.allowed else f"{self.field}: {self.allowed}"


def faults_in(config: RunConfig, messages: Iterable[str], wrong: Collection[str] = ()) -> list[Fault]:
    """Return a fault for each message, with the first field that the message names and the value of that field.

    Args:
        config: The config to which the messages refer.
        messages: What is wrong with the config, for example from RULES.
        wrong: Fields whose given values were invalid, so that they have their defaults: messages about them are left out.
    """
    faults, tables = [], msgspec.to_builtins(config)
    for said in messages:
        named = list(_fields_in(said, tables)) or [("config", None)]
        if not any(f"{one}.".startswith(f"{name}.") or name.startswith(f"{one}.") for one in wrong for name, _ in named):
            faults.append(Fault(*named[0], said))
    return faults


def _fields_in(said: str, tables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a message names, and their values; for a list item or a field not set, its parent instead."""
    for word in _FIELD.finditer(said):
        value, names = tables, list[str]()
        for name in word[0].split("."):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
            names.append(name)
        if len(names) > 1 or (names and word.start() == 0 and not isinstance(value, dict)):
            yield ".".join(names), value


def doubts_about(config: RunConfig) -> list[str]:
    """Return settings that work but are probably a mistake, each with what to do."""
    algorithm, learner, num_steps = config.algorithm, config.learner, config.num_steps
    doubts = doubts_about_algorithm(algorithm, config.generate.sampling, config.buffer.max_staleness)
    if learner.kind != "builtin":
        return doubts
    if algorithm.critic is not None and algorithm.critic.warmup_steps >= num_steps:
        warmup = f"algorithm.critic.warmup_steps ({algorithm.critic.warmup_steps})"
        doubts.append(f"{warmup} is not less than num_steps ({num_steps}): the policy is never trained; lower it")
    if learner.minibatches > algorithm.groups_per_step:
        groups = f"algorithm.groups_per_step ({algorithm.groups_per_step})"
        doubts.append(
            f"learner.minibatches ({learner.minibatches}) is over {groups}, and an update has at least one group; lower it"
        )
    if learner.warmup_steps > num_steps:
        warmup = f"learner.warmup_steps ({learner.warmup_steps})"
        doubts.append(f"{warmup} is over num_steps ({num_steps}): the learning rate never reaches its value; lower it")
    return doubts


def _run(config: RunConfig) -> Iterator[str]:
    """Check name, lengths, evaluation, rewards and deltas."""
    name, model, engine, evaluation = config.name, config.model, config.generate.engine, config.eval
    is_folder = name.isprintable() and name == name.strip() and name not in {"", ".", ".."} and not set(name) & set("/\\")
    if not is_folder or len(name.encode()) > MOST_NAME_BYTES:
        yield f"name {name!r} cannot be a folder: use 1 to {MOST_NAME_BYTES} bytes of printable characters, without / or \\"
    least, group_size = config.buffer.min_group_members, config.algorithm.group_size
    if least > max(group_size, 2):
        yield f"buffer.min_group_members must be at most algorithm.group_size ({group_size}), got {least}"
    longest, response, row = engine.max_sequence_tokens, config.generate.sampling.max_new_tokens, config.packing.tokens_per_row
    if response >= longest:
        yield f"generate.sampling.max_new_tokens ({response}) must be under generate.engine.max_sequence_tokens ({longest})"
    if longest > row:
        yield f"packing.tokens_per_row ({row}) must be at least generate.engine.max_sequence_tokens ({longest})"
    if isinstance(model, ScratchModel) and model.hidden_size % model.num_heads:
        yield f"model.hidden_size ({model.hidden_size}) must be a multiple of model.num_heads ({model.num_heads})"
    is_bounded = isinstance(engine, TransformersEngineConfig | VLLMEngineConfig) or engine.replays
    if isinstance(model, ScratchModel) and is_bounded and longest > model.max_positions:
        yield f"generate.engine.max_sequence_tokens ({longest}) must be at most model.max_positions ({model.max_positions})"
    if isinstance(engine, VLLMEngineConfig) and engine.sleep and engine.device == "cpu":
        yield "generate.engine.sleep needs a GPU and generate.engine.device is 'cpu': set it to false"
    evaluates = evaluation.at_start or evaluation.at_end or evaluation.every_steps
    if evaluates and (config.generate.num_workers == 0 or engine.replays):
        yield f"no generator of this run has a model that can generate evaluation samples: {NO_EVALUATION}"
    if not config.reward.functions and not config.inference.reward_models:
        yield "reward.functions is empty: name at least one reward, as [[reward.functions]] kind = 'answer_match'"
    all_outside = config.learner.kind != "builtin" and config.generate.num_workers == 0
    if all_outside and config.needs_inference and isinstance(model, ScratchModel):
        yield "inference workers would wait for a model that no process creates: set model.kind = 'pretrained' and model.path"
    medium, takes = config.broadcast.medium, "take shared_memory, files or zeromq, or remove broadcast.delta"
    if config.broadcast.delta is not None and not medium.carries_deltas:
        yield f"broadcast.delta needs a copy of the last version, but broadcast.medium.kind {medium.kind!r} keeps none: {takes}"


def _task(config: RunConfig) -> Iterator[str]:
    """Check task, engine, rewards and packing."""
    longest, row, sampling = config.generate.engine.max_sequence_tokens, config.packing.tokens_per_row, config.generate.sampling
    algorithm, replays, most = config.algorithm, config.generate.engine.replays, sampling.max_new_tokens
    for function in config.reward.functions:
        if isinstance(function, AnswerMatchReward) and function.tolerance is not None and function.mode != "numeric":
            yield f"reward.functions answer_match: tolerance is read with mode = 'numeric' only (is {function.mode!r}): drop one"
        if isinstance(function, OverlongPenalty):
            where, tokens, buffer = "reward.functions overlong", function.max_tokens, function.buffer_tokens
            if buffer > tokens:
                yield f"{where}: buffer_tokens ({buffer}) must be at most max_tokens ({tokens})"
            if tokens > most:
                yield f"{where}: max_tokens ({tokens}) must be at most generate.sampling.max_new_tokens ({most})"
    if algorithm.kind == "dpo" and row < 2 * longest:
        pair = "twice generate.engine.max_sequence_tokens: 'dpo' trains both answers of a pair in one row"
        yield f"packing.tokens_per_row ({row}) must be at least {2 * longest}, {pair}"
    if algorithm.kind == "dpo" and config.buffer.policy == "mask":
        yield "buffer.policy = 'mask' cuts old tokens out of the loss, and 'dpo' compares whole answers: set 'wait' or 'drop'"
    if isinstance(config.task, PreferencesTask) != replays:
        yield "task.kind = 'preferences' and generate.engine.kind = 'replay' go together: set both or neither"
    if not replays and any(isinstance(function, PreferenceReward) for function in config.reward.functions):
        yield "reward.functions: 'preference' judges the answers of task.kind = 'preferences'; use another reward"
    if replays and (algorithm.kind != "dpo" or algorithm.group_size != 2):
        pair = f"set algorithm.kind = 'dpo' (is {algorithm.kind!r}) and algorithm.group_size = 2 (is {algorithm.group_size})"
        yield f"task.kind = 'preferences' gives two answers per prompt: {pair}"
    if replays and sampling.temperature != 1.0:
        yield f"generate.sampling.temperature ({sampling.temperature}) must be 1 with generate.engine.kind = 'replay'"


def _inference(config: RunConfig) -> Iterator[str]:
    """Check that rewards have different names, and that the run uses its reference worker."""
    reference, models = config.algorithm.reference, "inference.reward_models"
    if reference.where == "worker" and not config.algorithm.needs_reference:
        yield "algorithm.reference.where = 'worker', but nothing reads a reference: add [algorithm.kl], kind = 'dpo', or drop it"
    if config.reward.is_caller and config.reward.functions != (CallerReward(),):
        yield "reward.functions: 'caller' must be the only reward, without weight or name; its function returns the whole reward"
    for name, count in Counter(function.name for function in config.reward.functions if function.name).items():
        if count > 1:
            yield f"reward.functions: the name {name!r} is given {count} times; names must be unique"
    taken = {REFERENCE: "the reference model"} | dict.fromkeys(reward_names(config.reward), "one of reward.functions")
    for name, count in Counter(model.name for model in config.inference.reward_models).items():
        if not name:
            yield f"{models}: a reward model needs a name"
        if count > 1:
            yield f"{models}: the name {name!r} is given {count} times; names must be unique"
        if name in taken:
            yield f"{models}: the name {name!r} is the name of {taken[name]}; use another"


def _learner(config: RunConfig) -> Iterator[str]:
    """Check optimizer, kernels and ranks against the device; with a fake learner, check that nothing needs a model."""
    learner, device, ranks = config.learner, config.learner.device, config.learner.ranks
    on_cuda, is_paged = device.startswith("cuda"), learner.optimizer == "paged_adamw_8bit"
    if ranks > 1 and device not in {"cpu", "cuda"}:
        yield f"learner.ranks = {ranks} need one device each, but learner.device is {device!r}: set 'cuda' or 'cpu'"
    if ranks > 1 and (learner.optimizer != "adamw" or learner.offload_optimizer):
        instead = f"set learner.optimizer = 'adamw' (is {learner.optimizer!r}) and learner.offload_optimizer = false"
        yield f"learner.ranks = {ranks} need the optimizer's state in float32 on their devices: {instead}"
    if is_paged and not on_cuda:
        yield f"learner.optimizer = 'paged_adamw_8bit' pages on CUDA only and learner.device is {device!r}: take 'adamw_8bit'"
    if is_paged and learner.offload_optimizer:
        yield "'paged_adamw_8bit' moves its state by itself: set learner.offload_optimizer = false, or use 'adamw_8bit'"
    if learner.logprobs == "fused" and not on_cuda:
        yield f"learner.logprobs = 'fused' runs on CUDA only and learner.device is {device!r}: set 'chunked'"
    if learner.compile and not on_cuda:
        yield f"learner.compile is for CUDA and learner.device is {device!r}: set it to false"
    if learner.fake_step_s is None:
        return
    where = "learner.fake_step_s trains no model"
    if learner.kind != "builtin":
        yield f"{where}, and learner.kind {learner.kind!r} has no learner process: set 'builtin', or remove learner.fake_step_s"
    if config.generate.engine.has_model or config.generate.engine.replays:
        yield f"{where} and generate.engine.kind {config.generate.engine.kind!r} needs one: set 'fake'"
    if config.needs_inference:
        yield f"{where} but [inference] would load models: remove its reward models and algorithm.reference.where = 'worker'"
    if ranks > 1:
        yield f"{where}, so ranks have no model to shard: set learner.ranks = 1"
    if config.placement.takes_turns:
        yield f"{where}, and placement.kind {config.placement.kind!r} moves a model: set 'disaggregated'"


def _vllm(config: RunConfig) -> Iterator[str]:
    """Check temperatures; for servers, that every generator has its own, and that weights can reach it."""
    engine, num_workers, url = config.generate.engine, config.generate.num_workers, "generate.engine.url"
    temperatures = {"generate.sampling": config.generate.sampling.temperature, "eval": config.eval.temperature or 0.0}
    for table, asked in temperatures.items():
        if isinstance(engine, VLLMEngineConfig | VLLMServerEngineConfig) and 0 < asked < LOWEST_VLLM_TEMPERATURE:
            lowest = f"at least {LOWEST_VLLM_TEMPERATURE}, the lowest that vLLM samples at"
            yield f"{table}.temperature ({asked}) must be {lowest}; eval.temperature may be 0 (greedy) too"
    if not isinstance(engine, VLLMServerEngineConfig):
        return
    if not engine.urls:
        yield f"{url} is empty: give the server's address, for example url = 'http://127.0.0.1:8000'"
    for given in engine.urls:
        try:
            parts = urlsplit(given)
            is_http = parts.scheme in {"http", "https"} and parts.path in {"", "/"}
            is_address = is_http and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            yield f"{url}: {given!r} is no server's address; write http://host:port"
        elif not engine.shared_folder and not isinstance(config.broadcast.medium, NCCLMedium) and not is_loopback(given):
            yield f"{url}: {given} is another machine: set generate.engine.shared_folder to a folder with the same path on both"
    distinct = len({each.rstrip("/") for each in engine.urls})
    if distinct < max(len(engine.urls), num_workers):
        each = "each generator needs its own: name as many, comma-separated, or lower num_workers"
        yield f"{url} names {distinct} servers for generate.num_workers = {num_workers} and {each}"
    if config.learner.lora is not None:
        yield "a vLLM server cannot load adapters alone: remove [learner.lora], or use another generate.engine.kind"
    if config.model.fp32_head:
        yield "a vLLM server's output layer has its own dtype: set model.fp32_head = false, or use another generate.engine.kind"


def _medium(config: RunConfig) -> Iterator[str]:
    """Check that the medium fits the devices of the learner and the engine."""
    medium, engine, device = config.broadcast.medium, config.generate.engine, config.learner.device
    if isinstance(medium, GlooMedium | NCCLMedium) and is_every_interface(medium.host):
        instead = "set an address of the learner's machine that the generators can reach"
        yield f"broadcast.medium.host {medium.host!r} is told to every generator and names no machine: {instead}"
    if not medium.on_gpu:
        return
    where, is_ours = f"broadcast.medium.kind {medium.kind!r}", config.learner.kind == "builtin"
    instead = 'set broadcast.medium.kind = "shared_memory", or "auto"'
    if is_ours and gpu_of(device) is None:
        yield f"{where} sends from a GPU and learner.device is {device!r}: {instead}"
    if not engine.has_model:
        yield f"{where} sends to an engine's GPU, but generate.engine.kind {engine.kind!r} has none: {instead}"
    if engine.device_name == "cpu":
        yield f"{where} sends to a GPU and generate.engine.device is 'cpu': {instead}"
    if engine.is_remote or not is_ours:
        return  # only the server or the outside learner knows its device
    places = places_of(config)
    gpus = f"learner.device is {device!r} and the engine uses {shown(places.engine_gpus)}"
    if isinstance(medium, CUDAIPCMedium) and places.engine_gpus != {places.learner_gpu}:
        yield f"{where} needs learner and engine on the same GPU; {gpus}: {instead}"
    if isinstance(medium, NCCLMedium) and places.one_machine and places.learner_gpu in places.engine_gpus:
        yield f"{where} needs learner and engine on different GPUs; {gpus}: {instead}"
    if isinstance(medium, NCCLMedium) and generators_share_gpus(config):
        yield f"{where} takes one generator a GPU, but the run's own all share one: set generate.num_workers = 1, or {instead}"


def _turns(config: RunConfig) -> Iterator[str]:
    """Check that phases that take turns have one device on one machine, and an engine that can sleep."""
    kind, engine, learner, staleness = config.placement.kind, config.generate.engine, config.learner, config.buffer.max_staleness
    where, places, ranks, device = f"placement.kind {kind!r}", places_of(config), learner.ranks, learner.device
    if kind != "hybrid" and isinstance(config.broadcast.medium, SharedStorageMedium):
        instead = 'set broadcast.medium.kind = "shared_memory"'
        yield f'broadcast.medium.kind "shared_storage" is for only placement.kind "hybrid", but that is {kind!r}: {instead}'
    if not config.placement.takes_turns:
        return
    if kind == "hybrid" and ranks > 1:
        yield f"{where} shares weights, and there is no rank with all of them: set learner.ranks = 1"
    if ranks > 1 and gpu_of(device) is not None:
        instead = 'set learner.ranks = 1, or placement.kind = "disaggregated"'
        yield f"{where} takes turns on one device and learner.ranks = {ranks} on {device!r} has {ranks}: {instead}"
    if learner.kind != "builtin":
        yield f"{where} takes turns with the learner, which learner.kind {learner.kind!r} cannot do: set 'builtin'"
    if config.generate.num_workers == 0:
        yield f"{where} takes turns with generators, but generate.num_workers is 0: set it to at least 1"
    if not config.generate.in_flight_updates:
        yield f"{where} needs generate.in_flight_updates = true: old weights leave the device when training begins"
    if not places.one_machine:
        yield f'{where} shares a device, so the run must be on one machine: set transport.kind = "ipc", launch.kind = "local"'
    if staleness > 1:
        yield f"{where} trains in turns: buffer.max_staleness is {staleness}, set 0 (fully synchronous) or 1"
    if kind != "hybrid" and engine.is_remote:  # _shared_weights refuses engines for hybrid
        yield f"{where} shares the learner's device with the run's own engine: set generate.engine.kind = 'vllm'"
    if kind != "hybrid" and isinstance(engine, VLLMEngineConfig) and not (engine.sleep and engine.device != "cpu"):
        yield f"{where} needs an engine that can sleep: set generate.engine.sleep = true and run on a GPU"
    if engine.has_model and places.engine_gpus != (frozenset() if places.learner_gpu is None else {places.learner_gpu}):
        devices = f"learner.device is {device!r}, generate.engine.device {engine.device_name!r}"
        yield f"{where} is for one device: {devices}: set both to the same"


def _shared_weights(config: RunConfig) -> Iterator[str]:
    """Check that the engine can read the learner's own weights."""
    engine, learner, broadcast = config.generate.engine, config.learner, config.broadcast
    where, dtype = 'placement.kind "hybrid" lets the engine read the learner\'s own weights', getattr(engine, "dtype", "")
    if config.placement.kind != "hybrid":
        return
    if not engine.adopts:
        instead = 'set "transformers", or placement.kind = "colocated"'
        yield f"{where}, which generate.engine.kind {engine.kind!r} cannot: {instead}"
    if dtype != learner.dtype:
        yield f"{where}: generate.engine.dtype is {dtype!r}, learner.dtype {learner.dtype!r}; set both to the same"
    if learner.lora is not None:
        yield f"{where}, but adapters are separate from them: leave out learner.lora, or set colocated"
    if not isinstance(broadcast.medium, SharedStorageMedium | AutoMedium):
        yield f'{where}: broadcast.medium.kind is {broadcast.medium.kind!r}, set "shared_storage" (or "auto")'
    if broadcast.delta is not None or broadcast.dtype != "model":
        yield f'{where}, so nothing is sent: leave out broadcast.delta, and broadcast.dtype = "model"'


def _joining(config: RunConfig) -> Iterator[str]:
    """Check that generators can join this placement, and that a shared device is one device."""
    placement, engine, device, places = config.placement, config.generate.engine, config.learner.device, places_of(config)
    where, instead = f"placement.kind {placement.kind!r}", "set placement.kind = 'disaggregated'"
    if placement.takes_turns and placement.most_joining_generators:
        others = "set placement.most_joining_generators = 0, or placement.kind = 'async_hybrid' or 'disaggregated'"
        yield f"{where} takes turns on one device, so a generator elsewhere has no turn: {others}"
    if placement.kind != "async_hybrid":
        return
    if engine.is_remote:
        yield f"{where} shares the learner's device, but a vLLM server is elsewhere: {instead}"
    elif config.learner.kind == "builtin" and engine.has_model and places.learner_gpu not in (places.engine_gpus or {None}):
        on = f"generate.engine.device {engine.device_name!r} uses {shown(places.engine_gpus)}"
        yield f"{where} is for one device: {on}, learner.device is {device!r}: make them the same, or {instead}"


def _launch(config: RunConfig) -> Iterator[str]:
    """Check that the launcher can run the rest of the config."""
    launch, elastic, engine, workers = config.launch, config.launch.elastic, config.generate.engine, config.generate.num_workers
    if elastic is not None and not elastic.min_generators <= workers <= elastic.max_generators:
        bounds = f"min_generators ({elastic.min_generators}) and max_generators ({elastic.max_generators})"
        yield f"generate.num_workers ({workers}) must lie between launch.elastic.{bounds}"
    if elastic is not None and engine.is_remote and len(engine.urls) < elastic.max_generators:
        most = f"launch.elastic.max_generators is {elastic.max_generators}: name as many"
        yield f"generate.engine.url names {len(engine.urls)} servers, one per generator, but {most}"
    if not isinstance(launch, RayLaunch):
        return
    if config.transport.kind == "tcp" and is_every_interface(config.transport.host):
        instead = "set an address of the controller's machine, or remove it"
        yield f"transport.host {config.transport.host!r} is told to every process, and names no machine: {instead}"
    if launch.address.startswith("ray://"):
        instead = "run on a node of the cluster (`ray job submit`), with launch.address = 'auto' or HOST:PORT"
        yield f"launch.address {launch.address!r} is for Ray's client, which cannot start a run: {instead}"
    apart = "launch.kind 'ray' gives each process its own device"
    if config.placement.kind != "disaggregated":
        yield f"placement.kind {config.placement.kind!r} shares one, but {apart}: set placement.kind = 'disaggregated'"
    if isinstance(config.broadcast.medium, CUDAIPCMedium):
        yield f"broadcast.medium.kind 'cuda_ipc' shares one, but {apart}: set 'auto', 'nccl' or 'zeromq'"
    devices: dict[ProcessKind, tuple[str, str]] = {
        "learner": ("learner.device", config.learner.device), "inference": ("inference.device", config.inference.device),
        "generator": ("generate.engine.device", engine.device_name),
    }  # fmt: skip
    for kind, (field, device) in devices.items():
        name, _, number = device.partition(":")
        if name == "cuda" and number not in {"", "0"}:
            yield f"{field} {device!r} with launch.kind 'ray': set 'cuda' (Ray numbers each process's GPUs from 0)"
        if name == "cuda" and not needs_of(config, kind).num_gpus:
            yield f"{field} {device!r} needs a GPU, but launch.{kind}.num_gpus is 0: raise it"


RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    lambda config: algorithm_faults(config.algorithm, config.learner),
    _learner, _task, _inference, _run, _medium, _turns, _shared_weights, _joining, _launch, _vllm,
)  # fmt: skip
