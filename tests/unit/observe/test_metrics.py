"""The metric table: unknown names are found, the document says the same."""

import math
from pathlib import Path

from asyncrl.observe.metrics import METRICS, finite, unknown_names

DOCUMENT = Path(__file__).parents[3] / "docs" / "observability.md"


def test_members_of_a_family_are_known_and_strangers_are_not() -> None:
    names = ["dropped/too_old", "staleness/histogram/3", "reward_part/format", "reward/mena", "dropped/", "nothing"]
    assert unknown_names(names) == ["dropped/", "nothing", "reward/mena"]


def test_document_holds_the_table() -> None:
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS.values()]
    table = "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows])
    assert table in DOCUMENT.read_text(encoding="utf-8"), f"docs/observability.md is to have\n{table}"


def test_values_that_json_cannot_say_are_left_out() -> None:
    assert finite({"kl/mean": 1.0, "kl/max": math.inf, "reward/mean": math.nan}) == {"kl/mean": 1.0}
