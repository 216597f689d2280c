import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import ConfigError
from asyncrl.models.adapters import add_adapters
from tests.contract.engine_cases import make_model

IDS = torch.arange(16)[None]


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_seed_decides_the_values_whatever_the_dtype_and_the_random_state():
    first, second, other = make_model(0), make_model(0).bfloat16(), make_model(0)
    add_adapters(first, LoRAConfig(rank=4), seed=1)
    torch.manual_seed(99)
    add_adapters(second, LoRAConfig(rank=4), seed=1)
    add_adapters(other, LoRAConfig(rank=4), seed=2)
    pairs = list(zip(trainable(first).values(), trainable(second).values(), trainable(other).values(), strict=True))
    assert all(torch.equal(one.bfloat16(), two) for one, two, _ in pairs)
    assert any(not torch.equal(one, three) for one, _, three in pairs)


def test_layers_that_are_not_linear_modules_but_act_so_get_them_too():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, eos_token_id=0)).eval()
    before = model(IDS).logits
    add_adapters(model, LoRAConfig(rank=2), seed=0)
    assert torch.equal(model(IDS).logits, before)
    assert len(trainable(model)) == 2 * 4


def test_a_name_that_no_layer_has_is_refused():
    with pytest.raises(ConfigError, match=r"\['v_porj'\]: no linear layer of this model has that name; \['q_proj'\] were found"):
        add_adapters(make_model(0), LoRAConfig(target_modules=("q_proj", "v_porj")), seed=0)
