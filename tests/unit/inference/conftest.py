"""Tiny policies and reward models: what the inference tests share."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from asyncrl.schema.samples import InferRequest, ids_to_bytes

VOCABULARY = 29


TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "eos_token_id": 1, "pad_token_id": 1, "bos_token_id": None,
    "num_labels": 1,
}  # fmt: skip


def save_model(folder, made=LlamaForSequenceClassification, **changes):
    torch.manual_seed(0)
    model = made(LlamaConfig(**(TINY | changes)))
    model.save_pretrained(folder)
    return model.eval()


def request(prompt, response, group_id=0, index=0, **rest):
    return InferRequest(group_id, index, 0, ids_to_bytes(list(prompt)), ids_to_bytes(list(response)), **rest)


def random_requests(count=12, seed=0, group_size=3, most=12):
    """Groups with a common prompt each; some responses end in the id that is both padding and end."""
    rng = np.random.default_rng(seed)
    requests = []
    for at in range(count):
        if at % group_size == 0:
            prompt = rng.integers(2, VOCABULARY, rng.integers(1, most))
        response = rng.integers(2, VOCABULARY, rng.integers(1, most))
        if at % 2:
            response = [*response, 1]
        requests.append(request(prompt, response, at // group_size, at % group_size))
    return requests


@pytest.fixture
def folder(tmp_path):
    """A run's folder, with its policy and a reward model."""
    save_model(tmp_path / "model", LlamaForCausalLM)
    save_model(tmp_path / "judge")
    return tmp_path


@pytest.fixture
def kit():
    return SimpleNamespace(tiny=TINY, save_model=save_model, request=request, random_requests=random_requests)
