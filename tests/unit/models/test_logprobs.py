"""Memory of log-probabilities; their values are in tests/golden, their gradients in tests/unit/learner/step."""

import torch

from asyncrl.models.logprobs import token_logprobs


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
