"""Log-probabilities by a library's kernel: liger-kernel's fused linear cross-entropy, on CUDA.

It never holds the logits of all tokens, and its per-token losses take any upstream gradient (a policy loss weighs each token).
Liger before 0.8.5 gave wrong gradients there without a word (its pull request 1298), so older ones are refused.
cut-cross-entropy was the other candidate: its gradients are right too, but in bfloat16 and float16 only.

It has no entropy: that comes from chunks of logits, without gradient, for one more forward of the output layer. The temperature
divides the hidden states (and the bias), in their dtype: outside float32 that rounds once more than dividing logits. Called by
learner/model.py. The only place that imports liger_kernel.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version

from asyncrl.errors import ConfigError
from asyncrl.models.logprobs import token_logprobs
from asyncrl.models.output_layer import Float32Head

OLDEST_LIGER = "0.8.5"
_NO_TARGET = -100


def fused_logprobs(
    hidden: torch.Tensor, target_ids: torch.Tensor, head: torch.nn.Module, *, temperature: float, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and (detached) entropy at each position, as `token_logprobs` does.

    Args:
        hidden: float [M, D], on CUDA.
        target_ids: int64 [M].
        head: A linear output layer.
        temperature: Divides the logits.
        chunk_tokens: Of the entropy.

    Raises:
        ConfigError: Not on CUDA, or the library is missing or too old.
    """
    if hidden.device.type != "cuda":
        raise ConfigError(f"learner.logprobs = 'fused' runs on CUDA, the learner is on {hidden.device.type}: set 'chunked'")
    with torch.no_grad():
        _, entropy = token_logprobs(hidden, target_ids, head, temperature=temperature, chunk_tokens=chunk_tokens)
    return fused_chosen(hidden, target_ids, head, temperature), entropy


def fused_chosen(hidden: torch.Tensor, target_ids: torch.Tensor, head: torch.nn.Module, temperature: float) -> torch.Tensor:
    """Return float32 [M], the log-probability of each target, by the kernel alone (wherever triton runs)."""
    weight: Any = head.weight
    bias: Any = head.bias
    if isinstance(head, Float32Head):
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    if temperature != 1.0:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    losses: torch.Tensor = _kernel().apply(
        hidden, weight, target_ids, bias, None, _NO_TARGET, 0.0, 0.0, "none", None, False, torch.float32
    )[0]
    return -losses.float()


@cache
def _kernel() -> Any:  # noqa: ANN401 - untyped, and not installed everywhere
    advice = f"learner.logprobs = 'fused' needs liger-kernel {OLDEST_LIGER} or newer: pip install 'asyncrl[fused]'"
    try:
        module = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError as error:
        raise ConfigError(f"{advice}, or set learner.logprobs = 'chunked' ({error})") from error
    if Version(version("liger-kernel")) < Version(OLDEST_LIGER):
        raise ConfigError(f"{advice}; {version('liger-kernel')} is installed, whose per-token gradients are wrong")
    return module.LigerFusedLinearCrossEntropyFunction
