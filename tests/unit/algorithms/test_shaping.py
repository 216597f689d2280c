import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.shaping import overlong_penalty, overlong_penalty_unfloored


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


@pytest.mark.parametrize(("length", "penalty"), [(11, 0.0), (12, 0.0), (15, -0.5), (18, -1.0), (21, -1.0)])
def test_it_falls_over_the_buffer_and_stops_at_the_limit(length, penalty):
    assert overlong_penalty(length, max_tokens=18, buffer_tokens=6) == penalty


@pytest.mark.parametrize(("length", "penalty"), [(11, 0.0), (12, 0.0), (15, -0.5), (18, -1.0), (21, -1.5)])
def test_without_its_floor_it_goes_on_falling(length, penalty):
    assert overlong_penalty_unfloored(length, max_tokens=18, buffer_tokens=6) == penalty


def test_an_answer_within_the_limit_is_not_marked_by_a_negative_zero():
    assert str(overlong_penalty(3, 18, 6)) == "0.0"


@pytest.mark.parametrize("module", ["shaping", "advantages", "returns"])
def test_what_runs_without_tensors_imports_no_torch(module):
    code = f"import sys, asyncrl.algorithms.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
