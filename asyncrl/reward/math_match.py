r"""Compares an answer with a reference as mathematics: fixed rules select one answer, and then math-verify compares.

1. One answer: the content of `\boxed{}`, else the content of `$..$`, `\(..\)` or `\[..\]` (with words around it that only
   introduce it), else the whole text. Several different answers count as no answer.
2. One form: an answer must have the form of the reference. A number is compared exactly (numbers.py); text as text; tuples,
   intervals, sets, lists, unions and matrices by their brackets and item by item; a relation only with a relation.
3. One expression: the rest must be one expression, with known functions, only letters of the reference, and small: length,
   digits, nesting, powers and factorials are bounded before anything parses or evaluates it.

math-verify alone uses the last number or the last side of its input, so it would read `1=7` and `1 or 2 or 7` as 7.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import accumulate

from asyncrl.reward.expressions import same_expression
from asyncrl.reward.inputs import linear_pattern
from asyncrl.reward.numbers import UNITS, lowered_exponents, parse_quantity, same_quantity

MAX_TEXT_CHARS = 100_000
MAX_ANSWER_CHARS = 400
_MAX_DIGITS, _MAX_NESTING, _MAX_NUMBER_POWER, _MAX_LETTER_POWER, _MAX_FACTORIAL = 100, 30, 3000, 30, 100
_SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u00d7": r"\times ", "\u222a": r"\cup ", "π": r"\pi ", "∞": r"\infty ",
    "√": r"\sqrt ", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∈": r"\in ", "°": r"^{\circ}",
    "∅": r"\emptyset ", "÷": "/", "\u2044": "/", "\u2215": "/", "<=": r"\le ", ">=": r"\ge ", "**": "^",
}  # fmt: skip
_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!|\\,)\s*(?=\d{3}(?!\d))")
_ATTACHED_LETTER = re.compile(r"\d[A-Za-z]$")
_NOISE = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|limits|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])|(?<!\\)\\[!,;: ]|~")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_RENAMED = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "lvert": "|", "rvert": "|", "lbrace": r"\{", "rbrace": r"\}",
    "leq": r"\le", "leqslant": r"\le", "geq": r"\ge", "geqslant": r"\ge", "neq": r"\ne", "varnothing": r"\emptyset",
}  # fmt: skip
_SAME = (
    (re.compile(r"\\(?:mathrm|mbox|textbf|textrm|textit|operatorname)\s*\{"), r"\\text{"),
    (re.compile(r"\\mathbf\s*\{\s*(\(?[A-Z]\)?)\s*\}"), r"\\text{\1}"),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"([_^])\s*\{(\w)\}"), r"\1\2"),
    (re.compile(r"\s+"), " "),
)
_POINT = r"[A-Za-z](?:_[0-9a-z]|_\{\w+\})?(?:'|\^ ?\\prime|\^ ?\{(?: ?\\prime)+ ?\})*"
_AND = "(?:and|or)(?![A-Za-z])"
_ANGLE = re.compile(
    rf"\\(?:measured|spherical)?angle ?(\{{)? ?({_POINT}(?: ?(?!{_AND}){_POINT})*)(?! ?(?!{_AND})[\w^'])(?(1) ?\}})", re.ASCII
)
"""An angle and all its points, which math-verify would take for a product of letters: ABC would equal BAC."""
_DELIMITED = linear_pattern(r"\$\$(.+?)\$\$|\$((?:\\.|[^$\\])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_INTRODUCING_WORDS = """the a an final answer is so therefore thus hence then we get have which equals equal to of value result
    solution this it and that gives be in simplest form as"""
_INTRODUCES = frozenset(_INTRODUCING_WORDS.split())
_LEAD = re.compile(
    r"\A(?:so |thus |therefore,? |hence,? )?(?:the )?(?:final )?(?:answer|result|value|solution)(?: is:?|:| =)\s*", re.IGNORECASE
)
_NAME = re.compile(
    r"(?P<name>[A-Za-z](?:_\w|_\{\w+\})?(?:\([A-Za-z]\))?|\([A-Za-z](?:,\s*[A-Za-z])+\)|"
    r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|pi|rho|sigma|tau|(?:var)?phi|omega))\s*"
    r"(?:=|\\in(?![A-Za-z]))\s*(?P<rest>.+)",
    re.DOTALL,
)
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|lt|gt|in|equiv|approx|sim|to|mid|iff|implies|Rightarrow)(?![A-Za-z])")
_COMMAND_WORDS = """frac sqrt pi infty cdot times div pm mp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp
    lg binom circ alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi omega Delta Omega text lfloor rfloor
    lceil rceil min max gcd"""
_COMMANDS = frozenset(_COMMAND_WORDS.split())
_FUNCTION_WORDS = "sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh log ln exp sqrt pi lg"
_FUNCTIONS = frozenset(_FUNCTION_WORDS.split())
_MATRIX = re.compile(r"\\begin\{(?P<kind>[pbB]?matrix|array)\}(?:\{[lcr|]*\})?(?P<cells>.*)\\end\{(?P=kind)\}", re.DOTALL)
_OWN_UNIT = re.compile(
    r"[^A-Za-z]*\d(?:\s*\\text\{\s*(?=[A-Za-z]{4}|[A-Za-z^\d]+/)[A-Za-z/^\d]+\s*\}(?:\^\d)?|\s+[A-Za-z]{5,})", re.ASCII
)
"""A reference with an unlisted unit: one word, too long to be a product or a name within `\\mathrm{}`, or with `/`."""
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_SUBSCRIPT = re.compile(r"_\s*(?:\{[^{}]*\}|\w)")
_OPENING, _CLOSING = "([{", ")]}"
_GROUPED = re.compile(r"(?<![\w.,^])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)", re.ASCII)
"""Digits and commas that form one number and not a list: `5,125`, but not `5,125,6`."""


def same_mathematics(answer: str, reference: str) -> bool:
    """Return whether an answer equals a reference; call it only within `expressions.within_budget`."""
    wanted, given = take_one(reference), take_one(answer)
    return given is not None and _equal(given, wanted or _normal(reference))


def take_one(text: str) -> str | None:
    """Return the single answer in a text, normalised; None if it has no answer or several different ones."""
    text = text[-MAX_TEXT_CHARS:]
    found = list(_boxed(text))
    if not found:
        matches = list(_DELIMITED.finditer(text))
        found = [next(filter(None, match.groups())) for match in matches]
        ends = [0, *(place for match in matches for place in match.span()), len(text)]
        around = " ".join(text[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True))
        unit = around.strip(" .*:,\n").casefold()
        if found and unit in UNITS:
            found, around = [rf"{each}\text{{ {unit}}}" for each in found], ""
        words = re.findall(r"[^\W_]+|['=<>+*/^-]", around.replace("**", " ")) if found else []
        if any(word.casefold() not in _INTRODUCES for word in words):
            return None
    answers = {_normal(each) for each in found or [_LEAD.sub("", text.strip())]}
    answer = answers.pop()
    return answer if not answers and 0 < len(answer) <= MAX_ANSWER_CHARS else None


def _boxed(text: str) -> Iterator[str]:
    r"""Yield the content of each `\boxed{}`; an unclosed one ends the search."""
    position = 0
    while (match := re.compile(r"\\f?boxed\s*\{").search(text, position)) is not None:
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            end += 1
        if depth:
            return
        inner = text[match.end() : end - 1]
        position = end
        yield from _boxed(inner) if "boxed" in inner and len(inner) < MAX_ANSWER_CHARS else (inner,)


def _normal(text: str) -> str:
    """Return LaTeX without the parts that do not change its meaning."""
    if len(text) > 2 * MAX_ANSWER_CHARS:
        return text
    text = text.strip()
    text = text[2:-2] if text.startswith("**") and text.endswith("**") and len(text) > 4 else text
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = lowered_exponents(text)
    text = _COMMAND.sub(lambda m: _RENAMED.get(m[1], m[0]), _NOISE.sub(" ", _THOUSANDS.sub("", text)))
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    text = _ANGLE.sub(_angle, text)
    text = text.strip().removesuffix(".").strip()
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text


def _angle(match: re.Match[str]) -> str:
    """Return an angle as a letter of its own, the same for ABC and CBA."""
    points = [re.sub(r"[\^{} ]", "", point.replace(r"\prime", "'")) for point in re.findall(_POINT, match[2], re.ASCII)]
    name = ",".join(min(points, points[::-1]))
    return rf"\vartheta_{{P{int.from_bytes(name.encode())}}}"  # digits, because math-verify ignores a prime there


def _equal(answer: str, reference: str, depth: int = 0) -> bool:
    """Compare two normalised answers, containers item by item."""
    if _squeezed(answer) == _squeezed(reference):
        return True
    if depth > 3:
        return False
    words = [text for text in (answer, reference) if _is_text(text)]
    if len(words) == 2 or (words and not re.fullmatch("[a-z]{2,3}", words[0])):  # in mathematics, `ab` is a product
        return _folded(answer) == _folded(reference)
    # `x =` and `x \in` are removed from both; either side may omit them, unless it is another equation.
    (given_name, given_value), (wanted_name, wanted_value) = _named(answer), _named(reference)
    if given_name and wanted_name and given_name != wanted_name:
        return False
    if not _RELATION.search(given_value + wanted_value):
        answer, reference = given_value, wanted_value
    is_same = _same_quantities(answer, reference)
    if is_same is not None:
        return is_same
    given_items, wanted_items = _items(answer), _items(reference)
    if given_items is not None or wanted_items is not None:
        return given_items is not None and wanted_items is not None and _same_items(given_items, wanted_items, depth)
    (answer, given_unit), (reference, wanted_unit) = _trailing_unit(answer), _trailing_unit(reference)
    if given_unit and wanted_unit and given_unit != wanted_unit:
        return False
    return _one_expression(answer, reference) and _same_value(answer, reference)


def _same_quantities(answer: str, reference: str) -> bool | None:
    """Compare two quantities; return None if they are not quantities."""
    wanted = parse_quantity(reference)
    may_have_own_unit = wanted is None and _OWN_UNIT.fullmatch(reference) is not None
    if may_have_own_unit and (_COMMANDS | _FUNCTIONS).isdisjoint(re.findall("[a-z]+", reference.casefold())[-1:]):
        wanted = parse_quantity(reference, None)
    given = parse_quantity(answer, wanted.unit if wanted else "")
    if wanted is None or given is None:
        # An expression followed by the same text, such as `7!\text{ ways}`, is compared as an expression.
        _, text, unit = _squeezed(reference).rpartition(r"\text")
        has_its_text = bool(text) and _squeezed(answer).endswith(text + unit)
        return False if wanted and may_have_own_unit and not has_its_text else None
    # A letter directly after a number may be a variable: it is a unit only if both have it.
    is_variable = given.unit != wanted.unit and any(map(_ATTACHED_LETTER.search, (answer, reference)))
    shares = {each.value / 100 if each.unit == "%" else each.value for each in (given, wanted)}
    is_percentage = {given.unit, wanted.unit} == {"%", ""} and len(shares) == 1
    return not is_variable and (is_percentage or same_quantity(answer, reference))


def _same_value(answer: str, reference: str) -> bool:
    """Compare two expressions, or two equations as `left - right`: by solutions, all equations without one would be equal."""
    if _relations(reference) != ["="]:
        return same_expression(answer, reference)
    given, wanted = _split(answer, "="), _split(reference, "=")
    if len(given) != 2 or len(wanted) != 2:  # an equals sign within brackets
        return False
    zeros = [f"({left})-({right})" for left, right in (wanted, wanted[::-1])]
    return any(same_expression(f"({given[0]})-({given[1]})", zero) for zero in zeros)


def _squeezed(text: str) -> str:
    """Return a text without blanks, except those between two words or numbers."""
    return re.sub(r"\s+(?!\w)|(?<!\w)\s+", "", re.sub(r"\s+", " ", text))


def _is_text(text: str) -> bool:
    r"""Return whether it is words and not mathematics: `\text{(A)}`, `yes`."""
    words = _TEXT.fullmatch(text)
    if words:
        return not _folded(words[1]).replace(".", "", 1).isdigit()
    return re.fullmatch(r"[A-Za-z][A-Za-z '-]*[A-Za-z]", text) is not None and text.casefold() not in _FUNCTIONS


def _folded(text: str) -> str:
    """Return words without blanks, parentheses and full stops; a decimal point stays."""
    return re.sub(r"[\s()]+|\.(?!\s*\d)", "", _TEXT.sub(r"\1", text)).casefold()


def _named(text: str) -> tuple[str, str]:
    """Return the name before an answer (empty if it has none), and the rest."""
    match = _NAME.fullmatch(text)
    return (_squeezed(match["name"]), match["rest"]) if match and not _RELATION.search(match["rest"]) else ("", text)


# -- containers --------------------------------------------------------------------------------------------------------------


def _items(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets and the items of a container, and None for a single expression. Without brackets it is a list."""
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in matrix["cells"].strip().split("\\\\") if row.strip()]
        return "matrix" + "/".join(str(row.count("&")) for row in rows), [cell.strip() for row in rows for cell in row.split("&")]
    parts = _split(text, r"\cup")
    if len(parts) > 1:
        return "union", parts
    brackets, inner = "", text
    if text.startswith("\\{") and text.endswith("\\}"):
        brackets, inner = "{}", text[2:-2]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and _item(text, 0)[1] == len(text):
        brackets, inner = text[0] + text[-1], text[1:-1]
    inner = re.sub(r",\s*(?:\\text\{ ?)?(?:or|and) ?\}?(?= |\\|\d)", ",", inner)
    parts = _split(inner, ",", keeps_grouped=not brackets)
    items = [item.strip() for part in parts for item in re.split(r" (?:or|and) |\\text\{ ?(?:or|and) ?\}", part)]
    signs = [("+", "-") if item.count(r"\pm") == 1 else ("",) for item in items]
    items = [
        item.replace(r"\pm", sign).strip() if sign else item for item, both in zip(items, signs, strict=True) for sign in both
    ]
    if len(items) > 1:
        return brackets, items
    return (brackets, items) if brackets in ("{}", "[]") else None


def _split(text: str, separator: str, *, keeps_grouped: bool = False) -> list[str]:
    """Split outside brackets, and outside numbers such as `5,125` if they are kept."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if character == "\\" and not text.startswith(separator, position):
            position += 2
            continue
        depth += _opens(character)
        number = _GROUPED.match(text, position) if keeps_grouped and depth == 0 else None
        if number is not None:
            position = number.end()
        elif depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position].strip())
            start = position = position + len(separator)
        else:
            position += 1
    return [*parts, text[start:].strip()]


def _opens(character: str) -> int:
    """Return by how much a character changes the number of open brackets."""
    return (character in _OPENING) - (character in _CLOSING)


def _same_items(given: tuple[str, list[str]], wanted: tuple[str, list[str]], depth: int) -> bool:
    (given_kind, given_items), (wanted_kind, wanted_items) = given, wanted
    any_order = {"", "{}"}
    if given_kind != wanted_kind and not {given_kind, wanted_kind} <= any_order:
        return False
    if len(given_items) != len(wanted_items) or not all(given_items):
        return False
    if wanted_kind not in any_order and wanted_kind != "union":
        return all(_equal(item, want, depth + 1) for item, want in zip(given_items, wanted_items, strict=True))
    left = list(wanted_items)
    for item in given_items:
        match = next((want for want in left if _equal(item, want, depth + 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


# -- one expression ----------------------------------------------------------------------------------------------------------


def _one_expression(answer: str, reference: str) -> bool:
    """Return whether an answer is one expression of the reference's kind, and small enough to evaluate."""
    if sorted(_relations(answer)) != sorted(_relations(reference)) or _TEXT.findall(answer) != _TEXT.findall(reference):
        return False
    if re.search(r"\\(?:measured|spherical)?angle ?[{(]? ?[A-Za-z]", f"{answer} {reference}"):  # points that _ANGLE cannot read
        return False
    if not answer.isascii() or re.search(r"\d\s+[\d.]", _SUBSCRIPT.sub("", answer), re.ASCII):
        return False
    if answer.count("'") != reference.count("'") or re.search(
        r"\.\.|[?;:$#@&`\"]|//|[-+*/^=<>_\\]\s*$|^\s*[*/^=<>]|\\circ\}?\s*[\w(\\]", answer, re.ASCII
    ):
        return False
    plain = _TEXT.sub(" ", answer)
    known = (
        _COMMANDS - {"text"}
        | {command[1:] for command in re.findall(r"\\[A-Za-z]+", reference)}
        | {"le", "ge", "ne", "lt", "gt", "in"}
    )
    if any(command not in known for command in re.findall(r"\\([A-Za-z]+)", plain)) or re.search(r"\\[^A-Za-z{}%]", plain):
        return False
    # math-verify ignores what it does not understand: infinity as a factor, a number after a letter and a blank.
    if (r"\infty" in answer) > (r"\infty" in reference) or re.search(r"(?<![A-Za-z])[A-Za-z]\s+\d", answer, re.ASCII):
        return False
    letters = _letters(reference)
    for word in re.findall(r"(?<![\\A-Za-z])[A-Za-z]+", plain):
        if word not in _FUNCTIONS and not set(word) <= letters | {"e", "i"}:
            return False
    # Subscripts of numbers, which math-verify ignores.
    bases = [[_squeezed(found) for found in re.findall(r"[\d)}\]]\s*(_.{1,4})", text)] for text in (answer, reference)]
    return bases[0] == bases[1] and _is_small(answer)


def _letters(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text)))


def _relations(text: str) -> list[str]:
    kinds = {"<": "order", ">": "order", r"\lt": "order", r"\gt": "order", r"\le": "order or equal", r"\ge": "order or equal"}
    return [kinds.get(found, found) for found in _RELATION.findall(text)]


def _is_small(text: str) -> bool:
    """Return whether digits, nesting, powers, factorials and binomials are bounded."""
    if re.search(rf"\d{{{_MAX_DIGITS + 1}}}", text):
        return False
    depths = [*accumulate(map(_opens, text), initial=0)]
    if not min(depths) == depths[-1] == 0 or max(depths) > _MAX_NESTING:
        return False
    for base in re.findall(r"(.{0,4})!", text):
        number = re.search(r"(?:^|\D)(\d{1,3})$", base, re.ASCII)
        if number is None or int(number[1]) > _MAX_FACTORIAL:
            return False
    if "binom" in text and re.search(r"\d{4}", text):
        return False
    return _largest_power(text) <= (_MAX_LETTER_POWER if _letters(text) - {"e", "i"} else _MAX_NUMBER_POWER)


def _item(text: str, start: int) -> tuple[str, int]:
    """Return the group, number or character that begins at `start`, and its end."""
    if text[start : start + 1] and text[start] in _OPENING:
        depths = accumulate(map(_opens, text[start:]))
        end = next((end for end, depth in enumerate(depths, start + 1) if not depth), len(text))
        return text[start:end], end
    match = re.compile(r"\d+|\\[A-Za-z]+|.|$", re.ASCII | re.DOTALL).match(text, start)
    assert match is not None
    return match[0], match.end()


def _largest_power(text: str) -> float:
    """Return the largest exponent in a text, with nested groups multiplied; infinity if an exponent contains a power."""
    largest, position = 1.0, 0
    while position < len(text):
        item, position = _item(text, position)
        size = _largest_power(item[1:-1]) if len(item) > 1 and item[0] in _OPENING else len(item) if item.isdigit() else 1
        after = re.compile(r"\s*\^\s*").match(text, position)
        if after is not None:
            exponent, position = _item(text, after.end())
            if "^" in exponent.replace(r"^{\circ}", "") or text[position:].lstrip().startswith("^"):
                return math.inf
            size *= max([1, *(int(number[:6]) for number in re.findall(r"\d+", exponent, re.ASCII))])
        largest = max(largest, size)
    return largest


def _trailing_unit(text: str) -> tuple[str, str]:
    r"""Return an expression and the unit after it, in `\text{}` or after a blank."""
    match = re.fullmatch(
        r"(.*?[\w})])\s*\\text\{\s*([^{}]*?)\s*\}(\^\{?\d\}?)?|(.*?[\d})])\s+([A-Za-z]{1,20})(\^\{?\d\}?)?", text, re.DOTALL
    )
    if match is None:
        return text, ""
    body, name = (match[1], match[2]) if match[1] is not None else (match[4], match[5])
    power = re.sub(r"[{}]", "", (match[3] if match[1] is not None else match[6]) or "")
    unit = UNITS.get(f"{name.casefold().rstrip('.')}{power}")
    return (body, unit) if unit else (text, "")
