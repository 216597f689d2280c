"""What a model takes: its parameters, what training holds, what a pass over one row holds, what its cache holds. Bytes, no torch.

One model of memory for all who ask: a run's dry run and its refusals at start (from its config), and the planner (from a name
and a number of GPUs). First-order sums. Formulas and sources: docs/planning.md; `asyncrl plan --validate` compares them with
real steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.config.learner import LearnerConfig, LoRAConfig
from asyncrl.errors import ConfigError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT32 = BYTES["float32"]
LEAST_ROWS = 32
"""Of the transformers engine's KV cache, where it has slots for as many; it then has a multiple of them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A causal transformer of Llama's layout, dense or with experts."""

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
    name: str = ""

    @property
    def active_intermediate(self) -> int:
        """The width of the feed-forward that a token meets, of all its experts together."""
        return self.intermediate * (max(1, self.experts_per_token) if self.num_experts else 1)

    @property
    def _attention_parameters(self) -> int:
        return 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Those of one feed-forward: gate, up, down."""
        return 3 * self.hidden * self.intermediate

    @property
    def block_parameters(self) -> int:
        """Those of one block, with its router and norms."""
        feed_forward = max(1, self.num_experts) * self.expert_parameters + self.hidden * self.num_experts
        return self._attention_parameters + feed_forward + 2 * self.hidden

    @property
    def body_parameters(self) -> int:
        """Those without the output layer (tied: the embeddings, which stay)."""
        return self.layers * self.block_parameters + self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.body_parameters + (0 if self.is_tied else self.vocabulary * self.hidden)

    @property
    def active_parameters(self) -> int:
        """Those that a token meets in matrix products: attention, its experts, the output layer."""
        feed_forward = 3 * self.hidden * self.active_intermediate + self.hidden * self.num_experts
        return self.layers * (self._attention_parameters + feed_forward) + self.vocabulary * self.hidden

    def adapter_parameters(self, lora: LoRAConfig | None) -> int:
        """Those that LoRA adds: rank x (inputs + outputs) of each adapted layer."""
        if lora is None:
            return 0
        queries, keys = self.hidden + self.heads * self.head_size, self.hidden + self.kv_heads * self.head_size
        feed_forward = max(1, self.num_experts) * (self.hidden + self.intermediate)
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), feed_forward)
        adapted = [size for name, size in sizes.items() if not lora.target_modules or name in lora.target_modules]
        return self.layers * lora.rank * sum(adapted)

    @property
    def cached_values(self) -> int:
        """Numbers that the KV cache has of one token: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def forward_flops(self, context_tokens: float) -> float:
        """Operations of one token's forward with `context_tokens` before it.

        Source: 2 per parameter met; scores and values: 4 x layers x heads x head_size x context (Kaplan et al. 2020, table 1).
        """
        return 2 * self.active_parameters + 4 * self.layers * self.heads * self.head_size * context_tokens


def shape_of_json(content: dict[str, Any], name: str) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises:
        ConfigError: A field is missing.
    """
    raw = content.get("text_config", content)
    experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts") or 0
    try:
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        return ModelShape(
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
            name=name,
        )
    except KeyError as error:
        raise ConfigError(f"{name} has no {error.args[0]!r}: is it the config.json of a causal language model?") from error


@dataclass(frozen=True, slots=True)
class Part:
    """Some of what a process holds."""

    name: str
    num_bytes: int
    place: Literal["device", "host", "pageable"] = "device"


def trained_parts(trained: int, frozen: int, learner: LearnerConfig) -> tuple[Part, ...]:
    """Return what a model costs to train, as learner/optim holds it.

    Args:
        trained: Parameters that are.
        frozen: Parameters that are not.
        learner: Dtype, optimizer and offload are read.
    """
    place: Literal["device", "host"] = "host" if learner.offload_optimizer else "device"
    weights = Part(f"{learner.dtype} weights", (trained + frozen) * BYTES[learner.dtype])
    parts = [weights, Part("float32 gradients", trained * FLOAT32)]
    if learner.offload_optimizer or BYTES[learner.dtype] < FLOAT32:
        parts.append(Part("float32 masters", trained * FLOAT32, place))
    if learner.optimizer == "adamw":
        parts.append(Part("two float32 moments", trained * 2 * FLOAT32, place))
    else:
        parts.append(Part("two 8-bit moments", trained * 2, "pageable" if learner.optimizer == "paged_adamw_8bit" else place))
    return tuple(parts)


def training_row(
    model: ModelShape, tokens: int, bytes_per_value: int, *, checkpointing: bool, chunk_tokens: int
) -> dict[str, float]:
    """Return what one row needs in forward and backward at its worst moment, by name.

    When the backward begins, every layer has kept what it needs (with checkpointing: its input alone), and the output layer
    works; later one layer is worked on (with checkpointing: computed again first). The larger of the two counts.

    Args:
        model: Its shape.
        tokens: Of the row.
        bytes_per_value: Of the compute dtype.
        checkpointing: Whether layers are computed again in the backward.
        chunk_tokens: Whose logits exist at once. Three of a chunk's logits in float32, and the output layer's gradient twice
            beside the one that is accumulated: this chunk's, and the sum of those before.
    """
    layer = _layer_bytes(model, bytes_per_value)
    input_bytes = model.hidden * bytes_per_value
    kept = tokens * (model.layers * (input_bytes if checkpointing else layer) + _norm_bytes(model, bytes_per_value) + input_bytes)
    logits = 3.0 * chunk_tokens * model.vocabulary * FLOAT32 + 2.0 * model.vocabulary * model.hidden * bytes_per_value
    work = tokens * ((layer if checkpointing else 0.0) + 2 * model.active_intermediate * bytes_per_value)
    return {"activations": kept} | ({"logits": logits} if logits > work else {"a layer's backward": work})


def forward_row(model: ModelShape, tokens: int, bytes_per_value: int, chunk_tokens: int) -> float:
    """Return what a forward that keeps nothing needs: two layers' worth of the row, and one chunk's logits in float32."""
    return 2 * tokens * _layer_bytes(model, bytes_per_value) + chunk_tokens * model.vocabulary * FLOAT32


def cache_rows(slots: int) -> int:
    """Return how many rows the transformers engine's KV cache has.

    Element-wise kernels work on whole vectors and finish the remainder by other code, whose last bit may differ: with such a row
    count there is no remainder, and all rows are treated alike.
    """
    return -(-slots // LEAST_ROWS) * LEAST_ROWS if slots >= LEAST_ROWS else max(8, 1 << (slots - 1).bit_length())


def cache_tokens(max_sequence_tokens: int) -> int:
    """Return how many tokens each of these rows has room for: whole blocks (generate/transformers/kv_cache.py)."""
    block = min(64, -(-max_sequence_tokens // 16) * 16)
    return -(-max_sequence_tokens // block) * block


def _layer_bytes(model: ModelShape, bytes_per_value: int) -> float:
    """Return what one token keeps in one layer: two norms, attention's five, four of the feed-forward's width.

    Attention keeps q, k and v (k and v repeated to all heads), its output and the output layer's input; the feed-forward keeps
    gate, its activation, up and their product. Source: Korthikanti et al. 2022 (2205.05198), section 4, read for gated
    feed-forward and a fused kernel, and what torch's autograd was seen to keep (plan/validate.py).
    """
    wide = 5 * model.heads * model.head_size + 4 * model.active_intermediate
    return 2 * _norm_bytes(model, bytes_per_value) + wide * bytes_per_value


def _norm_bytes(model: ModelShape, bytes_per_value: int) -> float:
    """Return what one token keeps of an RMSNorm: its input in float32, the normalised and the scaled value."""
    return (4 + 2 * bytes_per_value) * model.hidden
