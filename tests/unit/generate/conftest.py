"""What the tests of this folder share: a folder with a small model."""

from pathlib import Path

import pytest

from tests.contract.engine_cases import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(0, hidden_size=8, num_hidden_layers=1).save_pretrained(path)
    return path
