"""What a run's parts ask of each other, checked when the config is read.

Names, lengths, evaluation, rewards, data, inference, learner, vLLM servers, outside code. Algorithms are checked in
algorithm_table.py, devices and machines in placement_rules.py. Every check raises ConfigError with the fields, what they say and
what to write instead.
"""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlsplit

from asyncrl.config.broadcast import CUDAIPCMedium, GlooMedium, NCCLMedium
from asyncrl.config.generate import TransformersEngineConfig, VLLMServerEngineConfig
from asyncrl.config.learner import LearnerConfig, ScratchModel
from asyncrl.config.medium_choice import is_loopback
from asyncrl.config.reward import OverlongPenalty, PreferenceReward, reward_names
from asyncrl.config.run import RunConfig
from asyncrl.config.tasks import PreferencesTask
from asyncrl.errors import ConfigError

MOST_NAME_BYTES = 200
REFERENCE = "reference"
"""The name that the reference has among an inference worker's models."""
NO_EVALUATION = "set eval.at_start = false, eval.at_end = false and eval.every_steps = 0"


def check_run(config: RunConfig) -> None:
    """Check the run's name, group sizes, lengths, model sizes and evaluation, and that something scores."""
    name, model, engine, evaluation = config.name, config.model, config.generate.engine, config.eval
    if name in {"", ".", ".."} or name != name.strip() or len(name.encode()) > MOST_NAME_BYTES or set(name) & set("/\\\0"):
        raise ConfigError(f"name {name!r} cannot be a folder: take 1 to {MOST_NAME_BYTES} bytes without / or \\")
    least, group_size = config.buffer.min_group_members, config.algorithm.group_size
    if least > max(group_size, 2):
        raise ConfigError(f"buffer.min_group_members must be at most algorithm.group_size ({group_size}), got {least}")
    longest, response, row = engine.max_sequence_tokens, config.generate.sampling.max_new_tokens, config.packing.tokens_per_row
    if response >= longest:
        raise ConfigError(
            f"generate.sampling.max_new_tokens ({response}) must be under generate.engine.max_sequence_tokens ({longest}), "
            "which holds the prompt too"
        )
    if longest > row:
        raise ConfigError(f"packing.tokens_per_row ({row}) must be at least generate.engine.max_sequence_tokens ({longest})")
    if isinstance(model, ScratchModel) and model.hidden_size % model.num_heads:
        raise ConfigError(f"model.hidden_size ({model.hidden_size}) must be a multiple of model.num_heads ({model.num_heads})")
    is_bounded = isinstance(engine, TransformersEngineConfig) or engine.replays
    if isinstance(model, ScratchModel) and is_bounded and longest > model.max_positions:
        raise ConfigError(
            f"generate.engine.max_sequence_tokens ({longest}) must be at most model.max_positions ({model.max_positions})"
        )
    evaluates = evaluation.at_start or evaluation.at_end or evaluation.every_steps
    if evaluates and (config.generate.num_workers == 0 or engine.replays):
        raise ConfigError(f"nobody generates evaluation samples without a generator that holds a model: {NO_EVALUATION}")
    if not config.reward.functions and not config.inference.reward_models:
        raise ConfigError("reward.functions is empty: name at least one reward, as [[reward.functions]] kind = 'answer_match'")
    all_outside = config.learner.kind == "external" and config.generate.num_workers == 0
    if all_outside and config.needs_inference and isinstance(model, ScratchModel):
        raise ConfigError(
            "inference workers would wait for a model for ever: with learner.kind = 'external' and generate.num_workers = 0, "
            "set model.kind = 'pretrained' and model.path"
        )
    medium = config.broadcast.medium
    if config.broadcast.delta is not None and isinstance(medium, GlooMedium | NCCLMedium | CUDAIPCMedium):
        raise ConfigError(
            f"broadcast.delta needs a copy of the version before, and broadcast.medium.kind {medium.kind!r} keeps none: take "
            "shared_memory, files or zeromq, or leave broadcast.delta out"
        )


def check_data(config: RunConfig) -> None:
    """Check that task, engine, rewards and packing go together."""
    longest, row, sampling = config.generate.engine.max_sequence_tokens, config.packing.tokens_per_row, config.generate.sampling
    algorithm, replays = config.algorithm, config.generate.engine.replays
    for function in config.reward.functions:
        if isinstance(function, OverlongPenalty) and function.buffer_tokens > function.max_tokens:
            raise ConfigError(
                f"reward.functions overlong: buffer_tokens ({function.buffer_tokens}) must be at most max_tokens "
                f"({function.max_tokens})"
            )
        if isinstance(function, OverlongPenalty) and function.max_tokens > sampling.max_new_tokens:
            raise ConfigError(
                f"reward.functions overlong: max_tokens ({function.max_tokens}) must be at most "
                f"generate.sampling.max_new_tokens ({sampling.max_new_tokens}), the longest answer there is"
            )
    if algorithm.kind == "dpo" and row < 2 * longest:
        raise ConfigError(
            f"packing.tokens_per_row ({row}) must be at least {2 * longest}, twice generate.engine.max_sequence_tokens, as "
            "algorithm.kind = 'dpo' trains both answers of a pair in one row"
        )
    if algorithm.kind == "dpo" and config.buffer.policy == "mask":
        raise ConfigError("buffer.policy = 'mask' cuts old tokens out and 'dpo' compares whole answers: take 'wait' or 'drop'")
    if isinstance(config.task, PreferencesTask) != replays:
        raise ConfigError("task.kind = 'preferences' and generate.engine.kind = 'replay' go together: set both or neither")
    if not replays and any(isinstance(function, PreferenceReward) for function in config.reward.functions):
        raise ConfigError("reward.functions: 'preference' judges the answers of task.kind = 'preferences'; take another")
    if replays and (algorithm.kind != "dpo" or algorithm.group_size != 2):
        raise ConfigError(
            f"task.kind = 'preferences' gives two answers a prompt: set algorithm.kind = 'dpo' (is {algorithm.kind!r}) and "
            f"algorithm.group_size = 2 (is {algorithm.group_size})"
        )
    if replays and sampling.temperature != 1.0:
        raise ConfigError(
            f"generate.sampling.temperature ({sampling.temperature}) must be 1 with generate.engine.kind = 'replay'"
        )


def check_inference(config: RunConfig) -> None:
    """Check that reward models can be told apart, and that a reference worker is read."""
    if config.algorithm.reference.where == "worker" and not config.algorithm.needs_reference:
        raise ConfigError(
            "algorithm.reference.where = 'worker' and nothing reads a reference: add [algorithm.kl] or algorithm.kind = 'dpo', "
            "or drop it"
        )
    taken = {REFERENCE: "the reference model"} | dict.fromkeys(reward_names(config.reward), "one of reward.functions")
    for name, count in Counter(model.name for model in config.inference.reward_models).items():
        if not name:
            raise ConfigError("inference.reward_models: a reward model needs a name")
        if count > 1:
            raise ConfigError(f"inference.reward_models: the name {name!r} is given {count} times; names must be unique")
        if name in taken:
            raise ConfigError(f"inference.reward_models: the name {name!r} is that of {taken[name]}; take another")


def check_learner(learner: LearnerConfig) -> None:
    """Check the optimizer, the kernels and the ranks against the device."""
    device, on_cuda, is_paged = learner.device, learner.device.startswith("cuda"), learner.optimizer == "paged_adamw_8bit"
    if learner.ranks > 1 and device not in {"cpu", "cuda"}:
        raise ConfigError(
            f"learner.ranks = {learner.ranks} take a device each and learner.device is {device!r}: set 'cuda' or 'cpu'"
        )
    if learner.ranks > 1 and (learner.optimizer != "adamw" or learner.offload_optimizer):
        raise ConfigError(
            f"learner.ranks = {learner.ranks} hold the optimizer's state in float32 on their devices: set learner.optimizer = "
            f"'adamw' (is {learner.optimizer!r}) and learner.offload_optimizer = false"
        )
    if is_paged and not on_cuda:
        raise ConfigError(
            f"learner.optimizer = 'paged_adamw_8bit' pages on CUDA only and learner.device is {device!r}: take 'adamw_8bit'"
        )
    if is_paged and learner.offload_optimizer:
        raise ConfigError(
            "'paged_adamw_8bit' moves its state by itself: set learner.offload_optimizer = false, or take 'adamw_8bit'"
        )
    if learner.logprobs == "fused" and not on_cuda:
        raise ConfigError(f"learner.logprobs = 'fused' runs on CUDA only and learner.device is {device!r}: set 'chunked'")
    if learner.compile and not on_cuda:
        raise ConfigError(f"learner.compile is for CUDA and learner.device is {device!r}: set it to false")


def check_vllm_server(config: RunConfig) -> None:
    """Check that every generator has a server of its own, which the weights reach."""
    engine, num_workers = config.generate.engine, config.generate.num_workers
    if not isinstance(engine, VLLMServerEngineConfig):
        return
    if not engine.urls:
        raise ConfigError("generate.engine.url is empty: give the server's address, for example url = 'http://127.0.0.1:8000'")
    reaches = engine.shared_folder or isinstance(config.broadcast.medium, NCCLMedium)
    for url in engine.urls:
        try:
            parts = urlsplit(url)
            is_address = bool(
                parts.scheme in {"http", "https"} and parts.hostname and parts.path in {"", "/"} and parts.port != 0
            )
        except ValueError:
            is_address = False
        if not is_address:
            raise ConfigError(f"generate.engine.url: {url!r} is no server's address; it looks like http://host:port")
        if not reaches and not is_loopback(url):
            raise ConfigError(
                f"generate.engine.url: {url} is another machine: set generate.engine.shared_folder to a folder that this machine "
                "and the server see under the same path"
            )
    distinct = len({url.rstrip("/") for url in engine.urls})
    if distinct < max(len(engine.urls), num_workers):
        raise ConfigError(
            f"generate.engine.url names {distinct} servers for generate.num_workers = {num_workers} and each generator needs its "
            "own: name as many, comma-separated, or lower num_workers"
        )
    if config.learner.lora is not None:
        raise ConfigError("a vLLM server takes no adapters alone: remove [learner.lora], or take another generate.engine.kind")
    if config.model.fp32_head:
        raise ConfigError(
            "a vLLM server computes the output layer in its own dtype: set model.fp32_head = false, or take another "
            "generate.engine.kind"
        )
