import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.returns import overlong_penalty


def slow_penalty(length, max_tokens, buffer_tokens):
    """DAPO's equation 13, case by case."""
    if length <= max_tokens - buffer_tokens:
        return 0.0
    if length <= max_tokens:
        return ((max_tokens - buffer_tokens) - length) / buffer_tokens
    return -1.0


@given(length=st.integers(0, 50), max_tokens=st.integers(1, 30), buffer_tokens=st.integers(1, 30))
def test_the_penalty_is_that_of_the_paper(length, max_tokens, buffer_tokens):
    assert overlong_penalty(length, max_tokens, buffer_tokens) == pytest.approx(slow_penalty(length, max_tokens, buffer_tokens))


@pytest.mark.parametrize("module", ["advantages", "returns"])
def test_what_runs_without_tensors_imports_no_torch(module):
    code = f"import sys, asyncrl.algorithms.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
