"""Published numbers (numbers/README.md), and how close to them is close enough."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

NUMBERS = Path(__file__).parent / "numbers"
TOLERANCE = {"float64": {"rtol": 1e-6, "atol": 1e-8}, "float32": {"rtol": 2e-5, "atol": 2e-6}, "int": {"rtol": 0, "atol": 0}}

Case = dict[str, Any]


def cases(family: str, wanted: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """Return the family's cases as parameters, each with its name."""
    loaded = json.loads((NUMBERS / f"{family}.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in loaded if wanted(case)]


def matrix(case: Case, name: str) -> torch.Tensor:
    """Return one input."""
    return torch.tensor(case["inputs"][name], dtype=torch.float64)


def assert_close(case: Case, name: str, got: Any, dtype: str = "") -> None:
    """Compare one output, number by number, with what was published."""
    expected = np.asarray(case["expected"][name], dtype=np.float64)
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else got
    got = np.asarray(got, dtype=np.float64).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, **TOLERANCE[dtype or case["dtype"]], err_msg=name)
