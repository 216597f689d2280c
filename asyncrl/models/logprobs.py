"""Hidden states to log-probabilities: the output layer, in chunks of logits; on CUDA one kernel per pass over a chunk.

The output layer can run in float32, with the same module in learner, inference and engine. Its weights stay the model's own
parameter, in the model's dtype and tied as before, so names, checkpoints and published weights do not change; for a float32 or
float64 model the numbers do not change either.

`token_logprobs` needs no [M, V] tensor for all tokens. The head runs over chunks of tokens; if there are several, a chunk's
logits are dropped after the forward and computed again in the backward. At most one chunk of logits, its log-probabilities and
its gradient exist at any time. Arithmetic after the head is float32 (float64 for a float64 model). Where a model's
parts run one by one, `run_inside` makes them one pass over the model.

C chunk tokens, D hidden, M positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError

Head = Callable[[torch.Tensor], torch.Tensor]
"""[C, D] to logits [C, V]."""
INSIDE = "asyncrl_run_inside"
"""Attribute of a divided model: a function that runs a pass with gathered weights."""
T = TypeVar("T")


def run_inside(model: torch.nn.Module, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs parts of `model` one by one.

    Args:
        model: If the model is divided over ranks (learner/ranks/fsdp.py), its weights are gathered only while `work` runs.
        work: A pass over the model; its result is a tensor or a tuple of tensors.
    """
    run: Callable[[Callable[[], T]], T] | None = getattr(model, INSIDE, None)
    return work() if run is None else run(work)


class Float32Head(torch.nn.Module):
    """A linear output layer that multiplies in float32 (float64 if the weights are), for any dtype of the weights.

    Source: MiniMax-M1 (arXiv 2506.13585), section 3.2: the correlation of training and sampling probabilities rises from .987
    to .997. With the float32 head on one side only it is worse than without.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits."""
        return self.cast()(hidden)

    def cast(self) -> Head:
        """Return the layer with one float32 copy of its weights, for several calls.

        The gradients of these calls add up in float32 before they are cast to the weights' dtype.
        """
        weight, bias = _promoted(self.weight), None if self.bias is None else _promoted(self.bias)
        return lambda hidden: linear(_promoted(hidden), weight, bias)


def use_float32_head(model: PreTrainedModel) -> None:
    """Make the output layer of a model run in float32, in place.

    Raises:
        ConfigError: The output layer is not a plain linear layer.
    """
    layer = model.get_output_embeddings()
    if isinstance(layer, Float32Head):
        return
    if not isinstance(layer, torch.nn.Linear):
        raise ConfigError(
            f"model.fp32_head: the output layer of {type(model).__name__} is a {type(layer).__name__}, not a plain linear layer; "
            "set model.fp32_head = false"
        )
    model.set_output_embeddings(Float32Head(layer))


def _promoted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def token_logprobs(
    hidden: torch.Tensor,
    target_ids: torch.Tensor,
    head: Head,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy at each position.

    Args:
        hidden: float [M, D].
        target_ids: int64 [M].
        head: The model's output layer.
        temperature: Divides the logits; the sampling temperature of the tokens.
        chunk_tokens: Maximum number of positions whose logits exist at once.
        entropy_gradient: Whether the entropy is differentiated (if not, it is detached and costs less).
        fused: Use one kernel per pass over a chunk of logits; for CUDA.

    Returns:
        float32 [M] each (float64 for a float64 model).
    """
    head = head.cast() if isinstance(head, Float32Head) else head

    def of_chunk(hidden_CD: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        way = _FusedChosenAndEntropy if fused else _ChosenAndEntropy
        logprobs_C, entropy_C = way.apply(head(hidden_CD), targets_C, temperature)  # type: ignore[no-untyped-call]
        return logprobs_C, entropy_C if entropy_gradient else entropy_C.detach()

    if len(hidden) <= chunk_tokens:
        return of_chunk(hidden, target_ids)
    if fused:  # in equal parts: for a last one of a single position the kernels would be compiled again
        num_chunks = -(-len(hidden) // chunk_tokens)
        chunks = zip(hidden.tensor_split(num_chunks), target_ids.tensor_split(num_chunks), strict=True)
    else:
        chunks = zip(torch.split(hidden, chunk_tokens), torch.split(target_ids, chunk_tokens), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        parts = [of_chunk(*chunk) for chunk in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


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


class _FusedChosenAndEntropy(torch.autograd.Function):
    """As `_ChosenAndEntropy`, in one pass over the logits and another for their gradient, each one kernel by torch.compile.

    In that one each of some eight passes over [C, V] float32 numbers goes through the GPU's memory, which takes longer than the
    output layer itself. Here the logits in their own dtype and two numbers a token are kept for the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_C, entropy_C, normalizer_C = _compiled(fused_values)(logits_CV, targets_C, temperature)
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
        logits_CV, targets_C, entropy_C, normalizer_C = ctx.saved_tensors
        if grad_logprobs_C is None:
            grad_logprobs_C = torch.zeros_like(entropy_C)
        given = (logits_CV, targets_C, entropy_C, normalizer_C, grad_logprobs_C, grad_entropy_C, ctx.temperature)
        return _compiled(fused_gradient)(*given), None, None


def fused_values(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the targets' log-probabilities, the entropies, and the logarithm of each row's sum of exponentials."""
    scaled_CV = logits_CV.float() / temperature
    normalizer_C = scaled_CV.logsumexp(dim=-1)
    logprobs_C = scaled_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1) - normalizer_C
    mean_C = ((scaled_CV - normalizer_C.unsqueeze(-1)).exp() * scaled_CV).sum(dim=-1)
    return logprobs_C, normalizer_C - mean_C, normalizer_C


def fused_gradient(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    entropy_C: torch.Tensor,
    normalizer_C: torch.Tensor,
    grad_logprobs_C: torch.Tensor,
    grad_entropy_C: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient of the logits, [C, V] in their dtype; the formulas are those of `_ChosenAndEntropy`."""
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
