"""Attention over packed rows by flash attention, on a GPU in 16 bits: sequences of any length in one call, nothing padded.

The queries of a sequence are the tokens that it does not share with an earlier one; its keys are all its tokens. So the queries
of a shared prefix are computed once. Forward and backward are custom operators, so that torch.compile makes one graph of a block.

Legend: N tokens, K keys of all sequences, S sequences, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

HALF = (torch.bfloat16, torch.float16)
"""Dtypes that flash attention supports."""
HEAD_SIZES = frozenset(range(8, 129, 8))
"""Larger head sizes have no backward on some GPUs."""
CAPABILITY = (8, 0)
"""Least compute capability with flash attention: Ampere."""


@dataclass(frozen=True, slots=True)
class Runs:
    """A row in which the own tokens of each sequence (not shared with an earlier one) follow those of the previous sequence."""

    keys: torch.Tensor
    """int64 [K], the tokens of all sequences, concatenated."""
    query_ends: torch.Tensor
    """int32 [S + 1], bounds of each sequence's own tokens in the N tokens."""
    key_ends: torch.Tensor
    """int32 [S + 1], bounds of each sequence's tokens in the K keys."""
    longest: tuple[int, int]
    """Largest number of own tokens, and of all tokens, of a sequence."""


def runs_of(sequences: list[NDArray[np.int64]], num_tokens: int) -> Runs | None:
    """Return the runs of a row (arguments: `build_layout`); None if the tokens are in another order."""
    keys, lengths = np.concatenate(sequences), np.array([len(sequence) for sequence in sequences])
    ends = np.concatenate([[0], np.cumsum(lengths)])
    is_own = keys > np.concatenate([[-1], np.maximum.accumulate(keys)[:-1]])
    is_first = np.zeros(len(keys), dtype=bool)
    is_first[ends[:-1]] = True
    shared_after_own = is_own[:-1] & ~is_own[1:] & ~is_first[1:]
    if shared_after_own.any() or not np.array_equal(keys[is_own], np.arange(num_tokens)):
        return None
    own = np.add.reduceat(is_own, ends[:-1])
    return Runs(
        keys=torch.from_numpy(keys),
        query_ends=torch.from_numpy(np.concatenate([[0], np.cumsum(own)]).astype(np.int32)),
        key_ends=torch.from_numpy(ends.astype(np.int32)),
        longest=(int(own.max()), int(lengths.max())),
    )


def can_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether this GPU has flash attention for these tensors."""
    if not query.is_cuda or not _has_flash(query.device.index):
        return False
    dtypes, head_sizes = {query.dtype, key.dtype, value.dtype}, {query.shape[-1], value.shape[-1]}
    return len(dtypes) == len(head_sizes) == 1 and dtypes <= set(HALF) and head_sizes <= HEAD_SIZES


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_flash(gpu: int | None) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(gpu) >= CAPABILITY


@torch.library.custom_op("asyncrl::flash_runs", mutates_args=(), device_types="cuda")
def flash_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    numbers: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within sequences. A sequence's own queries are its last tokens; the kernel aligns the last query with the last key.

    Args:
        query: [N, H, D], 16 bits.
        key: [N, H or fewer, D].
        value: As `key`.
        keys: As in `Runs`.
        query_ends: As in `Runs`.
        key_ends: As in `Runs`.
        numbers: Largest number of queries and of keys of a sequence; how many earlier tokens a token attends to, -1: all.
        scale: Multiplies the scores.

    Returns:
        [N, H, D], and the log-sum-exp of the scores, float32 [H, N].
    """
    given = (query.contiguous(), key.index_select(0, keys), value.index_select(0, keys), query_ends, key_ends)
    flash = torch.ops.aten._flash_attention_forward  # noqa: SLF001
    options = {"scale": scale, "window_size_left": numbers[2], "window_size_right": 0}
    output, log_sum, *_ = flash(*given, *numbers[:2], 0.0, True, False, **options)
    return output.contiguous(), log_sum.contiguous()


@torch.library.custom_op("asyncrl::flash_runs_gradients", mutates_args=(), device_types="cuda")
def flash_runs_gradients(
    grad: torch.Tensor, kept: list[torch.Tensor], numbers: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value; gradients of a token's copies are added up in float32.

    Args:
        grad: Gradient of the output.
        kept: The tensors of `flash_runs`, with its output and log-sum-exp after the third.
        numbers: As in `flash_runs`.
        scale: As in `flash_runs`.
    """
    query, key, value, output, log_sum, keys, *ends = kept
    given = (grad.contiguous(), query.contiguous(), key.index_select(0, keys), value.index_select(0, keys), output, log_sum)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)  # its random state
    flash = torch.ops.aten._flash_attention_backward  # noqa: SLF001
    options = {"scale": scale, "window_size_left": numbers[2], "window_size_right": 0}
    of_query, *of_slots = flash(*given, *ends, *numbers[:2], 0.0, True, no_dropout, no_dropout, **options)
    of_key, of_value = (
        torch.zeros(key.shape, dtype=torch.float32, device=key.device).index_add_(0, keys, slots.float()).to(key.dtype)
        for slots in of_slots
    )
    return of_query.contiguous(), of_key, of_value


@flash_runs.register_fake
def _shapes(query: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@flash_runs_gradients.register_fake
def _gradient_shapes(_: torch.Tensor, kept: list[torch.Tensor], *__: object) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in kept[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ANN401
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
    ctx.numbers, ctx.scale = inputs[6:]


def _backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    return *flash_runs_gradients(grad, list(ctx.saved_tensors), ctx.numbers, ctx.scale), *[None] * 5


flash_runs.register_autograd(_backward, setup_context=_keep)
