"""Memory of a model in bytes: its parameters, training state, a pass over one row, and its KV cache. No torch.

The same estimates are used in a run's dry run and checks at start (from its config), and in the planner (from a name and a number
of GPUs). They are first-order sums. Formulas and sources: docs/planning.md; `asyncrl plan --validate` compares them with real
steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.config.learner import LearnerConfig, LoRAConfig
from asyncrl.errors import ConfigError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT32 = BYTES["float32"]
LEAST_ROWS = 32
"""The number of rows of the transformers engine's KV cache is a multiple of this, if it has at least so many slots."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a causal transformer with Llama's architecture, dense or with experts."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    """Width of one feed-forward block, or of one expert."""
    vocabulary: int
    is_tied: bool = False
    num_experts: int = 0
    """0: dense."""
    experts_per_token: int = 0
    name: str = ""

    @property
    def active_intermediate(self) -> int:
        """Total feed-forward width of a token, over all its experts."""
        return self.intermediate * (max(1, self.experts_per_token) if self.num_experts else 1)

    @property
    def _attention_parameters(self) -> int:
        return 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one feed-forward block: gate, up, down."""
        return 3 * self.hidden * self.intermediate

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, with its router and norms."""
        feed_forward = max(1, self.num_experts) * self.expert_parameters + self.hidden * self.num_experts
        return self._attention_parameters + feed_forward + 2 * self.hidden

    @property
    def body_parameters(self) -> int:
        """Parameters without the output layer; the embeddings are included, even if tied to it."""
        return self.layers * self.block_parameters + self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.body_parameters + (0 if self.is_tied else self.vocabulary * self.hidden)

    @property
    def active_parameters(self) -> int:
        """Parameters in a token's matrix products: attention, its experts, the output layer."""
        feed_forward = 3 * self.hidden * self.active_intermediate + self.hidden * self.num_experts
        return self.layers * (self._attention_parameters + feed_forward) + self.vocabulary * self.hidden

    def adapter_parameters(self, lora: LoRAConfig | None) -> int:
        """Parameters that LoRA adds: rank x (inputs + outputs) of each adapted layer."""
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
        """Number of values per token in the KV cache: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def forward_flops(self, context_tokens: float) -> float:
        """Return the operations of one token's forward with `context_tokens` before it.

        Source: 2 per active parameter; scores and values: 4 x layers x heads x head_size x context (Kaplan et al. 2020, table 1).
        """
        return 2 * self.active_parameters + 4 * self.layers * self.heads * self.head_size * context_tokens


HIDDEN, LAYERS = "hidden_size n_embd d_model", "num_hidden_layers n_layer n_layers num_layers"
HEADS, INTERMEDIATE = "num_attention_heads n_head n_heads", "intermediate_size n_inner ffn_dim ffn_hidden_size"
"""Names of a field in the config.json of different families; a family without the last one has four times the hidden size."""


def shape_of_json(content: dict[str, Any], name: str) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises:
        ConfigError: A field is missing.
    """
    raw = content.get("text_config", content)
    experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts") or 0

    def field(names: str, default: int | None = None) -> int:
        found = next((raw[each] for each in names.split() if raw.get(each) is not None), default)
        if not isinstance(found, int):
            raise ConfigError(f"{name} has no {names.split()[0]!r}: is it the config.json of a causal language model?")
        return found

    hidden, heads = field(HIDDEN), field(HEADS)
    intermediate = field(INTERMEDIATE, 4 * hidden)
    return ModelShape(
        hidden=hidden,
        layers=field(LAYERS),
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or hidden // heads,
        intermediate=(experts and raw.get("moe_intermediate_size")) or intermediate,
        vocabulary=field("vocab_size"),
        is_tied=bool(content.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        num_experts=experts,
        experts_per_token=raw.get("num_experts_per_tok") or 0,
        name=name,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a process's memory."""

    name: str
    num_bytes: int
    place: Literal["device", "host", "pageable"] = "device"


def trained_parts(trained: int, frozen: int, learner: LearnerConfig) -> tuple[Part, ...]:
    """Return the memory parts of training a model, as learner/optim allocates them.

    Args:
        trained: Number of trained parameters.
        frozen: Number of other parameters.
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
    """Return the peak memory of one row in forward and backward, by name.

    When the backward begins, each layer has stored what it needs (with checkpointing: only its input), and the output layer runs;
    later the backward of one layer runs (with checkpointing: after computing the layer again). The larger of the two counts.

    Args:
        model: Shape of the model.
        tokens: Tokens of the row.
        bytes_per_value: Bytes per value of the compute dtype.
        checkpointing: Whether layers are computed again in the backward.
        chunk_tokens: Tokens whose logits exist at once. Counted are three copies of a chunk's logits in float32, and, besides the
            accumulated gradient of the output layer, two more: this chunk's and the sum of earlier chunks.
    """
    layer = _layer_bytes(model, bytes_per_value)
    input_bytes = model.hidden * bytes_per_value
    kept = tokens * (model.layers * (input_bytes if checkpointing else layer) + _norm_bytes(model, bytes_per_value) + input_bytes)
    logits = 3.0 * chunk_tokens * model.vocabulary * FLOAT32 + 2.0 * model.vocabulary * model.hidden * bytes_per_value
    work = tokens * ((layer if checkpointing else 0.0) + 2 * model.active_intermediate * bytes_per_value)
    return {"activations": kept} | ({"logits": logits} if logits > work else {"a layer's backward": work})


def forward_row(model: ModelShape, tokens: int, bytes_per_value: int, chunk_tokens: int) -> float:
    """Return the memory of a forward without gradient: two layers of the row, and one chunk's logits in float32."""
    return 2 * tokens * _layer_bytes(model, bytes_per_value) + chunk_tokens * model.vocabulary * FLOAT32


def cache_rows(slots: int) -> int:
    """Return the number of rows of the transformers engine's KV cache.

    Element-wise kernels process whole vectors, and the remainder with other code, whose last bit may differ. With this number of
    rows there is no remainder, so all rows are processed in the same way.
    """
    return -(-slots // LEAST_ROWS) * LEAST_ROWS if slots >= LEAST_ROWS else max(8, 1 << (slots - 1).bit_length())


def cache_tokens(max_sequence_tokens: int) -> int:
    """Return the capacity of each of these rows in tokens: whole blocks (generate/transformers/kv_cache.py)."""
    block = min(64, -(-max_sequence_tokens // 16) * 16)
    return -(-max_sequence_tokens // block) * block


def _layer_bytes(model: ModelShape, bytes_per_value: int) -> float:
    """Return the bytes that one token stores in one layer: two norms, five tensors of attention, four of the feed-forward.

    Attention stores q, k and v (k and v repeated to all heads), its output and the output projection's input; the feed-forward
    stores gate, its activation, up and their product. Source: Korthikanti et al. 2022 (2205.05198), section 4, adapted to gated
    feed-forward and a fused kernel, and to measurements of torch's autograd (plan/validate.py).
    """
    wide = 5 * model.heads * model.head_size + 4 * model.active_intermediate
    return 2 * _norm_bytes(model, bytes_per_value) + wide * bytes_per_value


def _norm_bytes(model: ModelShape, bytes_per_value: int) -> float:
    """Return the bytes that one token stores for an RMSNorm: input in float32, normalised and scaled value."""
    return (4 + 2 * bytes_per_value) * model.hidden
