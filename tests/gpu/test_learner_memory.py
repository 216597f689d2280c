"""The learner's ways to save memory that need a GPU, or are different code there: fused logprobs, pinned and paged optimizers."""

import math

import pytest
import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.ranks.fsdp import save_whole
from asyncrl.models.causal import DTYPES
from asyncrl.models.logprobs import Float32Head, token_logprobs

DEVICE = "cuda"
SECOND = pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: there is one GPU"))
NUM_STEPS = 5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("dtype", "fp32_head", "tolerance"), [("float32", False, 1e-4), ("bfloat16", True, 1e-4), ("bfloat16", False, 5e-2)]
)
def test_fused_logprobs_have_the_values_and_gradients_of_chunked_ones(dtype, fp32_head, tolerance, temperature):
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 3000, device=DEVICE).to(getattr(torch, dtype))
    head = Float32Head(layer) if fp32_head else layer
    hidden = torch.randn(300, 128, device=DEVICE).to(layer.weight.dtype).requires_grad_()
    targets, weights = torch.randint(0, 3000, (300,), device=DEVICE), torch.randn(300, device=DEVICE)
    results = []
    for fused in (True, False):
        logprobs, entropy = token_logprobs(hidden, targets, head, temperature=temperature, chunk_tokens=64, fused=fused)
        gradients = torch.autograd.grad((logprobs * weights).sum(), [hidden, *head.parameters()])
        results.append((logprobs.detach(), entropy.detach(), *gradients))
    for one, chunked in zip(*results, strict=True):
        scale = chunked.float().abs().max().item()
        torch.testing.assert_close(one.float(), chunked.float(), rtol=tolerance, atol=tolerance * scale)


def weights_after(dtype: str, device: str = DEVICE, **learner) -> dict[str, torch.Tensor]:
    """Parameters after a few steps of gradients that are the same for every optimizer, and that come late."""
    config = LearnerConfig(dtype=dtype, device=device, learning_rate=1e-3, warmup_steps=0, **learner)
    torch.manual_seed(0)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, device=device).to(DTYPES[dtype]))
        for name, shape in {"matrix": (512, 1024), "tall": (4096, 64), "norm": (512,)}.items()
    }
    optimizer = PolicyOptimizer(parameters.items(), config, NUM_STEPS)
    for step in range(NUM_STEPS):
        for _ in range(2):  # micro-batches
            losses = [(parameter * torch.randn_like(parameter)).sum(dtype=torch.float32) for parameter in parameters.values()]
            optimizer.backward(1e-2 * torch.stack(losses).sum())  # small enough that float16's first scale overflows nothing
        assert math.isfinite(optimizer.clip())
        with torch.cuda.device(device):
            torch.cuda._sleep(20_000_000)  # cycles, about 10 ms: what does not wait for the gradients' copies reads others
        optimizer.step(step)
    return {name: parameter.detach().float().cpu() for name, parameter in parameters.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("device", [DEVICE, SECOND])
def test_an_offloaded_optimizer_arrives_where_the_device_s_own_does(dtype, optimizer, device):
    own, offloaded = (weights_after(dtype, device, optimizer=optimizer, offload_optimizer=offload) for offload in (False, True))
    ulp = torch.finfo(DTYPES[dtype]).eps
    atol = 1e-5 if optimizer == "adamw" else 1e-3
    for name, tensor in own.items():
        named = {"msg": lambda found, name=name: f"{name}: {found}"}
        torch.testing.assert_close(offloaded[name], tensor, rtol=2 * ulp, atol=atol, **named)


def test_a_paged_optimizer_arrives_where_the_unpaged_one_does():
    plain, paged = (weights_after("bfloat16", optimizer=name) for name in ("adamw_8bit", "paged_adamw_8bit"))
    for name, tensor in plain.items():
        torch.testing.assert_close(paged[name], tensor, rtol=0.0, atol=1e-3, msg=lambda found, name=name: f"{name}: {found}")


def test_a_paged_optimizer_s_state_is_saved_and_goes_on_to_the_same_bits(tmp_path):
    config = LearnerConfig(optimizer="paged_adamw_8bit", device=DEVICE, learning_rate=1e-2, warmup_steps=0)
    torch.manual_seed(0)
    start, gradients = torch.randn(512, 512, device=DEVICE), torch.randn(4, 512, 512, device=DEVICE)
    whole = torch.nn.Parameter(start.clone())
    stepper = PolicyOptimizer([("p", whole)], config, 10)
    for step in range(4):
        if step == 2:
            save_whole(stepper.named_state(), tmp_path / "state")
            resumed = torch.nn.Parameter(whole.detach().clone())
        whole.grad = gradients[step].clone()
        stepper.step(step)
    again = PolicyOptimizer([("p", resumed)], config, 10)
    again.load(tmp_path / "state")
    for step in (2, 3):
        resumed.grad = gradients[step].clone()
        again.step(step)
    assert torch.equal(whole, resumed)
