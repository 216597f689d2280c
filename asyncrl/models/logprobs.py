"""Log-probabilities of given tokens, and the entropy of their distributions, without a [T, V] tensor for all tokens.

The head runs over chunks of tokens; where there is more than one chunk, a chunk's logits are thrown away after the forward
and computed again in the backward, so that at most one chunk of logits, its logarithms of probabilities and its gradient exist
at any time. Arithmetic after the head is float32 (float64 where the model is). Only the positions handed in see the head.

C chunk tokens, D hidden, M positions, V vocabulary. Called by learner/ and inference/.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from asyncrl.models.output_layer import Head, for_several_calls


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
    head = for_several_calls(head)

    def of_chunk(hidden_CD: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _of_logits(head(hidden_CD), targets_C, temperature, entropy_gradient=entropy_gradient)

    if len(hidden) <= chunk_tokens:
        return of_chunk(hidden, target_ids)
    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(target_ids, chunk_tokens), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        parts = [of_chunk(*chunk) for chunk in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _of_logits(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, temperature: float, *, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_C, entropy_C = _ChosenAndEntropy.apply(logits_CV, targets_C, temperature)  # type: ignore[no-untyped-call]
    return logprobs_C, entropy_C if entropy_gradient else entropy_C.detach()


class _ChosenAndEntropy(torch.autograd.Function):
    """Logits to the log-probability of each target and the entropy, keeping one [C, V] tensor for the backward.

    With p the probabilities, T the temperature, H the entropy: d logp(target) / d logits = (onehot(target) - p) / T, and
    d H / d logits = -p (log p + H) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        if temperature != 1.0:
            scaled_CV = scaled_CV / temperature
        logprobs_CV = scaled_CV.log_softmax(dim=-1)
        del scaled_CV
        entropy_C = logprobs_CV.exp().mul_(logprobs_CV).sum(dim=-1).neg_()
        ctx.save_for_backward(logprobs_CV, targets_C, entropy_C)
        ctx.temperature, ctx.logits_dtype = temperature, logits_CV.dtype
        ctx.set_materialize_grads(False)
        return logprobs_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1), entropy_C

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's own
        grad_logprobs_C: torch.Tensor | None,
        grad_entropy_C: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, None, None]:
        logprobs_CV, targets_C, entropy_C = ctx.saved_tensors
        grad_CV = logprobs_CV.exp()
        if grad_logprobs_C is None:
            grad_logprobs_C = torch.zeros_like(entropy_C)
        if grad_entropy_C is None:
            grad_CV.mul_(-grad_logprobs_C.unsqueeze(-1))
        else:
            factor_CV = (logprobs_CV + entropy_C.unsqueeze(-1)).mul_(grad_entropy_C.unsqueeze(-1))
            grad_CV.mul_(factor_CV.add_(grad_logprobs_C.unsqueeze(-1)).neg_())
        grad_CV.scatter_add_(-1, targets_C.unsqueeze(-1), grad_logprobs_C.unsqueeze(-1))
        if ctx.temperature != 1.0:
            grad_CV.div_(ctx.temperature)
        return grad_CV.to(ctx.logits_dtype), None, None
