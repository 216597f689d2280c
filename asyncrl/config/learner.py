"""The model to train, and how: adapters, optimizer, precision, ranks. Models are variants by the tag `kind`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config import (
    BoundedInt,
    Device,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Processes,
    _Stage,
    _Variant,
)


class WarmStart(_Stage, frozen=True):
    """A short supervised training before version 0, on the task's worked examples (train split only)."""

    steps: PositiveInt
    """Maximum number of steps; the learning rate schedule covers them."""
    until_accuracy: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Stop once the mean probability of the worked answer over the last 8 batches reaches this; 0: never stop early."""
    batch_size: PositiveInt = 256
    learning_rate: PositiveFloat = 1e-3


class ScratchModel(_Variant, frozen=True, tag="scratch"):
    """A small Llama with random weights and a character tokenizer, made when the run starts."""

    hidden_size: BoundedInt = 128
    num_layers: BoundedInt = 4
    num_heads: BoundedInt = 4
    num_kv_heads: BoundedInt | None = None
    """None: as many as `num_heads`."""
    intermediate_size: BoundedInt | None = None
    """None: 4 x hidden_size."""
    max_positions: BoundedInt = 512
    tie_embeddings: bool = True
    fp32_head: bool = False
    """The output layer runs in float32, in the learner and in the engine alike (one side alone is worse than none)."""
    warm_start: WarmStart | None = None


class PretrainedModel(_Variant, frozen=True, tag="pretrained"):
    """Any Hugging Face causal language model in a local folder."""

    path: str
    """Folder with config.json, safetensors and tokenizer; `asyncrl model import` makes one from a GGUF."""
    trust_remote_code: bool = False
    fp32_head: bool = False
    """The output layer runs in float32, in the learner and in the engine alike (one side alone is worse than none)."""


ModelConfig = ScratchModel | PretrainedModel


class LoRAConfig(_Stage, frozen=True):
    """Low-rank adapters (peft): only the adapters are trained, saved in checkpoints and broadcast."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    target_modules: tuple[str, ...] = ()
    """Names of linear layers; empty: all except the output layer."""


class LearnerConfig(_Stage, frozen=True):
    """Optimizer and precision. `kind` says what trains: this package's learner, or outside code that takes scored groups."""

    kind: Literal["builtin", "external", "driven"] = "builtin"
    """`driven`: outside code also supplies prompts during the run; a `Session` sets this."""
    fake_step_s: NonNegativeFloat | None = None
    """Train no model; each step only takes this many seconds. With engine `fake` the run has no model at all. None: train."""
    learning_rate: PositiveFloat = 1e-6
    min_learning_rate_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """The cosine decay ends at this share of the learning rate; 1: constant."""
    warmup_steps: NonNegativeInt = 10
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """`adamw_8bit`: moments in 8 bits; `paged_adamw_8bit`: in pageable memory, CUDA only (both bitsandbytes)."""
    offload_optimizer: bool = False
    """Keep moments and master weights in host memory, and run the optimizer step there."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    epochs: PositiveInt = 1
    """Optimizer passes over one step's batch; each pass is `minibatches` updates under the same version."""
    minibatches: PositiveInt = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of the parameters; loss and logprobs are always float32. float16 uses loss scaling. `auto`: bfloat16 if the device
    supports it in hardware, else float32."""
    device: Device = "cpu"
    num_threads: Processes = 1
    gradient_checkpointing: bool = False
    lora: LoRAConfig | None = None
    ranks: Processes = 1
    """Learner processes that share each step (FSDP2)."""
    logprobs: Literal["chunked", "fused"] = "chunked"
    """How log-probabilities of a chunk are computed from its logits: in separate operations, or in one kernel for forward and one
    for backward (`fused`, CUDA only)."""
    logprob_chunk_tokens: PositiveInt = 512
    """Number of tokens whose logits are in memory at once."""
    compile: bool = False
    """Compile the layers with torch.compile (CUDA only): at the start; with several ranks or offload, in the first step."""
