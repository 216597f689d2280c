r"""Reading a quantity as people and models write it: `1,234.50`, `$3`, `3/4`, `1 1/2`, `\frac{3}{4}`, `12 km`, `5e-3`, `50%`.

Exact arithmetic (fractions) throughout, so that tolerance is the only source of slack. A text with two numbers is no quantity.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_MAX_CHARS = 200
_MAX_EXPONENT = 400
_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_LATEX_NOISE = re.compile(r"\\[!,;:]|\\(?:left|right|displaystyle)(?![A-Za-z])")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([^{}]+?)\s*\}\s*\{\s*([^{}]+?)\s*\}")
_BOXED = re.compile(r"\\boxed\s*\{(.*)\}", re.DOTALL)
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<currency>[$€£¥])?\s*(?P<inner_sign>[-+]?)\s*"
    rf"(?:(?P<whole>\d+)\s+)?(?P<number>{_NUMBER})(?:[eE](?P<exponent>[-+]?\d+))?"
    rf"(?:\s*/\s*(?P<denominator>{_NUMBER}))?\s*(?P<unit>(?:[^\W\d_]|[%°€£¥$])[^\d\n,;=]*(?:\^\(?\d\)?)?)?"
)


class Quantity(NamedTuple):
    """A number and the unit written after it (lower case, empty where there is none)."""

    value: Fraction
    unit: str


def parse_quantity(text: str) -> Quantity | None:
    """Return the one quantity that `text` is, or None where it is anything else."""
    match = _QUANTITY.fullmatch(_plain(text)) if len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    value = _value(match)
    unit = re.sub(r"[\s.$]+", " ", match["unit"] or "").strip().lower()
    return None if value is None else Quantity(value, unit)


def same_quantity(answer: str, reference: str, tolerance: float) -> bool:
    """Return whether two texts are the same quantity.

    Args:
        answer: The model's.
        reference: The task's.
        tolerance: Largest difference allowed, relative to max(1, |reference|).

    Returns:
        True where both are quantities, closer than the tolerance, and of one unit (either may leave it out).
    """
    given, wanted = parse_quantity(answer), parse_quantity(reference)
    if given is None or wanted is None:
        return False
    if given.unit and wanted.unit and given.unit.rstrip("s") != wanted.unit.rstrip("s"):
        return False
    return abs(given.value - wanted.value) <= Fraction(tolerance) * max(Fraction(1), abs(wanted.value))


def _plain(text: str) -> str:
    text = text.strip().translate(_SIGNS)
    boxed = _BOXED.fullmatch(text.strip("$ "))
    text = boxed[1] if boxed else text
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1]
    text = _LATEX_TEXT.sub(r" \1", _LATEX_NOISE.sub("", text))
    text = _LATEX_FRACTION.sub(r" \1/\2", text).replace("\\%", "%").replace("\\$", "$").replace("{,}", ",")
    return re.sub(r"(?<=\d)\.$", "", re.sub(r"([-+])\s+(?=\d)", r"\1", text.strip()))


def _value(match: re.Match[str]) -> Fraction | None:
    if match["sign"] and match["inner_sign"]:
        return None
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    value = _fraction(match["number"]) * Fraction(10) ** exponent
    if match["denominator"]:
        denominator = _fraction(match["denominator"])
        if denominator == 0:
            return None
        value /= denominator
    if match["whole"]:
        if not match["denominator"]:
            return None
        value += int(match["whole"])
    return -value if "-" in (match["sign"], match["inner_sign"]) else value


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")
