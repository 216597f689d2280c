"""Log-probabilities and entropy of a chunk of logits in one pass over them, and their gradient in another: for CUDA.

The same values as `token_logprobs` makes step by step (models/logprobs.py). There each of some eight passes over [C, V] float32
numbers goes through the GPU's memory, which takes longer than the output layer itself. Here torch.compile makes one kernel of the
forward and one of the backward, and what is kept between them is the logits in their own dtype and two numbers a token.

C chunk tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class FusedChosenAndEntropy(torch.autograd.Function):
    """Logits [C, V] and targets [C] to the log-probability of each target and the entropy, float32 [C] each."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over the logits."""
        logprobs_C, entropy_C, normalizer_C = _compiled(values)(logits_CV, targets_C, temperature)
        ctx.save_for_backward(logits_CV, targets_C, entropy_C, normalizer_C)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_C, entropy_C

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's own
        grad_logprobs_C: torch.Tensor | None,
        grad_entropy_C: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, None, None]:
        """Another pass."""
        logits_CV, targets_C, entropy_C, normalizer_C = ctx.saved_tensors
        if grad_logprobs_C is None:
            grad_logprobs_C = torch.zeros_like(entropy_C)
        given = (logits_CV, targets_C, entropy_C, normalizer_C, grad_logprobs_C, grad_entropy_C, ctx.temperature)
        return _compiled(gradient)(*given), None, None


def values(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the targets' log-probabilities, the entropies, and the logarithm of each row's sum of exponentials."""
    scaled_CV = logits_CV.float() / temperature
    normalizer_C = scaled_CV.logsumexp(dim=-1)
    logprobs_C = scaled_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1) - normalizer_C
    mean_C = ((scaled_CV - normalizer_C.unsqueeze(-1)).exp() * scaled_CV).sum(dim=-1)
    return logprobs_C, normalizer_C - mean_C, normalizer_C


def gradient(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    entropy_C: torch.Tensor,
    normalizer_C: torch.Tensor,
    grad_logprobs_C: torch.Tensor,
    grad_entropy_C: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient of the logits, [C, V] in their dtype.

    With p the probabilities, T the temperature, H the entropy: d logp(target) / d logits = (onehot(target) - p) / T, and
    d H / d logits = -p (log p + H) / T.
    """
    logprobs_CV = logits_CV.float() / temperature - normalizer_C.unsqueeze(-1)
    weight_CV = grad_logprobs_C.unsqueeze(-1)
    if grad_entropy_C is not None:
        weight_CV = weight_CV + (logprobs_CV + entropy_C.unsqueeze(-1)) * grad_entropy_C.unsqueeze(-1)
    is_target_CV = torch.arange(logits_CV.shape[-1], device=logits_CV.device) == targets_C.unsqueeze(-1)
    grad_CV = torch.where(is_target_CV, grad_logprobs_C.unsqueeze(-1), 0.0) - logprobs_CV.exp() * weight_CV
    return (grad_CV / temperature).to(logits_CV.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
