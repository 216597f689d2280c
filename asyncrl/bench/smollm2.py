"""Weights and models with the names and shapes of SmolLM2-135M, random: what the broadcast benchmark hands over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

HIDDEN, KV, INNER, VOCABULARY, LAYERS = 576, 192, 1536, 49152, 30
PRETRAINED = Path("models/SmolLM2-135M-Instruct")
"""Where docs/models.md has `asyncrl model import` put the real one, from the working directory."""


def smollm2_weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors named and shaped as SmolLM2-135M's (tied embeddings), random."""
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    shapes |= {f"model.layers.{index}.{name}.weight": shape for index in range(LAYERS) for name, shape in layer.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    return {name: (torch.randn(shape) * 0.02).to(dtype) for name, shape in shapes.items()}


def smollm2_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return a model of that shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).to(dtype)
    return model
