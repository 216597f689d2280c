"""Which inference settings go together. Called by config/load.py."""

from __future__ import annotations

from collections import Counter

from asyncrl.config.reward_names import reward_names
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError

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
