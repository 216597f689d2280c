"""The two passes of the fused log-probabilities are those made step by step; tests/gpu compares the compiled ones."""

import pytest
import torch

from asyncrl.models.fused import gradient, values
from asyncrl.models.logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_values_and_gradient_are_those_made_step_by_step(temperature, entropy_weight):
    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(16, 50), torch.randn(7, 16), torch.randint(0, 50, (7,))
    weights, logits = torch.randn(7), head(hidden)
    options = {"temperature": temperature, "chunk_tokens": 8, "entropy_gradient": True}
    logprobs, entropy = token_logprobs(hidden, targets, lambda _: logits, **options)
    (expected,) = torch.autograd.grad((logprobs * weights).sum() + entropy_weight * entropy.sum(), logits)
    ours, our_entropy, normalizer = values(logits.detach(), targets, temperature)
    torch.testing.assert_close(ours, logprobs.detach())
    torch.testing.assert_close(our_entropy, entropy.detach())
    grad_entropy = torch.full((7,), entropy_weight) if entropy_weight else None
    grad = gradient(logits.detach(), targets, our_entropy, normalizer, weights, grad_entropy, temperature)
    torch.testing.assert_close(grad, expected)
