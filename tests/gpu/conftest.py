"""What is here needs an accelerator; where there is none, it is reported as not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
