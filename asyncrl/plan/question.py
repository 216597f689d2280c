"""What is to be planned: a model, an algorithm, a placement and the hardware, before any of it exists.

Called by the command line (asyncrl plan) and plan/plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError
from asyncrl.plan.hardware import Cluster
from asyncrl.plan.models import ModelSize

Placement = Literal["disaggregated", "colocated", "hybrid", "async_hybrid"]
Algorithm = Literal["grpo", "ppo", "dpo"]
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run that somebody thinks of renting machines for."""

    model: ModelSize
    cluster: Cluster
    algorithm: Algorithm = "grpo"
    placement: Placement = "disaggregated"
    has_reference: bool = False
    """A frozen copy of the policy for KL; under LoRA the base is one already."""
    critic: ModelSize | None = None
    """Of PPO: a separate value model; None: none."""
    reward_model: ModelSize | None = None
    lora_rank: int = 0
    """0: all parameters are trained."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    offload_optimizer: bool = False
    checkpointing: bool = True
    """Activations of one layer at a time; the others are computed again in the backward pass."""
    groups_per_step: int = 64
    group_size: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 2048
    """Mean."""
    max_tokens: int = 8192
    """Longest sample: prompt and response."""
    tokens_per_row: int = 16384
    max_staleness: int = 2
    tensor_parallel: int = 0
    """GPUs of one engine; 0: as few as hold the weights and a useful cache."""
    num_generation_gpus: int = 0
    """0: the split that balances generation and training."""
    memory_share: float = 0.9
    """Of a device's memory that may be planned with."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.prompt_tokens + self.response_tokens > self.max_tokens:
            raise ConfigError(
                f"max_tokens ({self.max_tokens}) must hold a mean sample: prompt_tokens ({self.prompt_tokens}) and "
                f"response_tokens ({self.response_tokens})"
            )
        if self.max_tokens > self.tokens_per_row:
            raise ConfigError(f"tokens_per_row ({self.tokens_per_row}) must be at least max_tokens ({self.max_tokens})")
        if self.num_generation_gpus >= self.cluster.num_gpus and self.placement == "disaggregated" and self.num_generation_gpus:
            raise ConfigError(
                f"num_generation_gpus must be under {self.cluster.num_gpus}, all there are, got {self.num_generation_gpus}: "
                f"disaggregated training needs its own"
            )

    @property
    def samples_per_step(self) -> int:
        """Return groups x members."""
        return self.groups_per_step * self.group_size

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens that one step trains on, prompts included."""
        return self.samples_per_step * (self.prompt_tokens + self.response_tokens)

    @property
    def bytes_per_weight(self) -> int:
        """Return bytes of one weight as it is computed with."""
        return BYTES_OF[self.dtype]

    @property
    def lora_parameters(self) -> int:
        """Return what adapters on every linear layer have: rank x (inputs + outputs)."""
        model, rank = self.model, self.lora_rank
        queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
        attention = 2 * (model.hidden + queries) + 2 * (model.hidden + keys)
        return model.layers * rank * (attention + 3 * (model.hidden + model.intermediate) * max(1, model.num_experts))

    @property
    def version_bytes(self) -> int:
        """Return what one weight version sends."""
        return (self.lora_parameters or self.model.parameters) * self.bytes_per_weight
