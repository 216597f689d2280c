import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from asyncrl.generate.transformers.weight_loader import WeightsInPlace

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def models():
    """Two of one shape, with a persistent buffer: what a router adds to its scores."""
    config = Glm4MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=5, first_k_dense_replace=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)


def test_new_weights_are_the_parameters_and_buffers_stay_even_in_deep_sleep(models) -> None:
    running, trained = models
    running.get_buffer(BIAS).fill_(3.0)
    weights = WeightsInPlace(running)
    weights.leave(2)
    weights.come_back()
    weights.load(dict(trained.named_parameters()))
    assert all(torch.equal(running.get_parameter(name), tensor) for name, tensor in trained.named_parameters())
    assert torch.equal(running.get_buffer(BIAS), torch.full((3,), 3.0))
