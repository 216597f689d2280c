"""With what the learner optimises: optimizer, precision, adapters, ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.fields import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, _Stage


class LoRAConfig(_Stage, frozen=True):
    """Low-rank adapters (peft): only they are trained, saved in checkpoints and broadcast."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    target_modules: tuple[str, ...] = ()
    """Names of linear layers; empty: all of them but the output layer."""


class LearnerConfig(_Stage, frozen=True):
    """Optimizer and precision. One `kind` owns the step: ours, or outside code that takes scored groups."""

    kind: Literal["builtin", "external"] = "builtin"
    learning_rate: PositiveFloat = 1e-6
    min_learning_rate_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Cosine decay ends at this share of the learning rate; 1: constant."""
    warmup_steps: NonNegativeInt = 10
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """`adamw_8bit`: moments in 8 bits; `paged_adamw_8bit`: in pageable memory, CUDA only (both bitsandbytes)."""
    offload_optimizer: bool = False
    """Keep moments and master weights in host memory, and take the step there."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    epochs: PositiveInt = 1
    """Optimizer passes over one step's batch; each pass is `minibatches` updates under the same version."""
    minibatches: PositiveInt = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the parameters; loss and logprobs are float32 always. float16 scales its losses."""
    device: str = "cpu"
    num_threads: PositiveInt = 1
    gradient_checkpointing: bool = False
    lora: LoRAConfig | None = None
    ranks: PositiveInt = 1
    """Learner processes that share each step (FSDP2)."""
    logprobs: Literal["chunked", "fused"] = "chunked"
    """How the output layer runs: over chunks of tokens, or in one kernel without logits (a library's, CUDA only)."""
    logprob_chunk_tokens: PositiveInt = 512
    """Tokens whose logits exist at once."""
