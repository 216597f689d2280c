"""Estimates against real models and optimizers."""

import pytest
import torch

from asyncrl.config.learner import LearnerConfig, LoRAConfig, ScratchModel
from asyncrl.control.tools.memory import policy_shape
from asyncrl.learner.model.policy import DTYPES, build_scratch
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.models.adapters import add_adapters
from asyncrl.models.memory import trained_parts

SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
ALPHABET = "0123456789+="


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("modules", [(), ("q_proj", "down_proj")])
def test_adapters_are_those_that_are_added(modules):
    scratch, lora = ScratchModel(**SIZES), LoRAConfig(rank=4, target_modules=modules)
    model, _ = build_scratch(scratch, ALPHABET, 0)
    add_adapters(model, lora, 0)
    assert policy_shape(scratch).adapter_parameters(lora) == count(p for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("dtype", "offload", "optimizer"), [
    ("float32", False, "adamw"), ("bfloat16", True, "adamw"), ("float16", False, "adamw_8bit"), ("float32", True, "adamw_8bit"),
])  # fmt: skip
def test_state_is_that_of_the_optimizer(dtype, offload, optimizer):
    config = LearnerConfig(dtype=dtype, offload_optimizer=offload, optimizer=optimizer)
    layer = torch.nn.Linear(512, 512, bias=False, dtype=DTYPES[dtype])
    made = PolicyOptimizer(layer.named_parameters(), config, 10)
    made.backward(layer(torch.ones(1, 512, dtype=DTYPES[dtype])).float().sum())
    (master,) = made._masters.values()
    gradient = master.gradient
    held = {"weights": layer.weight.nbytes, "gradients": gradient.nbytes}
    made.clip()
    made.step(0)
    state = dict(made.named_state())
    names = ("exp_avg/", "exp_avg_sq/", "state1/", "state2/")
    moments = sum(tensor.nbytes for name, tensor in state.items() if name.startswith(names))
    masters = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("master/"))
    held |= {"masters": masters, "moments": moments}
    parts = trained_parts(layer.weight.numel(), 0, config)
    assert {part.name.split()[-1]: part.num_bytes for part in parts} == {name: size for name, size in held.items() if size}
    assert {part.place for part in parts if part.name.split()[-1] in {"masters", "moments"}} == {"host" if offload else "device"}
