"""Flash attention over a row's runs has the values and gradients of the buckets, which never hold all scores."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.models.attention import build_layout, on_device, packed_attention


def sequences(num_groups: int, size: int) -> tuple[list[np.ndarray], int]:
    """Groups that share their prompts, all of which begin alike; and how many tokens there are."""
    rng, made, num_tokens = np.random.default_rng(0), [], 0
    for _ in range(num_groups):
        prompt = np.arange(0)
        for member in range(size):
            shared = prompt if member else made[0][:16] if made else prompt
            new = int(rng.integers(1, 90)) + (0 if member else 40)
            own = np.concatenate([shared, np.arange(num_tokens, num_tokens + new)])
            prompt = prompt if member else own[:50]
            made.append(own)
            num_tokens += new
    return made, num_tokens


@pytest.mark.parametrize(("size", "window"), [(4, None), (1, None), (4, 20)])
def test_flash_attention_over_runs_is_that_of_the_buckets(size, window):
    made, num_tokens = sequences(5, size)
    runs = on_device(build_layout(made, num_tokens), torch.device("cuda"))
    assert runs.runs is not None
    buckets = replace(runs, runs=None)
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, num_tokens, 64, device="cuda") for heads in (6, 2, 2)]
    weights = torch.randn(1, num_tokens, 6, 64, device="cuda")
    found = []
    for dtype, layout in ((torch.float32, buckets), (torch.bfloat16, buckets), (torch.bfloat16, runs)):
        own = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        output, _ = packed_attention(torch.nn.Identity(), *own, None, packed_layout=layout, sliding_window=window)
        gradients = torch.autograd.grad((output.float() * weights).sum(), own)
        found.append([output.detach().float(), *(gradient.float() for gradient in gradients)])
    exact, rounded, flash = found
    for right, one, other in zip(exact, rounded, flash, strict=True):
        assert (other - right).abs().max() <= 2 * (one - right).abs().max() + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
def test_heads_that_share_keys_are_not_attended_by_way_of_all_scores(dtype, window):
    num_tokens = 4096
    inputs = [torch.randn(1, heads, num_tokens, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (16, 4, 4)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, _ = packed_attention(torch.nn.Identity(), *inputs, None, sliding_window=window)
    output.sum().backward()
    scores_bytes = 16 * num_tokens**2 * output.element_size()
    assert torch.cuda.max_memory_allocated() - before < scores_bytes / 2
