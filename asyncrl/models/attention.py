"""Attention over packed rows: linear layers see one row without padding, attention sees whole samples and nothing across them.

A row's distinct tokens (N) are stored once, samples' common prompts included; a `SequenceLayout` says which tokens make up
each sample's sequence. Sequences of similar length are gathered into right-padded buckets and run through torch's fused
causal kernel: no [N, N] mask exists, and padding costs attention only. Causality makes a mask unnecessary: no token sees the
padding to its right.

Invariants: the output at a token depends on the tokens of its own sample up to it, and on nothing else; padding and second
copies of a shared prompt have gradient 0 at their queries, and the gradients of their keys and values are added up in the one
stored token.

Registered with transformers under `PACKED_ATTENTION`; causal.py asks for it by that name; a forward passes `packed_layout`.

Legend: N tokens, S sequences, M slots of all buckets together, n sequences of a bucket, T its padded length, H heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

from asyncrl.errors import LearnerError

PACKED_ATTENTION = "asyncrl_packed"
BUCKET_GROWTH = 1.25
"""A bucket holds lengths up to this factor apart; attention grows with the square, so its padding costs at most 1.56."""
SMALLEST_BUCKET = 16
"""Lengths up to this share a bucket: calling the kernel costs more than their padding."""


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Where the tokens of a row lie in the buckets."""

    slots: torch.Tensor
    """int64 [M], the token in each slot; padding repeats a token of its own sequence."""
    owner_slots: torch.Tensor
    """int64 [N], the slot whose output is the token's."""
    is_owner: torch.Tensor
    """bool [M]."""
    copies: torch.Tensor
    """int64 [C], slots that hold a token another slot owns (shared prompts)."""
    shapes: tuple[tuple[int, int], ...]
    """(n, T) of each bucket; their slots follow each other."""

    def to(self, device: torch.device) -> SequenceLayout:
        """Return the same layout on another device."""
        return SequenceLayout(
            slots=self.slots.to(device),
            owner_slots=self.owner_slots.to(device),
            is_owner=self.is_owner.to(device),
            copies=self.copies.to(device),
            shapes=self.shapes,
        )


def build_layout(sequences: list[NDArray[np.int64]], num_tokens: int) -> SequenceLayout:
    """Lay sequences out in buckets.

    Args:
        sequences: For each sample the indices of its tokens, in order; a token may be part of several as long as everything
            before it is common to them too. Every token is part of at least one.
        num_tokens: N.

    Returns:
        The layout, on the CPU.
    """
    lengths = np.array([len(sequence) for sequence in sequences])
    slots, is_real, shapes = [], [], []
    for members in _bucket(lengths):
        width = int(lengths[members].max())
        columns = np.minimum(np.arange(width), lengths[members][:, None] - 1)
        starts = np.concatenate([[0], np.cumsum(lengths[members])[:-1]])
        tokens = np.concatenate([sequences[member] for member in members])
        slots.append(tokens[columns + starts[:, None]].reshape(-1))
        is_real.append((np.arange(width) < lengths[members][:, None]).reshape(-1))
        shapes.append((len(members), width))
    all_slots, all_real = np.concatenate(slots), np.concatenate(is_real)
    real_slots = np.flatnonzero(all_real)
    owner_slots = np.full(num_tokens, -1, dtype=np.int64)
    owner_slots[all_slots[real_slots][::-1]] = real_slots[::-1]
    assert (owner_slots >= 0).all(), "every token must be part of a sequence"
    is_owner = np.zeros(len(all_slots), dtype=bool)
    is_owner[owner_slots] = True
    return SequenceLayout(
        slots=torch.from_numpy(all_slots),
        owner_slots=torch.from_numpy(owner_slots),
        is_owner=torch.from_numpy(is_owner),
        copies=torch.from_numpy(np.flatnonzero(all_real & ~is_owner)),
        shapes=tuple(shapes),
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: SequenceLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,  # noqa: ANN401 - transformers hands over whatever the model knows
) -> tuple[torch.Tensor, None]:
    """Attend within sequences; the signature is that of transformers' attention functions.

    Args:
        module: The calling layer; unused.
        query: float [1, H, N, D].
        key: float [1, H or fewer, N, D].
        value: As `key`.
        attention_mask: Must be None.
        packed_layout: The row's layout; None: the row is one sequence.
        scaling: Multiplies the scores; None: 1 / sqrt(D).
        sliding_window: A token sees this many tokens, itself included; None: all before it.
        options: Dropout and flags that mean nothing here; a soft cap or attention sinks are refused.

    Returns:
        float [1, N, H, D], and None in place of the attention weights.

    Raises:
        LearnerError: The model needs a form of attention that packed rows do not have.
    """
    del module
    refused = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if refused or attention_mask is not None:
        raise LearnerError(f"packed rows cannot be trained with this model: its attention asks for {refused or 'a mask'}")
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if packed_layout is None:
        return _attend(flat, (1, query.shape[2]), scaling, sliding_window).unsqueeze(0), None
    padded: list[torch.Tensor] = [_ToSlots.apply(tensor, packed_layout) for tensor in flat]  # type: ignore[no-untyped-call]
    sizes = [count * width for count, width in packed_layout.shapes]
    buckets = zip(*(torch.split(tensor, sizes) for tensor in padded), strict=True)
    attended = [
        _attend(bucket, shape, scaling, sliding_window) for bucket, shape in zip(buckets, packed_layout.shapes, strict=True)
    ]
    joined = attended[0] if len(attended) == 1 else torch.cat(attended)
    outputs: torch.Tensor = _FromSlots.apply(joined, packed_layout)  # type: ignore[no-untyped-call]
    return outputs.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _bucket(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return groups of sequence indices, each of lengths at most BUCKET_GROWTH apart."""
    order = np.argsort(lengths, kind="stable")
    ordered, begin, buckets = lengths[order], 0, []
    while begin < len(order):
        limit = max(SMALLEST_BUCKET, int(ordered[begin] * BUCKET_GROWTH))
        end = int(np.searchsorted(ordered, limit, side="right"))
        buckets.append(np.sort(order[begin:end]))
        begin = end
    return buckets


def _attend(bucket: Sequence[torch.Tensor], shape: tuple[int, int], scaling: float | None, window: int | None) -> torch.Tensor:
    """Run one bucket's query, key and value, [n * T, H, D] each; return [n * T, H, D]."""
    query, key, value = (tensor.view(*shape, *tensor.shape[1:]).transpose(1, 2) for tensor in bucket)
    repeats = query.shape[1] // key.shape[1]
    is_grouped = repeats > 1 and query.device.type == "cuda"  # its kernels read a shared head in place
    if repeats > 1 and not is_grouped:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    mask = None
    if window is not None and shape[1] > window:
        mask = torch.ones(shape[1], shape[1], dtype=torch.bool, device=query.device).tril().triu(1 - window)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    )
    return attended.transpose(1, 2).flatten(0, 1)


class _ToSlots(torch.autograd.Function):
    """[N, H, D] to [M, H, D]. Backward adds up a token's slots; those of padding carry no gradient and are left out."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:  # noqa: ANN401
        ctx.layout = layout
        return tokens.index_select(0, layout.slots)

    @staticmethod
    def backward(ctx: Any, grad_slots: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        layout: SequenceLayout = ctx.layout
        grad_tokens = grad_slots.index_select(0, layout.owner_slots)
        if len(layout.copies):
            tokens = layout.slots.index_select(0, layout.copies)
            grad_tokens.index_add_(0, tokens, grad_slots.index_select(0, layout.copies))
        return grad_tokens, None


class _FromSlots(torch.autograd.Function):
    """[M, H, D] to [N, H, D]: the output of a token's owner slot. Backward leaves every other slot 0."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:  # noqa: ANN401
        ctx.layout = layout
        return slots.index_select(0, layout.owner_slots)

    @staticmethod
    def backward(ctx: Any, grad_tokens: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        layout: SequenceLayout = ctx.layout
        grad_slots = grad_tokens.index_select(0, layout.slots)
        return grad_slots.masked_fill_(~layout.is_owner[:, None, None], 0.0), None
