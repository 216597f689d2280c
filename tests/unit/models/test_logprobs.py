import pytest
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


@pytest.fixture
def case():
    torch.manual_seed(0)
    hidden = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randint(0, 200, (50,)), Head(8, 200)


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_chunks_change_neither_values_nor_gradients(case, chunk, temperature, entropy_gradient):
    hidden, targets, head = case
    table = (head(hidden) / temperature).log_softmax(-1)
    plain = table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)
    weight = 1.0 if entropy_gradient else 0.0
    expected = torch.autograd.grad(plain[0].sin().sum() + weight * plain[1].cos().sum(), [hidden, head.weight])
    got = token_logprobs(hidden, targets, head, temperature=temperature, chunk_tokens=chunk, entropy_gradient=entropy_gradient)
    loss = got[0].sin().sum() + (got[1].cos().sum() if entropy_gradient else 0.0)
    gradients = torch.autograd.grad(loss, [hidden, head.weight])
    for one, other in zip((*got, *gradients), (*plain, *expected), strict=True):
        torch.testing.assert_close(one, other)


def test_no_more_than_a_chunk_of_logits_is_ever_kept(case):
    hidden, targets, head = case
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = token_logprobs(hidden, targets, head, temperature=1.0, chunk_tokens=10)
    assert max(head.seen) == 10
    assert max(kept) < 10 * 200, "a chunk's logits outlived its forward"
    logprobs.sum().backward()
    assert max(head.seen) == 10
    assert len(head.seen) == 10, "five chunks, each forward and once more in the backward"
