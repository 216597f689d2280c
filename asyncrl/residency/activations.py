"""What a pass over one row takes besides weights and state: first-order sums in bytes, from a model's sizes.

Formulas and sources: docs/planning.md, "Activations"; held to measured steps by plan/validate.py. Pure. Called by
control/phase_room.py (the refusal at start) and plan/memory.py.
"""

from __future__ import annotations

from typing import Protocol


class Sizes(Protocol):
    """A causal transformer, as far as its activations go."""

    @property
    def hidden(self) -> int:
        """Return D."""
        ...

    @property
    def layers(self) -> int:
        """Return L."""
        ...

    @property
    def heads(self) -> int:
        """Return the heads of the queries."""
        ...

    @property
    def head_size(self) -> int:
        """Return the width of one."""
        ...

    @property
    def active_intermediate(self) -> int:
        """Return F: the width of the feed-forward that a token meets, of all its experts together."""
        ...

    @property
    def vocabulary(self) -> int:
        """Return V."""
        ...


def training_row(model: Sizes, tokens: int, bytes_per_value: int, *, checkpointing: bool, chunk_tokens: int) -> dict[str, float]:
    """Return what a row needs in forward and backward at its worst moment, by name.

    When the backward begins, every layer has kept what it needs (with checkpointing: its input alone), and the output layer
    works; later one layer is worked on (with checkpointing: computed again first). The larger of the two counts.
    """
    kept = tokens * kept_per_token(model, bytes_per_value, checkpointing=checkpointing)
    logits = logits_bytes(model, bytes_per_value, chunk_tokens)
    layer = tokens * _layer_work(model, bytes_per_value, checkpointing=checkpointing)
    return {"activations": kept} | ({"logits": logits} if logits > layer else {"a layer's backward": layer})


def forward_row(model: Sizes, tokens: int, bytes_per_value: int, chunk_tokens: int) -> float:
    """Return what a forward that keeps nothing needs: two layers' worth of the row, and one chunk's logits in float32."""
    return 2 * tokens * _layer_bytes(model, bytes_per_value) + chunk_tokens * model.vocabulary * 4


def kept_per_token(model: Sizes, bytes_per_value: int, *, checkpointing: bool) -> float:
    """Return what one token of a row keeps until the backward pass: all layers, the final norm, the targets' hidden states."""
    layer = model.hidden * bytes_per_value if checkpointing else _layer_bytes(model, bytes_per_value)
    return model.layers * layer + _norm_bytes(model, bytes_per_value) + model.hidden * bytes_per_value


def logits_bytes(model: Sizes, bytes_per_value: int, chunk_tokens: int) -> float:
    """Return what the chunked log-probabilities hold at once.

    Three of a chunk's logits in float32, and the output layer's gradient twice beside the one that is accumulated: this chunk's,
    and the sum of those before.
    """
    return 3.0 * chunk_tokens * model.vocabulary * 4 + 2.0 * model.vocabulary * model.hidden * bytes_per_value


def _layer_bytes(model: Sizes, bytes_per_value: int) -> float:
    """Return what one token keeps in one layer: two norms, attention's five, four of the feed-forward's width.

    Attention keeps q, k and v (k and v repeated to all heads), its output and the output layer's input; the feed-forward keeps
    gate, its activation, up and their product. Source: Korthikanti et al. 2022 (2205.05198), section 4, read for gated
    feed-forward and a fused kernel, and what torch's autograd was seen to keep (plan/validate.py).
    """
    wide = 5 * model.heads * model.head_size + 4 * model.active_intermediate
    return 2 * _norm_bytes(model, bytes_per_value) + wide * bytes_per_value


def _norm_bytes(model: Sizes, bytes_per_value: int) -> float:
    """Return what one token keeps of an RMSNorm: its input in float32, the normalised and the scaled value."""
    return (4 + 2 * bytes_per_value) * model.hidden


def _layer_work(model: Sizes, bytes_per_value: int, *, checkpointing: bool) -> float:
    """Return what one token needs while its layer is in the backward: two gradients as wide as the feed-forward, the layer."""
    again = _layer_bytes(model, bytes_per_value) if checkpointing else 0.0
    return again + 2 * model.active_intermediate * bytes_per_value
