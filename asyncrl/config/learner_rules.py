"""Which of the learner's settings go together. Called by config/load.py."""

from __future__ import annotations

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError


def check_learner(learner: LearnerConfig, algorithm: AlgorithmConfig) -> None:
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
    if learner.logprobs == "fused" and algorithm.entropy_coefficient:
        raise ConfigError(
            f"algorithm.entropy_coefficient is {algorithm.entropy_coefficient} and learner.logprobs = 'fused' has no gradient of "
            "the entropy: set 'chunked'"
        )


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
