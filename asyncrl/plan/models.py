"""A model as the planner sees it: how many parameters, bytes of cache and operations a token, from a config.json.

Called by plan/memory.py, plan/speed.py and plan/question.py.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A causal transformer, dense or with experts."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    """Of one feed-forward block; of one expert where there are several."""
    vocabulary: int
    is_tied: bool = False
    num_experts: int = 0
    """0: dense."""
    experts_per_token: int = 0

    @property
    def active_intermediate(self) -> int:
        """Return the width of the feed-forward that a token meets, of all its experts together."""
        return self.intermediate * (max(1, self.experts_per_token) if self.num_experts else 1)

    @property
    def attention_parameters(self) -> int:
        """Return those of one layer: q, k, v, o."""
        return 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Return those of one feed-forward block: gate, up, down."""
        return 3 * self.hidden * self.intermediate

    @property
    def body_parameters(self) -> int:
        """Return those of the layers and norms, without embeddings and output layer."""
        router = self.hidden * self.num_experts
        layer = self.attention_parameters + max(1, self.num_experts) * self.expert_parameters + router + 2 * self.hidden
        return self.layers * layer + self.hidden

    @property
    def parameters(self) -> int:
        """Return all of them."""
        return self.body_parameters + (1 if self.is_tied else 2) * self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """Return those that a token meets in matrix products: attention, its experts, the output layer."""
        feed_forward = 3 * self.hidden * self.active_intermediate
        layer = self.attention_parameters + feed_forward + self.hidden * self.num_experts
        return self.layers * layer + self.vocabulary * self.hidden

    def cache_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Return the KV cache of one token: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_size * bytes_per_value

    def forward_flops(self, context_tokens: float) -> float:
        """Return operations of one token's forward with `context_tokens` before it.

        Source: 2 per parameter met; scores and values: 4 x layers x heads x head_size x context (Kaplan et al. 2020, table 1).
        """
        return 2 * self.active_parameters + 4 * self.layers * self.heads * self.head_size * context_tokens


def model_of_json(content: dict[str, Any], name: str) -> ModelSize:
    """Return the size that a config.json describes.

    Raises:
        ConfigError: A field is missing.
    """
    raw = content.get("text_config", content)
    experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts") or 0
    try:
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        return ModelSize(
            name=name,
            hidden=hidden,
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_size=raw.get("head_dim") or hidden // heads,
            intermediate=(experts and raw.get("moe_intermediate_size")) or raw["intermediate_size"],
            vocabulary=raw["vocab_size"],
            is_tied=bool(content.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
            num_experts=experts,
            experts_per_token=raw.get("num_experts_per_tok") or 0,
        )
    except KeyError as error:
        raise ConfigError(f"{name} has no {error.args[0]!r}: is it the config.json of a causal language model?") from error


def find_model(text: str) -> ModelSize:
    """Return a model by name, by the path of its folder or config.json, or by a round number of parameters (`1B`).

    Raises:
        ConfigError: It is none of these.
    """
    if text.lower() in NAMED:
        return NAMED[text.lower()]
    number = re.fullmatch(r"(\d+(?:\.\d+)?)[bB]", text)
    if number is not None:
        return _of_round_number(float(number[1]) * 1e9, text)
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    try:
        return model_of_json(json.loads(file.read_text(encoding="utf-8")), path.name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model must be one of {', '.join(NAMED)}, a number of parameters (7B), or a config.json or its folder; "
            f"got {text!r} ({error})"
        ) from error


def _of_round_number(parameters: float, name: str) -> ModelSize:
    """Return a model of that many parameters in the proportions of Llama: the width that makes its blocks about 3 wide."""
    shapes = [_of_width(width, parameters, name) for width in (256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384)]
    return min(shapes, key=lambda shape: abs(math.log(shape.intermediate / shape.hidden / 3)))


def _of_width(hidden: int, parameters: float, name: str) -> ModelSize:
    layers, vocabulary = max(2, hidden // 128), 32_000
    block = (parameters - (2 * vocabulary + 1) * hidden) / layers - 2 * hidden
    intermediate = max(1, round((block - 4 * hidden * hidden) / (3 * hidden)))
    return ModelSize(name, hidden, layers, hidden // 128, hidden // 128, 128, intermediate, vocabulary)


NAMED = {
    item.name: item
    for item in (
        ModelSize("smollm2-135m", 576, 30, 9, 3, 64, 1536, 49152, is_tied=True),
        ModelSize("qwen2.5-0.5b", 896, 24, 14, 2, 64, 4864, 151936, is_tied=True),
        ModelSize("qwen2.5-1.5b", 1536, 28, 12, 2, 128, 8960, 151936, is_tied=True),
        ModelSize("qwen2.5-7b", 3584, 28, 28, 4, 128, 18944, 152064),
        ModelSize("qwen2.5-32b", 5120, 64, 40, 8, 128, 27648, 152064),
        ModelSize("llama-3-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        ModelSize("llama-3-70b", 8192, 80, 64, 8, 128, 28672, 128256),
        ModelSize("qwen3-30b-a3b", 2048, 48, 32, 4, 128, 768, 151936, num_experts=128, experts_per_token=8),
        ModelSize("qwen3-235b-a22b", 4096, 94, 64, 4, 128, 1536, 151936, num_experts=128, experts_per_token=8),
    )
}
"""Sources: the models' own config.json files."""
