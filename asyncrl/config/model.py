"""What model is trained. Variants by the tag `kind`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.config.fields import PositiveFloat, PositiveInt, _Stage, _Variant


class WarmStart(_Stage, frozen=True):
    """A short supervised training before version 0, on the task's own worked examples (train split only)."""

    steps: PositiveInt
    """At most this many; the learning rate's schedule is laid over them."""
    until_accuracy: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Stop once the model gives the worked answer with this probability, mean of the last 8 batches; 0: never early."""
    batch_size: PositiveInt = 256
    learning_rate: PositiveFloat = 1e-3


class ScratchModel(_Variant, frozen=True, tag="scratch"):
    """A small Llama with random weights and a character tokenizer, made when the run starts."""

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt | None = None
    """None: as many as `num_heads`."""
    intermediate_size: PositiveInt | None = None
    """None: 4 x hidden_size."""
    max_positions: PositiveInt = 512
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
