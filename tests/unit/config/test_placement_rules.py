"""What placements refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError
from tests.builders import laid_over

SHARED = {"medium": {"kind": "shared_storage"}}


def settings(kind: str, **overrides: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {"placement": {"kind": kind}, "buffer": {"max_staleness": 1}}
    if kind == "hybrid":
        raw["broadcast"] = SHARED
    return laid_over(raw, overrides)


@pytest.mark.parametrize(
    ("kind", "overrides", "said"),
    [
        ("colocated", {"learner__kind": "external"}, "learner.kind 'external'"),
        ("hybrid", {"learner__ranks": 2}, "no rank with all of them: set learner.ranks = 1"),
        ("colocated", {"learner__ranks": 2, "learner__device": "cuda"}, "one device and learner.ranks = 2 .* has 2"),
        ("colocated", {"generate__in_flight_updates": False}, "generate.in_flight_updates = true"),
        ("colocated", {"buffer__max_staleness": 2}, "set 0 .* or 1"),
        ("colocated", {"generate__engine": {"kind": "vllm"}}, "generate.engine.sleep = true"),
        ("colocated", {"learner__device": "cuda"}, "set both to the same"),
        ("colocated", {"broadcast": SHARED}, 'only placement.kind "hybrid"'),
        ("hybrid", {"generate__engine": {"kind": "fake"}}, '"transformers", or placement.kind = "colocated"'),
        ("hybrid", {"learner__dtype": "bfloat16"}, "set both to the same"),
        ("hybrid", {"learner__lora": {}}, "leave out learner.lora"),
        ("hybrid", {"broadcast": {"medium": {"kind": "files"}}}, 'set "shared_storage"'),
        ("hybrid", {"broadcast": {**SHARED, "delta": {}}}, "leave out broadcast.delta"),
    ],
)
def test_what_does_not_go_together_is_named_with_what_to_write(kind: str, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(settings(kind, **overrides))
