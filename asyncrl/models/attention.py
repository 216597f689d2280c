"""Attention over packed rows: linear layers run on one row without padding; attention stays within each sample.

A row's distinct tokens (N) are stored once, including common prefixes of samples; a `SequenceLayout` lists the tokens of each
sample's sequence. Sequences of similar length are gathered into right-padded buckets and run through torch's fused causal kernel:
there is no [N, N] mask, and only attention computes padding. Causal attention needs no mask, because no token attends to the
padding to its right.

On a GPU in 16 bits nothing is padded: flash.py.

On a CPU, if most slots would be copies of shared prefixes, the attention of a prefix is also computed only once. The sequences
then form a tree of runs: the tokens with which all begin, those with which a group's members begin, and the remainders. Each run
attends to itself and to the runs before it on its path; the parts are joined by their log-sum-exp.

Invariants: the output at a token depends only on the tokens of its own sample up to it; padding and second copies of a shared
prefix have gradient 0 at their queries, and the gradients of their keys and values are added up in the one stored token.

Registered with transformers under `PACKED_ATTENTION`: a model is opened with that name, or switched to it. A forward passes
`packed_layout`.

Legend: N tokens, S sequences, M slots of all buckets together, n sequences of a bucket, T its padded length, H heads, D head
size. Q, K queries and keys of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, PreTrainedModel

from asyncrl.errors import LearnerError
from asyncrl.models.flash import Runs, can_flash, flash_runs, runs_of

T = TypeVar("T")

PACKED_ATTENTION = "asyncrl_packed"
BUCKET_GROWTH = 1.25
"""Largest ratio of lengths in a bucket; attention grows with the square, so padding costs at most a factor of 1.56."""
SMALLEST_BUCKET = 16
"""Lengths up to this are in one bucket: a call of the kernel costs more than their padding."""
LEAST_COPIES = 0.6
"""Least share of slots that are copies of shared prefixes at which two kernels are faster than one."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """n runs of queries, padded to Q, that attend to n runs of K keys."""

    queries: torch.Tensor
    """int64 [n, Q], the token in each slot."""
    keys: torch.Tensor
    """int64 [n, K]."""
    real: torch.Tensor
    """int64, the slots of `queries` that are not padding."""
    is_causal: bool
    """True: a run attends to itself, `keys` are `queries`. False: it attends to a complete earlier run."""


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Positions of a row's tokens in the buckets."""

    slots: torch.Tensor
    """int64 [M], the token in each slot; padding repeats a token of its own sequence."""
    owner_slots: torch.Tensor
    """int64 [N], the slot that gives each token's output."""
    copies: torch.Tensor
    """int64 [C], slots that hold a token another slot owns (shared prefixes)."""
    shapes: tuple[tuple[int, int], ...]
    """(n, T) of each bucket; the slots of all buckets are consecutive."""
    shared: tuple[Bucket, ...] = ()
    """The same attention with each shared prefix computed once; empty if that saves too little."""
    runs: Runs | None = None
    """The same without buckets, for flash attention; None if the order of tokens does not allow it."""


def on_device(value: T, device: torch.device) -> T:
    """Return a tensor, or a dataclass or tuple with all its tensors, on a device (unchanged if they are there already)."""
    moved: Any = value
    if isinstance(value, torch.Tensor):
        moved = value.to(device)
    elif isinstance(value, tuple):
        moved = tuple(on_device(part, device) for part in value)
    elif is_dataclass(value) and not isinstance(value, type):
        moved = replace(value, **{field.name: on_device(getattr(value, field.name), device) for field in fields(value)})
    return cast("T", moved)


def build_layout(sequences: list[NDArray[np.int64]], num_tokens: int) -> SequenceLayout:
    """Arrange sequences in buckets.

    Args:
        sequences: For each sample the indices of its tokens, in order; several sequences may contain a token if all tokens
            before it are common to them too. Every token is in at least one.
        num_tokens: N.

    Returns:
        The layout, on the CPU.
    """
    buckets = [_padded([sequences[member] for member in members]) for members in _bucket([len(one) for one in sequences])]
    all_slots = np.concatenate([slots.reshape(-1) for slots, _ in buckets])
    all_real = np.concatenate([is_real.reshape(-1) for _, is_real in buckets])
    real_slots = np.flatnonzero(all_real)
    owner_slots = np.full(num_tokens, -1, dtype=np.int64)
    owner_slots[all_slots[real_slots][::-1]] = real_slots[::-1]
    assert (owner_slots >= 0).all(), "every token must be part of a sequence"
    copies = np.setdiff1d(real_slots, owner_slots, assume_unique=True)
    return SequenceLayout(
        slots=torch.from_numpy(all_slots),
        owner_slots=torch.from_numpy(owner_slots),
        copies=torch.from_numpy(copies),
        shapes=tuple(slots.shape for slots, _ in buckets),
        shared=_shared_buckets(sequences, num_tokens) if len(copies) > LEAST_COPIES * len(all_slots) else (),
        runs=runs_of(sequences, num_tokens),
    )


def _padded(runs: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return [n, T] with each run's last token repeated to its right, and which slots are real."""
    lengths = np.array([len(run) for run in runs])
    columns = np.arange(lengths.max())
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    slots = np.concatenate(runs)[np.minimum(columns, lengths[:, None] - 1) + starts[:, None]]
    return slots, columns < lengths[:, None]


def _shared_buckets(sequences: list[NDArray[np.int64]], num_tokens: int) -> tuple[Bucket, ...]:
    """Return buckets of the prefix tree's runs, each attending to itself, then of the tokens after each run, attending to it."""
    num_uses = np.bincount(np.concatenate(sequences), minlength=num_tokens)
    runs: dict[int, NDArray[np.int64]] = {}
    followers: dict[int, dict[int, list[NDArray[np.int64]]]] = {}
    for sequence in sequences:
        path: list[int] = []
        for run in np.split(sequence, np.flatnonzero(np.diff(num_uses[sequence])) + 1):
            first = int(run[0])
            if first not in runs:
                runs[first] = run
                for depth, before in enumerate(path):
                    followers.setdefault(depth, {}).setdefault(before, []).append(run)
            path.append(first)
    buckets = []
    causal = list(runs.values())
    for members in _bucket([len(run) for run in causal]):
        slots, is_real = _padded([causal[member] for member in members])
        buckets.append((slots, slots, is_real, True))
    for of_depth in followers.values():  # a token follows at most one run of each depth
        queries = {first: np.concatenate(parts) for first, parts in of_depth.items()}
        # Only equal numbers of keys, because there is no mask for padded keys.
        for num_keys in sorted({len(runs[first]) for first in queries}):
            firsts = [first for first in queries if len(runs[first]) == num_keys]
            for members in _bucket([len(queries[first]) for first in firsts]):
                slots, is_real = _padded([queries[firsts[member]] for member in members])
                buckets.append((slots, np.stack([runs[firsts[member]] for member in members]), is_real, False))
    return tuple(
        Bucket(torch.from_numpy(slots), torch.from_numpy(keys), torch.from_numpy(np.flatnonzero(is_real)), is_causal)
        for slots, keys, is_real, is_causal in buckets
    )


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
    **options: Any,  # noqa: ANN401 - transformers passes all options of the model
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
        sliding_window: A token attends to this many tokens, itself included; None: to all before it.
        options: Dropout and flags, which are ignored; a soft cap or attention sinks are refused.

    Returns:
        float [1, N, H, D], and None in place of the attention weights.

    Raises:
        LearnerError: The model needs a form of attention that packed rows do not support.
    """
    del module
    refused = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if refused or attention_mask is not None:
        asks = f"its attention asks for {refused or 'a mask'}"
        raise LearnerError(f"packed rows cannot be trained with this model: {asks}; choose a model of another family")
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if packed_layout is None:
        return _attend(flat, (1, query.shape[2]), scaling, sliding_window).unsqueeze(0), None
    runs = packed_layout.runs
    if runs is not None and can_flash(query, key, value):
        numbers = [*runs.longest, -1 if sliding_window is None else sliding_window - 1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        attended: torch.Tensor = flash_runs(*flat, runs.keys, runs.query_ends, runs.key_ends, numbers, scale)[0]
        return attended.unsqueeze(0), None
    return _attend_in_buckets(flat, packed_layout, scaling, sliding_window).unsqueeze(0), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_in_buckets(
    flat: list[torch.Tensor], layout: SequenceLayout, scaling: float | None, sliding_window: int | None
) -> torch.Tensor:
    """Return [N, H, D] of query, key and value [N, heads, D]; the rest is as in `packed_attention`."""
    head_size, on_cpu = flat[0].shape[-1], flat[0].device.type == "cpu"
    if layout.shared and on_cpu and sliding_window is None and head_size == flat[2].shape[-1]:
        scale = head_size**-0.5 if scaling is None else scaling
        shared: torch.Tensor = _SharedAttention.apply(*flat, layout, scale)  # type: ignore[no-untyped-call]
        return shared
    padded: list[torch.Tensor] = [_ToSlots.apply(tensor, layout) for tensor in flat]  # type: ignore[no-untyped-call]
    sizes = [count * width for count, width in layout.shapes]
    buckets = zip(*(torch.split(tensor, sizes) for tensor in padded), strict=True)
    attended = [_attend(bucket, shape, scaling, sliding_window) for bucket, shape in zip(buckets, layout.shapes, strict=True)]
    joined = attended[0] if len(attended) == 1 else torch.cat(attended)
    outputs: torch.Tensor = _FromSlots.apply(joined, layout)  # type: ignore[no-untyped-call]
    return outputs


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model to packed attention; else a packed row would be read as one text."""
    if model.config._attn_implementation != PACKED_ATTENTION:  # noqa: SLF001 - transformers has no public reader
        model.set_attn_implementation(PACKED_ATTENTION)


def _bucket(lengths_S: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return groups of sequence indices, each of lengths at most BUCKET_GROWTH apart."""
    lengths = np.array(lengths_S)
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
    mask = None
    if window is not None and shape[1] > window:
        mask = torch.ones(shape[1], shape[1], dtype=torch.bool, device=query.device).tril().triu(1 - window)
    repeats = query.shape[1] // key.shape[1]
    # Flash attention reads a shared head in place. torch's other fused kernel does not support that, and without a kernel torch
    # would store all scores, [n, H, T, T].
    is_grouped = repeats > 1 and mask is None and can_flash(query, key, value)
    if repeats > 1 and not is_grouped:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if query.device.type == "cpu" and query.dtype == torch.float32 and mask is None and shape[1] <= SMALLEST_BUCKET:
        # For so short a sequence the kernel's overhead per head is most of the cost.
        scale, future = query.shape[-1] ** -0.5 if scaling is None else scaling, query.new_full((shape[1], shape[1]), -torch.inf)
        queries, keys, values = (tensor.reshape(-1, *tensor.shape[2:]) for tensor in (query, key, value))
        weights = torch.baddbmm(future.triu(1), queries, keys.transpose(1, 2), alpha=scale).softmax(-1)
        return torch.bmm(weights, values).view(*query.shape[:3], -1).transpose(1, 2).flatten(0, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    )
    return attended.transpose(1, 2).flatten(0, 1)


class _ToSlots(torch.autograd.Function):
    """[N, H, D] to [M, H, D]. Backward adds up a token's slots; padding slots have no gradient and are left out."""

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
        grad_slots = grad_tokens.new_zeros(len(layout.slots), *grad_tokens.shape[1:])
        return grad_slots.index_copy_(0, layout.owner_slots, grad_tokens), None


class _SharedAttention(torch.autograd.Function):
    """Query [N, H, D], key and value [N, H or fewer, D] to [N, H, D], by `layout.shared`.

    A token's scores may be split over several buckets. The softmax over all of them follows from each bucket's output and
    log-sum-exp; backward runs each bucket's kernel on the joined output and log-sum-exp, so its probabilities are over all.

    Source: the merge of J. Juravsky et al., Hydragen (2024), section 3.2; backward as in ring attention (H. Liu et al., 2023).
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        scale: float,
    ) -> torch.Tensor:
        joined = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for part in layout.shared:
            inputs = (_slots_of(query, part.queries), *_keys_of(key, value, part.keys, query.shape[1]))
            if part.keys.shape[1] <= SMALLEST_BUCKET:  # for so few keys plain products are faster than the kernel
                scores = _scores(*inputs[:2], is_causal=part.is_causal, scale=scale)
                log_sum = scores.logsumexp(-1)
                output = ((scores - log_sum[..., None]).exp() @ inputs[2].float()).to(query.dtype)
            else:
                output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
                    *inputs, 0.0, part.is_causal, scale=scale
                )
            tokens = part.queries.flatten()[part.real]
            output = output.transpose(1, 2).flatten(0, 1)[part.real]
            log_sum = log_sum.transpose(1, 2).flatten(0, 1)[part.real]
            if not part.is_causal:
                before = log_sums[tokens]
                own, log_sum = log_sum, torch.logaddexp(before, log_sum)
                weights = ((before - log_sum).exp().unsqueeze(-1), (own - log_sum).exp().unsqueeze(-1))
                output = (joined[tokens] * weights[0] + output * weights[1]).to(output.dtype)
            joined[tokens] = output
            log_sums[tokens] = log_sum
        ctx.save_for_backward(query, key, value, joined, log_sums)
        ctx.layout, ctx.scale = layout, scale
        return joined

    @staticmethod
    def backward(ctx: Any, grad_joined: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        query, key, value, joined, log_sums = ctx.saved_tensors
        gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for part in ctx.layout.shared:
            num_runs, num_queries = part.queries.shape
            grad_slots = query.new_zeros(num_runs * num_queries, *query.shape[1:])
            tokens = part.queries.flatten()[part.real]
            grad_slots[part.real] = grad_joined[tokens]
            grad = grad_slots.view(num_runs, num_queries, *query.shape[1:]).transpose(1, 2)
            queries, (keys, values) = _slots_of(query, part.queries), _keys_of(key, value, part.keys, query.shape[1])
            output, log_sum = _slots_of(joined, part.queries), log_sums[part.queries].transpose(1, 2)
            if part.keys.shape[1] <= SMALLEST_BUCKET:
                scores = _scores(queries, keys, is_causal=part.is_causal, scale=ctx.scale)
                weights, grad = (scores - log_sum[..., None]).exp(), grad.float()
                grad_weights = grad @ values.float().transpose(-1, -2) - (grad * output).sum(-1, keepdim=True)
                grad_scores = weights * grad_weights * ctx.scale
                of_query, of_key = grad_scores @ keys.float(), grad_scores.transpose(-1, -2) @ queries.float()
                computed = [found.to(query.dtype) for found in (of_query, of_key, weights.transpose(-1, -2) @ grad)]
            else:
                computed = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
                    grad, queries, keys, values, output, log_sum, 0.0, part.is_causal, scale=ctx.scale
                )
            for gradient, slots in zip(gradients, computed, strict=True):
                own = slots.transpose(1, 2).flatten(0, 1)
                own = own.view(len(own), gradient.shape[1], -1, own.shape[2]).sum(2)
                if part.is_causal or gradient is gradients[0]:
                    gradient.index_add_(0, tokens, own[part.real])
                else:
                    gradient.index_add_(0, part.keys.flatten(), own)
        return *gradients, None, None


def _slots_of(tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return [n, H, T, D] of the tokens [n, T]."""
    return tensor[tokens].transpose(1, 2)


def _keys_of(key: torch.Tensor, value: torch.Tensor, tokens: torch.Tensor, num_heads: int) -> list[torch.Tensor]:
    """Return both as the kernel needs them: with one head per head of the query."""
    return [_slots_of(tensor, tokens).repeat_interleave(num_heads // tensor.shape[1], dim=1) for tensor in (key, value)]


def _scores(query: torch.Tensor, key: torch.Tensor, *, is_causal: bool, scale: float) -> torch.Tensor:
    """Return float32 [n, H, Q, K]."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill_(future, -torch.inf) if is_causal else scores
