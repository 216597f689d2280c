"""1 if the scorer of a reasoning-gym family accepts the answer (0.99 and above by default), else 0; its known holes are closed.

`prompt.reference_json` is `{"family", "family_options", "entry"}` as tasks/registry.py writes it, or a bare entry.

Several families' scorers accept texts that are not answers: a list of candidates, an answer followed by other text, `nan`
(complex_arithmetic), 0 for any probability (coin_flip), any text (game_of_life_halting). Others pass the model's text to `eval`
or to sympy's evaluating parser, which would run model-written code in this process. So a text reaches the scorer only if it has
the form of the reference or, for families with several right answers, the family's own form (`_SHAPES`).
tests/unit/reward/test_reasoning_gym.py tries every family of the installed version against the same probes.

No scorer can prevent this: in some families a constant answer is often right (letter_counting, syllogism, gcd).
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from asyncrl.config.reward import ReasoningGymReward
from asyncrl.errors import RewardError
from asyncrl.reward.inputs import RewardFunction, RewardInput, compile_extract, extract_answer, import_optional
from asyncrl.reward.numbers import parse_quantity

Entry = dict[str, Any]
Shape = Callable[[str, str], bool]
"""(answer, reference) -> whether the answer has the form of one answer of this family."""

_MAX_EXPRESSION_CHARS = 500
_MAX_MAGNITUDE = 200
_MAX_EXPONENT_DIGITS = 2
_MAX_DIGITS = 50
_DIGITS = re.compile(r"\d+")
_LARGE_EXPONENT = re.compile(r"\d[eE][-+]?\d{3,}")
_TOKEN = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|\d+(?:\.\d+)?|\*\*|\S")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "pi"})
_OPERATORS = frozenset({"+", "-", "*", "/", "**", "^", "(", ")"})
_READ_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", re.ASCII)
_READ = re.compile(rf"{_READ_NUMBER.pattern}(?:(?=[ij]\b)|(?!\w))|\w+|[^\w\s,'\"$.]")


def build_reasoning_gym(config: ReasoningGymReward) -> RewardFunction:
    """Build the strict scorer; the family comes with each prompt.

    Raises:
        ConfigError: `extract` is not a regular expression with a group.
        RewardError: reasoning-gym is not installed.
    """
    extract = compile_extract(config.extract, "reward.functions reasoning_gym extract")
    import_optional("reasoning_gym", "reasoning_gym")

    def score(sample: RewardInput) -> float:
        try:
            reference = json.loads(sample.prompt.reference_json)
            if "entry" not in reference:
                reference = {"family": reference["metadata"]["source_dataset"], "entry": reference}
            family, entry = reference["family"], reference["entry"]
            options_json = json.dumps(reference.get("family_options", {}), sort_keys=True)
        except (ValueError, KeyError, TypeError) as error:
            said = f"prompt {sample.prompt.prompt_id!r}: reference_json holds no reasoning-gym entry ({error!r})"
            raise RewardError(said) from error
        entry = _tuples(entry) if family in _TUPLE_FAMILIES else entry
        answer = extract_answer(sample.text, extract)
        if not answer or not _has_shape(family, answer, entry):
            return 0.0
        dataset, right = _dataset(family, options_json), entry.get("answer")
        try:
            return float(dataset.score_answer(answer, entry) >= config.threshold)
        except Exception as error:
            # Some scorers raise on an answer they cannot parse: it is wrong, unless they cannot parse the reference either.
            with contextlib.suppress(Exception):
                dataset.score_answer("{}" if right is None else str(right), entry)
                return 0.0
            raise RewardError(f"the scorer of reasoning-gym's {family} raised {type(error).__name__}: {error}") from error

    return score


@lru_cache(maxsize=32)
def _dataset(family: str, options_json: str) -> Any:  # noqa: ANN401 - reasoning-gym has no types
    """Return a dataset of the family, for its scorer: some scorers use the dataset's config."""
    factory = import_optional("reasoning_gym.factory", "reasoning_gym")
    if family not in factory.DATASETS:
        raise RewardError(f"reasoning-gym has no family {family!r}; it has: {', '.join(sorted(factory.DATASETS))}")
    try:
        return factory.create_dataset(family, seed=0, size=1, **json.loads(options_json))
    except (TypeError, AssertionError, ValueError) as error:
        raise RewardError(f"reasoning-gym refused the options {options_json} of {family!r}: {error}") from error


# -- shapes --------------------------------------------------------------------------------------------------------------


def _has_shape(family: str, answer: str, entry: Entry) -> bool:
    if answer == str(entry.get("answer")).strip():
        return True
    # The answer and its numbers may not be far longer than those of question and reference, and its exponents may not be large.
    own = f"{entry.get('question')} {entry.get('answer')}"
    if len(answer) > 10 * len(own) + 1000:
        return False
    longest = max(map(len, _DIGITS.findall(own)), default=0)
    if any(len(digits) > _MAX_DIGITS + longest for digits in _DIGITS.findall(answer)) or _LARGE_EXPONENT.search(answer):
        return False
    shape = _SHAPES.get(family, _reads_as)
    if isinstance(shape, re.Pattern):
        return shape.fullmatch(answer) is not None
    return shape(answer, str(entry.get("answer")).strip())


def _reads_as(answer: str, reference: str, order: Callable[[list[str]], list[str]] = list, tolerance: float = 1e-3) -> bool:
    """Return whether two texts have the same words, signs and numbers, ignoring case, blanks, commas, quotes and rounding."""
    given, wanted = (order(_READ.findall(re.sub(r"([-+])\s+(?=\d)", r"\1", text.casefold()))) for text in (answer, reference))
    if len(given) != len(wanted):
        return False
    different = [pair for pair in zip(given, wanted, strict=True) if pair[0] != pair[1]]
    return all(
        all(map(_READ_NUMBER.fullmatch, pair)) and math.isclose(*map(float, pair), rel_tol=tolerance) for pair in different
    )


def _same_share(answer: str, reference: str) -> bool:
    """Return whether two probabilities, each a decimal or a fraction, differ by at most a thousandth."""
    given, wanted = parse_quantity(answer), parse_quantity(reference)
    return given is not None and wanted is not None and abs(given.value - wanted.value) <= abs(wanted.value) / 1000


def _is_json(answer: str, reference: str) -> bool:
    """Return whether the answer is one JSON list or object and nothing else, or the reference."""
    try:
        return isinstance(json.loads(answer), list | dict)
    except (ValueError, RecursionError):
        return _reads_as(answer, reference)


def _statements(text: str) -> list[str]:
    parts = re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+", text.strip().rstrip(".").casefold())
    return sorted(" ".join(part.split()) for part in parts if part)


def _expression(answer: str, _reference: str) -> bool:
    """Return whether it is one algebraic expression of numbers, one-letter variables and usual functions, safe to evaluate."""
    if len(answer) > _MAX_EXPRESSION_CHARS or not answer.isascii():
        return False
    known = _OPERATORS | _FUNCTIONS
    if any(not (each in known or each[0].isdigit() or (len(each) == 1 and each.isalpha())) for each in _TOKEN.findall(answer)):
        return False
    try:
        return _magnitude(ast.parse(answer.strip().replace("^", "**"), mode="eval").body) <= _MAX_MAGNITUDE
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False


def _magnitude(node: ast.expr) -> float:
    """Return a bound on the digits or the polynomial degree of an expression's value.

    Raises:
        ValueError: `_expression` does not allow this expression.
    """
    match node:
        case ast.Constant(value=int() | float() as value):
            return math.log10(abs(value) + 1) + 1
        case ast.Name():
            return 1.0
        case ast.UnaryOp(operand=operand):
            return _magnitude(operand)
        case ast.Call(args=args):
            # Only exp grows, and exp of a large number is refused by the rule for exponents.
            inner = max(map(_magnitude, args), default=0.0)
            if inner > _MAX_EXPONENT_DIGITS + 1:
                raise ValueError("a function of a large number")
            return float(10.0**inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            if any(isinstance(each, ast.Pow) for each in ast.walk(right)) or _magnitude(right) > _MAX_EXPONENT_DIGITS + 1:
                raise ValueError("a large exponent")
            numbers = [float(each.value) for each in ast.walk(right) if isinstance(each, ast.Constant)]  # type: ignore[arg-type]
            return _magnitude(left) * max([1.0, *numbers])
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return max(_magnitude(left), _magnitude(right)) + 1
        case ast.BinOp(left=left, right=right):
            return _magnitude(left) + _magnitude(right)
    raise ValueError("not an expression")


_SHAPES: dict[str, Shape | re.Pattern[str]] = {
    # The scorer compares truth values of texts: every text is true.
    "game_of_life_halting": lambda answer, reference: answer.casefold() == reference.casefold(),
    # Only the reference itself is right: the scorer passes other texts to eval, and gives less than 1 for them anyway.
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix"), lambda _answer, _reference: False),
    # The scorer uses eval or sympy's parser, and there are many right answers.
    "n_queens": re.compile(r"[Q_\s]+"),
    **dict.fromkeys(
        ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"), _expression
    ),
    # The scorer searches the whole text for an answer, or ignores what it cannot parse.
    "fraction_simplification": re.compile(r"\$?\s*(?:\\[dt]?frac\s*\{\s*-?\d+\s*\}\s*\{\s*-?\d+\s*\}|-?\d+\s*/\s*-?\d+)\s*\$?"),
    "knights_knaves": lambda answer, reference: _statements(answer) == _statements(reference),
    "quantum_lock": re.compile(r"\w+(?:\s*(?:→|->|,)\s*\w+)*"),
    "sokoban": re.compile(r"[UDLR]+"),
    **dict.fromkeys(("letter_jumble", "survo"), lambda answer, reference: len(answer.split()) == len(reference.split())),
    # Several answers are right; the scorer checks their parts.
    "kakurasu": re.compile(r"[01\s]+"),
    "palindrome_generation": re.compile(r"[A-Za-z]+"),
    "prime_factorization": re.compile(r"\d+(?:\s*\u00d7\s*\d+)*"),
    "rubiks_cube": re.compile(r"(?![\s\S]*\d\d)[A-Za-z2'\s]{1,4000}"),
    "rush_hour": re.compile(r"(?:[A-Z][+-]\d\s*){1,300}"),
    "shortest_path": re.compile(r"[a-z\s]+"),
    "tower_of_hanoi": re.compile(r"(?:Move disk \d+ from Peg \d+ to Peg \d+\s*)+"),
    "word_ladder": re.compile(r"[A-Za-z]+(?:\s*,\s*[A-Za-z]+)*"),
    "cryptarithm": re.compile(r"[A-Z]=\d(?:\s*,\s*[A-Z]=\d)*"),
    "propositional_logic": lambda answer, _: len(answer) <= _MAX_EXPRESSION_CHARS,
    **dict.fromkeys(
        ("boxnet", "codeio", "graph_color", "group_anagrams", "jugs", "knight_swap", "palindrome_partitioning"), _is_json
    ),
    # One answer is right: in any order, exactly, or as a fraction or decimal.
    "polynomial_equations": partial(_reads_as, order=sorted),
    "number_sorting": partial(_reads_as, tolerance=0),
    **dict.fromkeys(("coin_flip", "dice"), _same_share),
}

_TUPLE_FAMILIES = frozenset({"arc_agi", "rearc"})
"""Their scorers compare tuples, which JSON turns into lists."""


def _tuples(value: Any) -> Any:  # noqa: ANN401 - plain nested JSON values
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
