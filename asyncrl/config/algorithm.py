"""What the learner optimises and with what: the algorithm and the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.stages import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, _Stage


class AlgorithmConfig(_Stage, frozen=True):
    """Advantage, loss and off-policy correction, by name."""

    groups_per_step: PositiveInt = 32
    """B: groups one optimizer step consumes."""
    group_size: PositiveInt = 8
    """G: samples of one prompt."""
    advantage: str = "grpo"
    """A name in algorithms/advantages.py."""
    advantage_epsilon: PositiveFloat = 1e-6
    loss: str = "decoupled_ppo"
    """A name in algorithms/losses.py."""
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, Meta(ge=1)] | None = None
    correction: Literal["none", "tis_token", "tis_sequence"] = "tis_token"
    """Importance weight proximal / behaviour; see algorithms/ratios.py."""
    correction_cap: PositiveFloat = 2.0
    proximal: Literal["recompute", "behaviour"] = "recompute"
    """Proximal policy of the decoupled objective: the learner's own forward before the step, or none (plain PPO)."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    entropy_coefficient: float = 0.0


class LearnerConfig(_Stage, frozen=True):
    """Optimizer and precision. One `kind` owns the step: ours, or outside code that takes scored groups."""

    kind: Literal["builtin", "external"] = "builtin"
    learning_rate: PositiveFloat = 1e-6
    min_learning_rate_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Cosine decay ends at this share of the learning rate; 1: constant."""
    warmup_steps: NonNegativeInt = 10
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    epochs: PositiveInt = 1
    """Optimizer passes over one step's batch; each pass is `minibatches` updates under the same version."""
    minibatches: PositiveInt = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the parameters; loss and logprobs are float32 always."""
    device: str = "cpu"
    num_threads: PositiveInt = 1
    gradient_checkpointing: bool = False
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once."""
