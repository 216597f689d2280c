"""Memory of log-probabilities; their values are in tests/golden, their gradients in tests/unit/learner/step.

The two passes of the fused ones are those made step by step; tests/gpu compares the compiled ones.
"""

import pytest
import torch

from asyncrl.models import logprobs as module
from asyncrl.models.logprobs import fused_gradient, fused_values, token_logprobs


class Head(torch.nn.Linear):
    """An output layer that notes how many positions it saw at once."""

    def __init__(self, hidden, vocabulary):
        super().__init__(hidden, vocabulary, bias=False, dtype=torch.float64)
        self.seen = []

    def forward(self, hidden):
        self.seen.append(len(hidden))
        return super().forward(hidden)


def test_no_more_than_a_chunk_of_logits_is_ever_kept():
    hidden, targets, head = torch.randn(50, 8).double().requires_grad_(), torch.randint(0, 200, (50,)), Head(8, 200)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = token_logprobs(hidden, targets, head, temperature=1.0, chunk_tokens=10)
    assert max(kept) < 10 * 200, "a chunk's logits outlived its forward"
    logprobs.sum().backward()
    assert head.seen == [10] * 10, "five chunks, each forward and once more in the backward"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_values_and_gradient_are_those_made_step_by_step(temperature, entropy_weight):
    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(16, 50), torch.randn(7, 16), torch.randint(0, 50, (7,))
    weights, logits = torch.randn(7), head(hidden)
    options = {"temperature": temperature, "chunk_tokens": 8, "entropy_gradient": True}
    logprobs, entropy = token_logprobs(hidden, targets, lambda _: logits, **options)
    (expected,) = torch.autograd.grad((logprobs * weights).sum() + entropy_weight * entropy.sum(), logits)
    ours, our_entropy, normalizer = fused_values(logits.detach(), targets, temperature)
    torch.testing.assert_close(ours, logprobs.detach())
    torch.testing.assert_close(our_entropy, entropy.detach())
    grad_entropy = torch.full((7,), entropy_weight) if entropy_weight else None
    grad = fused_gradient(logits.detach(), targets, our_entropy, normalizer, weights, grad_entropy, temperature)
    torch.testing.assert_close(grad, expected)


def test_chunks_of_compiled_kernels_have_equal_parts(monkeypatch):
    """A last chunk of one position would compile the kernels again."""
    monkeypatch.setattr(module, "_compiled", lambda function: function)
    hidden, targets, head = torch.randn(257, 8).double(), torch.randint(0, 20, (257,)), Head(8, 20)
    fused, _ = token_logprobs(hidden, targets, head, temperature=1.0, chunk_tokens=128, fused=True)
    plain, _ = token_logprobs(hidden, targets, head, temperature=1.0, chunk_tokens=128)
    assert head.seen[:3] == [86, 86, 85]
    torch.testing.assert_close(fused, plain, check_dtype=False, atol=1e-5, rtol=1e-5)
