"""Which requests share a forward pass, and how their tokens lie in it.

Requests are taken in the order they came, as many as `tokens_per_batch` allows; a prompt that several of them begin with (the
members of a group) is stored once, because a causal model's hidden states of it are the same for all. Where the last token
of a sequence lies is known from its length, never from a padding id: the padding token of many models is their end of turn.

Invariants: every request is in exactly one batch; a request longer than the budget is a batch of its own; one target for each
response token of a request whose reference is wanted.

Legend: N tokens of the batch, S sequences, M targets, P prompt and T response tokens of a sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.models.attention import SequenceLayout, build_layout
from asyncrl.schema.samples import InferRequest, ids_from_bytes


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Whole sequences end to end, common prompts once."""

    input_ids: torch.Tensor
    """int64 [N]."""
    position_ids: torch.Tensor
    """int64 [N]."""
    layout: SequenceLayout
    sequences: tuple[NDArray[np.int64], ...]
    """S arrays [P + T]: where the tokens of each sequence lie."""


def num_tokens(request: InferRequest) -> int:
    """Return P + T."""
    return (len(request.prompt_ids) + len(request.token_ids)) // 4


def take_batch(waiting: deque[InferRequest], tokens_per_batch: int) -> list[InferRequest]:
    """Take the requests of the next forward pass off the queue, oldest first.

    Args:
        waiting: At least one request; shortened here.
        tokens_per_batch: Most distinct tokens of the pass, unless the first request alone has more.
    """
    taken: list[InferRequest] = []
    prompts: set[bytes] = set()
    total = 0
    while waiting:
        request = waiting[0]
        total += len(request.token_ids) // 4 + (0 if request.prompt_ids in prompts else len(request.prompt_ids) // 4)
        if taken and total > tokens_per_batch:
            break
        prompts.add(request.prompt_ids)
        taken.append(waiting.popleft())
    return taken


def pack(requests: Sequence[InferRequest]) -> PackedSequences:
    """Lay the sequences of these requests end to end.

    Args:
        requests: Each of at least one token.
    """
    prompts: dict[bytes, NDArray[np.int64]] = {}
    tokens: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    sequences: list[NDArray[np.int64]] = []
    total = 0
    for request in requests:
        prompt_ids, response_ids = ids_from_bytes(request.prompt_ids), ids_from_bytes(request.token_ids)
        if request.prompt_ids not in prompts:
            prompts[request.prompt_ids] = np.arange(total, total + len(prompt_ids))
            tokens.append(prompt_ids)
            positions.append(np.arange(len(prompt_ids)))
            total += len(prompt_ids)
        sequences.append(np.concatenate([prompts[request.prompt_ids], np.arange(total, total + len(response_ids))]))
        tokens.append(response_ids)
        positions.append(np.arange(len(prompt_ids), len(prompt_ids) + len(response_ids)))
        total += len(response_ids)
    return PackedSequences(
        input_ids=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        layout=build_layout(sequences, total),
        sequences=tuple(sequences),
    )
