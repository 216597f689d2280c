"""The metric table: unknown names are found, the document says the same, and every name in the package is a row of it."""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path

import asyncrl
from asyncrl.observe.metrics import METRICS, finite, unknown_names

DOCUMENT = Path(__file__).parents[3] / "docs" / "observability.md"
PACKAGE = Path(asyncrl.__file__).parent
STAGES = {name.partition("/")[0] for name in METRICS}
NAME = re.compile(rf"(?:{'|'.join(sorted(STAGES))})/[a-z_0-9/]+\*?")


def test_members_of_a_family_are_known_and_strangers_are_not() -> None:
    names = ["dropped/too_old", "staleness/histogram/3", "reward_part/format", "reward/mena", "dropped/", "nothing"]
    assert unknown_names(names) == ["dropped/", "nothing", "reward/mena"]


def test_document_holds_the_table() -> None:
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS.values()]
    table = "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows])
    assert table in DOCUMENT.read_text(encoding="utf-8"), f"docs/observability.md is to have\n{table}"


def test_values_that_json_cannot_say_are_left_out() -> None:
    assert finite({"kl/mean": 1.0, "kl/max": math.inf, "reward/mean": math.nan}) == {"kl/mean": 1.0}


def names_in(source: str) -> Iterator[str]:
    """Yield the strings that look like metric names; f-strings whose beginning is that of a row are left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        is_made = isinstance(node, ast.JoinedStr) and any(name.startswith(text.partition("x")[0]) for name in METRICS)
        if NAME.fullmatch(text) and not text.endswith("/") and not is_made:
            yield text


def test_names_in_code_are_in_the_table() -> None:
    strangers = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "metrics.py" and (unknown := unknown_names(names_in(path.read_text(encoding="utf-8")))):
            strangers[str(path.relative_to(PACKAGE))] = unknown
    assert not strangers, f"add rows to observe/metrics.py for {strangers}"


MADE = re.compile(
    r".*_by_staleness/\*|(reward|advantage)/(mean|std|max|min)|bias/.*_(low|high)|eval/accuracy|(dropped|failed|deaths)/\*"
    r"|placement/\w+_s"
)
"""Names that code puts together from parts."""


def test_every_row_of_the_table_is_written_by_somebody() -> None:
    rows = {name.removesuffix("*") for name in METRICS if not MADE.fullmatch(name)}
    readers = {PACKAGE / "observe" / name for name in ("metrics.py", "alarms.py")}
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path not in readers)
    assert not [name for name in sorted(rows) if name not in code], "nobody writes these; an alarm over one is never raised"
