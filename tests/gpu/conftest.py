"""What is here needs an accelerator; where there is none, it is reported as not run."""

from pathlib import Path

import pytest
import torch

from tests.contract.engine_cases import make_model

MARKS = (
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch warns of its own code on a GPU
    pytest.mark.skipif(not torch.cuda.is_available(), reason="not run on a GPU: there is none here"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for mark in MARKS:
                item.add_marker(mark)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a model of four layers."""
    make_model(0, hidden_size=64, num_hidden_layers=4).save_pretrained(tmp_path / "model")
    return tmp_path / "model"
