import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from asyncrl.errors import ConfigError
from asyncrl.models.causal import check_head
from asyncrl.models.logprobs import use_float32_head
from tests.contract.engine_cases import make_model


def test_an_output_layer_that_is_not_linear_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16, eos_token_id=0))
    model.set_output_embeddings(torch.nn.Sequential(model.lm_head))
    with pytest.raises(ConfigError, match=r"model.fp32_head: .* Sequential"):
        use_float32_head(model)


class RoundsByRows(torch.nn.Linear):
    """An output layer whose last digits depend on the number of rows, as those of 16-bit products on a CPU do."""

    def forward(self, hidden):
        logits = super().forward(hidden)
        return logits + 0.01 * (logits.shape[-2] % 2) * torch.arange(logits.shape[-1])


def test_an_output_layer_whose_rounding_depends_on_the_number_of_rows_is_no_scaling():
    model = make_model(0)
    head = model.lm_head
    model.lm_head = RoundsByRows(head.in_features, head.out_features, bias=False)
    model.lm_head.weight = head.weight
    check_head(model)
