"""What the tests of this folder share: folders with small models."""

from pathlib import Path

import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from asyncrl.learner.model.policy import character_tokenizer
from tests.contract.engine_cases import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(0, hidden_size=8, num_hidden_layers=1).save_pretrained(path)
    character_tokenizer("+=0123").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def longrope_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions, of which only sequences over 16 tokens need the long factors."""
    path = tmp_path_factory.mktemp("longrope")
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0,
        max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters={"rope_type": "longrope", **factors},
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(path)
    return path
