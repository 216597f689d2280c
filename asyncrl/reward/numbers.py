r"""Reading a quantity as people and models write it: `1,234.50`, `$3`, `3/4`, `1 1/2`, `\frac{3}{4}`, `12 km`, `5e-3`, `50%`.

All arithmetic is exact (fractions), so only the tolerance allows a difference. The rules (docs/rewards.md lists them):
- wrappers are removed: `$..$`, `\(..\)`, `\boxed{..}`, `**..**`, parentheses around everything, and a name in front (`x = 5`);
- a quantity has one number, with ASCII digits; a text with two numbers, or with a word that is not a unit, is not a quantity;
- a unit is listed here, or is the unit of the reference.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

MAX_CHARS = 200
_MAX_EXPONENT = 400
_SIGNS = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u00d7": "*", "\u00f7": "/", "\u2044": "/",
    "\u2215": "/",
})  # fmt: skip
_THOUSANDS = re.compile(r"(?<=\d)(?:,?\\[,!]|\u2009|\u202f)(?=\d{3}(?!\d))", re.ASCII)
_FRACTION_SIGN = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_RAISED = re.compile("[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_UNIT_OUTSIDE = re.compile(r"\A(?:\$((?:\\.|[^$\\])+)\$|\\\((.+)\\\))\s*([A-Za-z%\u00b0\\].*)", re.DOTALL)
_OWN_UNIT = re.compile(r"(?![a-z](?:\^\d)?(?: |$))[a-z]+(?:\^\d)?(?:[ /][a-z]+(?:\^\d)?)*", re.ASCII)
"""An unlisted unit. A single letter is a variable."""
_LATEX_NOISE = re.compile(r"\\[!,;: ]|\\(?:left|right|displaystyle)(?![A-Za-z])")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|mbox|textbf|textrm|operatorname)\s*\{([^{}]*)\}")
_LATEX_FRACTION = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*(?P<a>[-\d.,\s]+?)\s*\}|(?P<b>\d))\s*(?:\{\s*(?P<c>[-\d.,\s]+?)\s*\}|(?P<d>\d))", re.ASCII
)
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\u00b0")
_WRAPPERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$(.*)\$\$",
        r"\$((?:\\.|[^$\\])*)\$",
        r"\\\((.*)\\\)",
        r"\\\[(.*)\\\]",
        r"\\(?:boxed|f?box)\s*\{(.*)\}",
        r"\*\*([^*]*)\*\*",
        r"\((?![-+{\s]*\d+,[\d,.]*[}\s]*\))([^()]*)\)",  # `(3,100)` is a pair
        r"\{([^{}]*)\}",
        r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}",
    )
)
_NAME_WORDS = """answer result value total sum area volume length width height perimeter distance time speed cost price profit
    probability average mean number age alpha beta gamma delta theta lambda mu pi rho sigma tau phi omega"""
_NAMED = re.compile(
    rf"\\?(?P<name>(?:[A-Za-z]|(?!NO)[A-Z]{{2,3}}|(?i:{'|'.join(_NAME_WORDS.split())}))(?:_\w|_\{{\w+\}})?|[A-Za-z]\([a-z]\))"
    r"\s*=\s*(?P<value>[^=]+)",
    re.ASCII,
)
_NUMBER = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_PLAIN = re.compile(r"[-+]?\d+(?:\.\d+)?", re.ASCII)
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<currency>[$€£¥]|US\$|USD|EUR|GBP|JPY)?\s*(?P<inner_sign>[-+]?)\s*(?:(?P<whole>\d+)\s+)?(?P<number>{_NUMBER})"
    rf"(?:[eE](?P<exponent>[-+]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*(?:\{{\s*(?P<ten>[-+]?\d+)\s*\}}|(?P<digit>-?\d+)))?"
    rf"(?:\s*/\s*(?P<denominator>{_NUMBER}))?\s*(?P<unit>[^\d\s].*)?",
    re.ASCII,
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNIT_WORDS = """or and to mod modulo plus minus times over by choose divided squared cubed factorial half halves third quarter
    fourth fifth sixth seventh eighth ninth tenth eleventh twelfth hundredth thousandth millionth billionth dozen gross score
    quadrillion"""
_NO_UNITS = frozenset(_NO_UNIT_WORDS.split()) | set(_SCALES)
"""Words that change the number before them, also in the plural."""
_UNIT_NAMES = """
    %,percent,per cent,pct; $,dollar,usd,us$,us dollar,buck; €,euro,eur; £,gbp,pound sterling; ¥,yen,jpy; ¢,cent; rupee,inr
    °,degree,deg; °c,degrees celsius,celsius; °f,degrees fahrenheit,fahrenheit; rad,radian
    km,kilometer,kilometre; m,meter,metre; cm,centimeter,centimetre; mm,millimeter,millimetre; um,micrometer; nm,nanometer
    mi,mile; yd,yard; ft,foot,feet; in,inch,inches; light year
    kg,kilogram,kilo; g,gram; mg,milligram; t,ton,tonne; lb,pound; oz,ounce
    l,liter,litre; ml,milliliter,millilitre; gal,gallon; quart; pint; cup; tablespoon,tbsp; teaspoon,tsp
    s,sec,second; ms,millisecond; min,minute; h,hr,hour; day; week; month; year,yr; decade; century,centuries
    n,newton; j,joule; kj,kilojoule; cal,calorie; kcal,kilocalorie; w,watt; kw,kilowatt; kwh,kilowatt hour; v,volt; a,amp,ampere
    ohm; hz,hertz; pa,pascal; kpa,kilopascal; atm,atmosphere; kelvin; mol,mole
    b,byte; kb,kilobyte; mb,megabyte; gb,gigabyte; tb,terabyte; bit
    km/h,km/hr,kph,kmh,kilometers per hour; mph,mi/h,miles per hour; m/s,mps,meters per second; m/s^2; g/ml; g/cm^3; kg/m^3
    unit; square unit,sq unit; cubic unit; square meter,sq m,m^2; square centimeter,sq cm,cm^2; square kilometer,sq km,km^2; mm^2
    square foot,square feet,sq ft,ft^2; square inch,square inches,sq in,in^2; square mile,sq mi,mi^2; square yard,sq yd,yd^2
    hectare; acre; cubic meter,m^3; cubic centimeter,cm^3,cc; cubic foot,cubic feet,ft^3; cubic inch,cubic inches,in^3; mm^3
    apple; orange; banana; egg; cookie; cake; pie; slice; pizza; candy,candies; sandwich,sandwiches; bottle; bag; box,boxes; pack
    person,people; student; child,children; kid; boy; girl; man,men; woman,women; friend; teacher; worker; player; member; guest
    customer; book; page; card; sticker; stamp; marble; ball; toy; coin; pencil; pen; ticket; photo; picture; letter; word
    question; problem; point; vote; cat; dog; bird; fish; cow; chicken; horse; sheep; animal; tree; flower; plant; rose
    seed; shirt; shoe; sock; hat; dress,dresses; car; bus,buses; truck; bike; train; house; room; seat; chair; table
    floor; lap; game; goal; time; way; item; piece; part; pair; group; team; row; side; triangle; square; circle; cube
"""


_ENTRIES = [[name.strip() for name in entry.split(",")] for entry in _UNIT_NAMES.replace("\n", ";").split(";")]
_PLURALS = {f"{name}s": names[0] for names in _ENTRIES for name in names if len(name) > 1}
UNITS = _PLURALS | {name: names[0] for names in _ENTRIES for name in names if name}
"""Maps each written form of a unit, in lower case, to the name for comparison."""


class Quantity(NamedTuple):
    """A number and the unit after it (empty without a unit)."""

    value: Fraction
    unit: str
    name: str = ""
    """The name before the equals sign, as in `x = 5`."""


def parse_quantity(text: str, reference_unit: str | None = "") -> Quantity | None:
    """Return the quantity that `text` is, or None if it is not exactly one quantity.

    Args:
        text: The text as written.
        reference_unit: An unlisted unit to accept; None: accept any words after a blank, except a number word (`fifths`) or a
            variable (`x`).
    """
    return None if len(text) > MAX_CHARS or ".." in text else _parsed(text, reference_unit)


@lru_cache(maxsize=4096)
def _parsed(text: str, reference_unit: str | None) -> Quantity | None:
    if _PLAIN.fullmatch(text):
        return Quantity(Fraction(text), "")
    text = _FRACTION_SIGN.sub(
        lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("\u2044", "/"), _THOUSANDS.sub("", text)
    )
    text = _UNIT_OUTSIDE.sub(lambda m: f"{m[1] or m[2]} {m[3]}", lowered_exponents(text).strip())
    text, name = _unwrapped(text.translate(_SIGNS))
    text = _LATEX_TEXT.sub(r" \1 ", _LATEX_NOISE.sub(" ", text.replace("{,}", ",")))
    text = _LATEX_FRACTION.sub(lambda m: f" {m['a'] or m['b']}/{m['c'] or m['d']}", text)
    text = _DEGREES.sub("°", text).replace(r"\%", "%").replace(r"\$", "$").strip()
    match = _QUANTITY.fullmatch(re.sub(r"(?<=\d)\.$", "", re.sub(r"([-+])\s+(?=[\d.])", r"\1", text)))
    if match is None:
        return None
    if reference_unit is None and not match.string[: match.start("unit")].endswith(" "):
        reference_unit = ""
    unit, power = _unit(match["unit"] or "", reference_unit)
    currency = UNITS.get((match["currency"] or "").casefold(), match["currency"] or "")
    exponent = int(match["exponent"] or match["ten"] or match["digit"] or 0)
    if unit is None or (unit and currency and unit != currency) or abs(exponent) > _MAX_EXPONENT:
        return None
    number, denominator = (
        Fraction(digits.replace(",", "").rstrip(".") or "0") for digits in (match["number"], match["denominator"] or "1")
    )
    if denominator == 0 or (match["whole"] and not match["denominator"]) or (match["sign"] and match["inner_sign"]):
        return None
    value = number * Fraction(10) ** exponent / denominator + int(match["whole"] or 0)
    is_negative = "-" in (match["sign"], match["inner_sign"])
    return Quantity((-value if is_negative else value) * 10**power, unit or currency, name)


def same_quantity(answer: str, reference: str, tolerance: float | None = None) -> bool:
    """Return whether two texts are the same quantity.

    Args:
        answer: The model's answer.
        reference: The task's reference answer.
        tolerance: Maximum difference, relative to max(1, |reference|); None: 0 for whole numbers, otherwise 1e-6 relative to
            the reference, however small it is.

    Returns:
        True if both are quantities, close enough, with the same unit and the same name (either text may omit these).
    """
    wanted = parse_quantity(reference, None)
    given = wanted and parse_quantity(answer, wanted.unit)
    if wanted is None or given is None:
        return False
    if (given.unit and wanted.unit and given.unit != wanted.unit) or (given.name and wanted.name and given.name != wanted.name):
        return False
    if tolerance is None:
        allowed = 0 if wanted.value.denominator == 1 else abs(wanted.value) / 10**6
    else:
        allowed = Fraction(tolerance) * max(Fraction(1), abs(wanted.value))
    return abs(given.value - wanted.value) <= allowed


def lowered_exponents(text: str) -> str:
    """Return a text with raised digits as `^{..}`."""
    return _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}".replace("\u2212", "-"), text)


def _unwrapped(text: str) -> tuple[str, str]:
    """Remove the wrappers of an answer; return it and the name before it."""
    name = ""
    text = text.strip().removesuffix(".")
    while True:
        text = text.strip()
        inner = next((match[1] for match in (wrapper.fullmatch(text) for wrapper in _WRAPPERS) if match), None)
        depths = [*accumulate(((character in "({") - (character in ")}") for character in inner or ""), initial=0)]
        if inner is not None and min(depths) == depths[-1] == 0:
            text = inner
            continue
        named = _NAMED.fullmatch(text)
        if named is None or name:
            return text, name
        text, name = named["value"], named["name"]


def _singular(unit: str) -> str:
    return UNITS.get(unit, unit[:-1] if unit.endswith("s") and len(unit) > 3 and "/" not in unit else unit)


def _unit(text: str, reference_unit: str | None) -> tuple[str | None, int]:
    """Return the unit that `text` names (None if it names none), and the power of ten of a word before it."""
    text = re.sub(r"\s*([/^])\s*", r"\1", re.sub(r"\^\s*\{(\d)\}", r"^\1", text))
    words = text.strip().rstrip(".").casefold().split()
    power = 0
    while words and words[0] in _SCALES:
        power += _SCALES[words.pop(0)]
    unit = " ".join(words)
    if not unit:
        return "", power
    if unit in UNITS:
        return UNITS[unit], power
    if reference_unit is None:
        is_known = _OWN_UNIT.fullmatch(unit) and _NO_UNITS.isdisjoint((words[0], words[0].removesuffix("s")))
    else:
        is_known = _singular(unit) == reference_unit
    return (_singular(unit) if is_known else None), power
