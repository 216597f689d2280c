"""What a run's parts ask of each other: lengths, evaluation, rewards, outside code. Called by config/load.py."""

from __future__ import annotations

from asyncrl.config.broadcast import CUDAIPCMedium, NCCLMedium
from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.config.model import ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError


def check_run(config: RunConfig) -> None:
    """Refuse what each part allows on its own but the whole does not.

    Raises:
        ConfigError: Two fields contradict each other; the message names both.
    """
    _check_groups(config)
    _check_lengths(config)
    _check_scratch_model(config)
    _check_evaluation(config)
    _check_rewards(config)
    _check_outside_code(config)
    _check_deltas(config)


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
