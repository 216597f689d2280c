import asyncio
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.generate.transformers.weight_loader import WeightsInPlace
from tests.contract.engine_cases import config_of

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def models():
    """Two of one shape, with a persistent buffer: what a router adds to its scores."""
    config = Glm4MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=5, first_k_dense_replace=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)


def test_new_weights_are_the_parameters_and_buffers_stay_over_a_sleep(models) -> None:
    running, trained = models
    running.get_buffer(BIAS).fill_(3.0)
    weights = WeightsInPlace(running)
    weights.leave()
    weights.come_back()
    weights.load(dict(trained.named_parameters()))
    assert all(torch.equal(running.get_parameter(name), tensor) for name, tensor in trained.named_parameters())
    assert torch.equal(running.get_buffer(BIAS), torch.full((3,), 3.0))


async def test_a_start_that_is_cancelled_at_any_point_leaves_no_thread(folder):
    """An exception that ended it would be a warning, and so fail this."""
    for delay_s in (0.0, 0.001, 0.01, 0.1):
        before, engine = set(threading.enumerate()), TransformersEngine(config_of(2), folder)
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(engine.start())
            await asyncio.sleep(delay_s)
            starting.cancel()
        if not starting.cancelled():
            await engine.close()
        assert [thread for thread in threading.enumerate() if thread.name == "decode" and thread not in before] == []
