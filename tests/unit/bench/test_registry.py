from __future__ import annotations

import pytest

from asyncrl.bench.registry import run_benchmark
from asyncrl.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nonsense", {}, "no benchmark 'nonsense'; there are transport"),
        ("packing", {"engine": "vllm"}, "benchmark 'packing' takes no --engine"),
        ("engine", {"engine": "abacus"}, "measures 'transformers' and 'vllm', not 'abacus'"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(name, options, said):
    with pytest.raises(ConfigError, match=said):
        run_benchmark(name, **options)
