"""Log-probabilities of given tokens, and the entropy of their distributions, without a [T, V] tensor for all tokens.

The head runs over chunks of tokens; where there is more than one chunk, a chunk's logits are thrown away after the forward
and computed again in the backward, so that at most one chunk of logits exists at any time. Arithmetic after the head is
float32 (float64 where the model is). Only the positions handed in see the head. Called by learner/ and inference/.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from asyncrl.algorithms.diagnostics import entropy_of_logits

Head = Callable[[torch.Tensor], torch.Tensor]
"""[C, D] to logits [C, V]."""


def token_logprobs(
    hidden: torch.Tensor,
    target_ids: torch.Tensor,
    head: Head,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy at each position.

    Args:
        hidden: float [M, D].
        target_ids: int64 [M].
        head: The model's output layer.
        temperature: Divides the logits, as it did when the tokens were sampled.
        chunk_tokens: Most positions whose logits exist at once.
        entropy_gradient: Whether the entropy is differentiated (it is detached where not, and costs less).

    Returns:
        float32 [M] each (float64 of a float64 model).
    """

    def of_chunk(hidden_C: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _chunk_logprobs(head(hidden_C), targets_C, temperature, entropy_gradient=entropy_gradient)

    if len(hidden) <= chunk_tokens:
        return of_chunk(hidden, target_ids)
    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(target_ids, chunk_tokens), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        parts = [of_chunk(*chunk) for chunk in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    logits: torch.Tensor, target_ids: torch.Tensor, temperature: float, *, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    logprobs_V = logits.log_softmax(dim=-1)
    chosen = logprobs_V.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    if entropy_gradient:
        return chosen, entropy_of_logits(logits)
    with torch.no_grad():
        return chosen, -(logprobs_V.exp() * logprobs_V).sum(dim=-1)
