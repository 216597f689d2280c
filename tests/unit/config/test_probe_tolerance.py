"""How far apart a probe may be follows the number formats of learner and engine."""

import pytest

from asyncrl.config.load import parse_config


@pytest.mark.parametrize(
    ("learner", "engine", "told", "expected"),
    [
        ("float32", "float32", {}, 0.05),
        ("bfloat16", "float32", {}, 1.0),
        ("float32", "bfloat16", {}, 1.0),
        ("auto", "float32", {}, 1.0),
        ("bfloat16", "bfloat16", {"probe_tolerance": 0.0}, 0.0),
    ],
)
def test_the_tolerance_of_a_probe(learner, engine, told, expected):
    generate = {"engine": {"kind": "transformers", "dtype": engine}}
    assert parse_config({"learner": {"dtype": learner}, "generate": generate, "broadcast": told}).probe_tolerance == expected
