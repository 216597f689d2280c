"""Components on a real GPU: bits, bytes given back to the driver, and moves against bare copies."""

import gc

import pytest
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import PlacementConfig
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.residency.components import ResidencyManager, TensorComponent
from asyncrl.residency.device import CudaDevice
from asyncrl.residency.plan import PhaseNeeds
from benchmarks.workload import smollm2_model

NAMES = ("policy", "policy optimizer")
PHASES = (PhaseNeeds("rollout", gives_back=True), PhaseNeeds("train", now=NAMES))


@pytest.fixture
def device():
    gc.collect()
    torch.cuda.empty_cache()  # what lives beside other tests' leftovers in one piece cannot be given back
    return CudaDevice(torch.device("cuda"))


def trained(device, dtype):
    """A model after one step, and its optimizer."""
    model = smollm2_model(dtype).to(device.kind)
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    config = LearnerConfig(device="cuda", dtype=next(name for name, one in names.items() if one == dtype), warmup_steps=0)
    optimizer = PolicyOptimizer(model.named_parameters(), config, 10)
    step(model, optimizer, 0)
    return model, optimizer


def step(model, optimizer, number):
    ids = torch.arange(2, 66, device="cuda")[None]
    optimizer.backward(torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1].float(), ids[0, 1:]))
    optimizer.clip()
    optimizer.step(number)


def manager_of(device, folder, model, optimizer, offload_to="host"):
    components = [
        TensorComponent.of_module("policy", model, device, folder),
        TensorComponent(NAMES[1], device, optimizer.state_tensors, folder),
    ]
    return ResidencyManager(PlacementConfig(offload_to=offload_to), folder, "learner", components, PHASES, device, SystemClock())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload_to", ["host", "disk"])
def test_a_switch_gives_the_memory_to_the_driver_and_brings_every_bit_back(device, tmp_path, dtype, offload_to):
    model, optimizer = trained(device, dtype)
    manager = manager_of(device, tmp_path, model, optimizer, offload_to)
    tensors = [*model.parameters(), *(tensor for _, tensor in optimizer.state_tensors())]
    before = [tensor.detach().cpu().clone() for tensor in tensors]
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    left = manager.switch("rollout", 0)
    total = sum(move.num_bytes for move in left.moves)
    assert torch.cuda.mem_get_info()[0] - free > 0.9 * total
    with manager.readable():
        assert all(torch.equal(tensor.detach().cpu(), old) for tensor, old in zip(model.parameters(), before, strict=False))
    manager.switch("train", 1)
    assert all(torch.equal(tensor.detach().cpu(), old) for tensor, old in zip(tensors, before, strict=True))
    step(model, optimizer, 1)
    manager.close()
    assert any(not torch.equal(tensor.detach().cpu(), old) for tensor, old in zip(tensors, before, strict=True))
