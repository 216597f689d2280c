"""What a run's parts ask of each other, checked when the config is read.

Names, lengths, evaluation, rewards, data, inference, learner, vLLM servers, outside code. Algorithms are checked in
algorithm_table.py, devices and machines in placement_rules.py.
"""

from __future__ import annotations

from collections import Counter
from urllib.parse import SplitResult, urlsplit

from asyncrl.config.broadcast import CUDAIPCMedium, NCCLMedium
from asyncrl.config.generate import TransformersEngineConfig, VLLMServerEngineConfig
from asyncrl.config.learner import LearnerConfig, ScratchModel
from asyncrl.config.reward import OverlongPenalty, PreferenceReward, reward_names
from asyncrl.config.run import RunConfig
from asyncrl.config.tasks import PreferencesTask
from asyncrl.errors import ConfigError

MOST_NAME_BYTES = 200


def check_run(config: RunConfig) -> None:
    """Refuse what each part allows on its own but the whole does not.

    Raises:
        ConfigError: Two fields contradict each other; the message names both.
    """
    _check_name(config.name)
    _check_groups(config)
    _check_lengths(config)
    _check_scratch_model(config)
    _check_evaluation(config)
    _check_rewards(config)
    _check_outside_code(config)
    _check_deltas(config)


def _check_name(name: str) -> None:
    """A name is one folder's, below `folder`."""
    if name in {"", ".", ".."} or name != name.strip() or len(name.encode()) > MOST_NAME_BYTES or set(name) & set("/\\\0"):
        raise ConfigError(
            f"name {name!r} cannot be a folder of its own: it must be 1 to {MOST_NAME_BYTES} bytes without / or \\, and neither "
            "'.' nor '..'; `folder` says where runs lie"
        )


def _check_groups(config: RunConfig) -> None:
    least, group_size = config.buffer.min_group_members, config.algorithm.group_size
    if least > max(group_size, 2):
        raise ConfigError(f"buffer.min_group_members must be at most algorithm.group_size ({group_size}), got {least}")


def _check_lengths(config: RunConfig) -> None:
    sample, response = config.generate.engine.max_sequence_tokens, config.generate.sampling.max_new_tokens
    if response >= sample:
        raise ConfigError(
            f"generate.sampling.max_new_tokens ({response}) must be under generate.engine.max_sequence_tokens ({sample}): "
            "prompt and response share it"
        )
    if sample > config.packing.tokens_per_row:
        raise ConfigError(
            f"packing.tokens_per_row ({config.packing.tokens_per_row}) must be at least generate.engine.max_sequence_tokens "
            f"({sample}): a sample is never split"
        )


def _check_scratch_model(config: RunConfig) -> None:
    model, engine = config.model, config.generate.engine
    if not isinstance(model, ScratchModel):
        return
    if model.hidden_size % model.num_heads:
        raise ConfigError(f"model.hidden_size ({model.hidden_size}) must be a multiple of model.num_heads ({model.num_heads})")
    if isinstance(engine, TransformersEngineConfig) and engine.max_sequence_tokens > model.max_positions:
        raise ConfigError(
            f"generate.engine.max_sequence_tokens ({engine.max_sequence_tokens}) must be at most model.max_positions "
            f"({model.max_positions})"
        )


def _check_evaluation(config: RunConfig) -> None:
    if config.generate.num_workers == 0 and (config.eval.at_start or config.eval.at_end or config.eval.every_steps):
        raise ConfigError(
            "generate.num_workers is 0, so nobody can generate evaluation samples: set eval.at_start = false, "
            "eval.at_end = false and eval.every_steps = 0"
        )


def _check_rewards(config: RunConfig) -> None:
    if not config.reward.functions and not config.inference.reward_models:
        raise ConfigError(
            "reward.functions is empty: name at least one reward, for example [[reward.functions]] kind = 'answer_match'"
        )


def _check_outside_code(config: RunConfig) -> None:
    """Inference workers open their models once the run's model folder is known."""
    all_outside = config.learner.kind == "external" and config.generate.num_workers == 0
    if all_outside and config.needs_inference and isinstance(config.model, ScratchModel):
        raise ConfigError(
            "learner.kind = 'external' with generate.num_workers = 0 and model.kind = 'scratch' leaves nobody to name the "
            "model's folder, and the inference workers that [inference] or algorithm.reference asks for would wait for ever: set "
            "model.kind = 'pretrained' and model.path"
        )


def _check_deltas(config: RunConfig) -> None:
    medium = config.broadcast.medium
    if config.broadcast.delta is not None and isinstance(medium, NCCLMedium | CUDAIPCMedium):
        raise ConfigError(
            f"broadcast.delta needs a copy of the version before on the generator's side, and broadcast.medium.kind "
            f"{medium.__struct_config__.tag!r} ends in the engine's own memory: take shared_memory, files or zeromq, or leave "
            "broadcast.delta out"
        )


def check_data(config: RunConfig) -> None:
    """Refuse mixes of task, engine, rewards and packing that cannot train what they say.

    Raises:
        ConfigError: Names the fields, what they say, and what to write instead.
    """
    _check_penalties(config)
    if config.algorithm.kind == "dpo":
        _check_pairs(config)
    replays = config.generate.engine.replays
    if isinstance(config.task, PreferencesTask) != replays:
        raise ConfigError(
            "task.kind = 'preferences' and generate.engine.kind = 'replay' go together: the one has the answers that the other "
            "gives back"
        )
    if replays:
        _check_replay(config)
    elif any(isinstance(function, PreferenceReward) for function in config.reward.functions):
        raise ConfigError("reward.functions: 'preference' judges the answers of task.kind = 'preferences'; take another reward")


def _check_penalties(config: RunConfig) -> None:
    longest = config.generate.sampling.max_new_tokens
    for function in config.reward.functions:
        if not isinstance(function, OverlongPenalty):
            continue
        if function.buffer_tokens > function.max_tokens:
            raise ConfigError(
                f"reward.functions overlong: buffer_tokens ({function.buffer_tokens}) must be at most max_tokens "
                f"({function.max_tokens})"
            )
        if function.max_tokens > longest:
            raise ConfigError(
                f"reward.functions overlong: max_tokens ({function.max_tokens}) must be at most "
                f"generate.sampling.max_new_tokens ({longest}): no answer gets longer, so the penalty would not reach -1"
            )


def _check_pairs(config: RunConfig) -> None:
    longest, row = config.generate.engine.max_sequence_tokens, config.packing.tokens_per_row
    if row < 2 * longest:
        raise ConfigError(
            f"packing.tokens_per_row ({row}) must be at least {2 * longest}, twice generate.engine.max_sequence_tokens "
            f"({longest}): algorithm.kind = 'dpo' trains the two answers of a pair in one row"
        )
    if config.buffer.policy == "mask":
        raise ConfigError(
            "buffer.policy = 'mask' cuts old tokens out of answers, and algorithm.kind = 'dpo' compares whole answers: take "
            "'wait' or 'drop'"
        )


def _check_replay(config: RunConfig) -> None:
    algorithm, evaluation = config.algorithm, config.eval
    if algorithm.kind != "dpo" or algorithm.group_size != 2:
        raise ConfigError(
            "task.kind = 'preferences' gives two answers a prompt, which nothing but preferences can be learned from: set "
            f"algorithm.kind = 'dpo' (is {algorithm.kind!r}) and algorithm.group_size = 2 (is {algorithm.group_size})"
        )
    if evaluation.at_start or evaluation.at_end or evaluation.every_steps:
        raise ConfigError(
            "generate.engine.kind = 'replay' holds no model, so nobody can generate evaluation samples: set eval.at_start = "
            "false, eval.at_end = false and eval.every_steps = 0"
        )
    if config.generate.sampling.temperature != 1.0:
        raise ConfigError(
            f"generate.sampling.temperature ({config.generate.sampling.temperature}) must be 1 with generate.engine.kind = "
            "'replay': its answers were not drawn at any temperature"
        )
    longest, model = config.generate.engine.max_sequence_tokens, config.model
    if isinstance(model, ScratchModel) and longest > model.max_positions:
        raise ConfigError(
            f"generate.engine.max_sequence_tokens ({longest}) must be at most model.max_positions ({model.max_positions})"
        )


REFERENCE = "reference"
"""The name that the reference has among an inference worker's models."""


def check_inference(config: RunConfig) -> None:
    """Refuse models that could not be told apart (from each other, from the rules), or that nothing would read.

    Raises:
        ConfigError: Names the model and what to change.
    """
    if config.algorithm.reference.where == "worker" and not config.algorithm.needs_reference:
        raise ConfigError(
            "algorithm.reference.where = 'worker' and nothing reads a reference: add [algorithm.kl] or algorithm.kind = 'dpo', "
            "or drop it"
        )
    rules = reward_names(config.reward)
    for name, count in Counter(model.name for model in config.inference.reward_models).items():
        if not name:
            raise ConfigError("inference.reward_models: a reward model needs a name; its part of the reward is shown under it")
        if count > 1:
            raise ConfigError(f"inference.reward_models: the name {name!r} is given {count} times; names must be unique")
        if name in rules or name == REFERENCE:
            taken = "one of reward.functions" if name in rules else "the reference model"
            raise ConfigError(f"inference.reward_models: the name {name!r} is that of {taken}; take another")


def check_learner(learner: LearnerConfig) -> None:
    """Refuse what the learner's device or another setting makes impossible.

    Raises:
        ConfigError: Names the fields, what they say, and what to write instead.
    """
    _check_ranks(learner)
    on_cuda = learner.device.startswith("cuda")
    if learner.optimizer == "paged_adamw_8bit" and not on_cuda:
        raise ConfigError(
            f"learner.optimizer = 'paged_adamw_8bit' pages on CUDA only and learner.device is {learner.device!r}: "
            "take 'adamw_8bit'"
        )
    if learner.optimizer == "paged_adamw_8bit" and learner.offload_optimizer:
        raise ConfigError(
            "learner.optimizer = 'paged_adamw_8bit' moves its state between device and host by itself: set "
            "learner.offload_optimizer = false, or take 'adamw_8bit'"
        )
    if learner.logprobs == "fused" and not on_cuda:
        raise ConfigError(f"learner.logprobs = 'fused' runs on CUDA only and learner.device is {learner.device!r}: set 'chunked'")
    if learner.compile and not on_cuda:
        raise ConfigError(f"learner.compile is for CUDA and learner.device is {learner.device!r}: set it to false")


def _check_ranks(learner: LearnerConfig) -> None:
    """Refuse what several ranks do not have."""
    if learner.ranks == 1:
        return
    if learner.device not in {"cpu", "cuda"}:
        raise ConfigError(
            f"learner.ranks = {learner.ranks} puts each rank on a device of its own and learner.device is {learner.device!r}: "
            "set 'cuda' (rank r takes cuda:r) or 'cpu'"
        )
    if learner.optimizer != "adamw" or learner.offload_optimizer:
        raise ConfigError(
            f"learner.ranks = {learner.ranks} divides the optimizer's state over the ranks, in float32 and on their devices: set "
            f"learner.optimizer = 'adamw' (is {learner.optimizer!r}) and learner.offload_optimizer = false (is "
            f"{str(learner.offload_optimizer).lower()})"
        )


_LOOPBACK = ("localhost", "::1")


def check_vllm_server(config: RunConfig) -> None:
    """Refuse servers that are missing, shared, or out of the weights' reach.

    Raises:
        ConfigError: Naming the field, what is allowed and what to do.
    """
    engine = config.generate.engine
    if not isinstance(engine, VLLMServerEngineConfig):
        return
    _check_urls(config, engine)
    _check_reach(config, engine)
    if config.learner.lora is not None:
        raise ConfigError(
            "learner.lora sends adapters alone, which a vLLM server is not given yet: remove [learner.lora], or use "
            "generate.engine.kind = 'transformers'"
        )
    if config.model.fp32_head:
        raise ConfigError(
            "model.fp32_head = true changes the output layer in the engine too, and a vLLM server computes it in its own "
            "dtype: set model.fp32_head = false, or use generate.engine.kind = 'transformers'"
        )


def is_local(url: str) -> bool:
    """Return whether the server runs on this machine, as far as its address says."""
    host = _split(url).hostname or ""
    return host in _LOOPBACK or host.startswith("127.")


def _check_urls(config: RunConfig, engine: VLLMServerEngineConfig) -> None:
    if not engine.urls:
        raise ConfigError("generate.engine.url is empty: give the server's address, for example url = 'http://127.0.0.1:8000'")
    for url in engine.urls:
        parts = _split(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path not in {"", "/"}:
            raise ConfigError(f"generate.engine.url: {url!r} is no server's address; it looks like http://host:port")
    distinct = len({url.rstrip("/") for url in engine.urls})
    if distinct < max(len(engine.urls), config.generate.num_workers):
        raise ConfigError(
            f"generate.engine.url names {distinct} servers for generate.num_workers = {config.generate.num_workers}: each "
            "generator pauses and updates its server, so each needs its own: name as many, comma-separated, or lower num_workers"
        )


def _check_reach(config: RunConfig, engine: VLLMServerEngineConfig) -> None:
    if engine.shared_folder or isinstance(config.broadcast.medium, NCCLMedium):
        return
    remote = [url for url in engine.urls if not is_local(url)]
    if remote:
        raise ConfigError(
            f"generate.engine.url: {remote[0]} is another machine, and its weights come through files: set "
            "generate.engine.shared_folder to a folder on storage that this machine and the server see under the same path"
        )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise ConfigError(f"generate.engine.url: {url!r} is no server's address: {error}") from error
    return parts
