"""What preferences, pairs and penalties ask of the rest of the config. Called by config/load.py."""

from __future__ import annotations

from asyncrl.config.generate import ReplayEngineConfig
from asyncrl.config.model import ScratchModel
from asyncrl.config.reward import OverlongPenalty, PreferenceReward
from asyncrl.config.run import RunConfig
from asyncrl.config.tasks import PreferencesTask
from asyncrl.errors import ConfigError


def check_data(config: RunConfig) -> None:
    """Refuse mixes of task, engine, rewards and packing that cannot train what they say.

    Raises:
        ConfigError: Names the fields, what they say, and what to write instead.
    """
    _check_penalties(config)
    if config.algorithm.kind == "dpo":
        _check_pairs(config)
    replays = isinstance(config.generate.engine, ReplayEngineConfig)
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
