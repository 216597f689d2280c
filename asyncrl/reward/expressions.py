r"""Compares the values of two LaTeX expressions: by numbers if these decide, otherwise by sympy, for at most `BUDGET_S`.

math-verify reads the LaTeX. Both expressions are then evaluated at a few points, with `_DIGITS` digits and every value on the way
within bounds. If values differ at a point, the expressions differ. If they agree at all points, the expressions are equal, unless
a branch of a function of letters can hide a difference (`_BRANCHED`). sympy decides only the remaining cases.

The budget is CPU time, so results are the same on a busy and an idle machine. It covers parsing, evaluation and sympy.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from asyncrl.reward.inputs import import_optional

BUDGET_S = 2.0
_DIGITS, _SAME_DIGITS = 400, 150
_MOST, _LEAST = 1e120, 1e-120
_FLOAT_TOLERANCE = 2e-6
"""The tolerance of math-verify if one of them has a decimal fraction; relative for values below 1."""
_POINTS = ((1.3171, 0.7193, 2.2361, 1.8437), (-0.8391, 1.6180, -1.4427, 0.5772), (2.0946, -1.2021, 0.3679, -2.5029))
_LETTERS = re.compile(r"(?<![\\A-Za-z])([A-Za-z])\s+(?=[A-Za-z])")
"""Letters with blanks between them, which math-verify would treat as words and ignore."""
_CONSTANTS = {"Pi": "pi", "Exp1": "e", "ImaginaryUnit": "j"}
_BRANCHED = {"log", "asin", "acos", "atan", "Abs"}
Equal = Callable[[str, str], bool]
"""(answer, reference) -> equal; both stripped and not empty."""
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "asin", "acos", "atan"}


class _OutOfTime(BaseException):
    """Ends the judging; as a BaseException it passes every `except Exception` of sympy."""


def within_budget(judge: Equal) -> Equal:
    """Return a version of `judge` that returns False after `BUDGET_S` of CPU time. It works only in the main thread.

    Raises:
        RewardError: math-verify is not installed.
    """
    import_optional("math_verify", "answer_match")
    import mpmath  # type: ignore[import-untyped] # noqa: PLC0415 - comes with sympy
    from sympy.core.cache import clear_cache  # type: ignore[import-untyped] # noqa: PLC0415 - comes with math-verify
    from sympy.core.parameters import global_parameters  # type: ignore[import-untyped] # noqa: PLC0415

    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        # They warn at every call that their own timeouts are off.
        logging.getLogger(name).setLevel(logging.ERROR)

    def stop(*_: object) -> None:
        raise _OutOfTime

    def bounded(answer: str, reference: str) -> bool:
        before = signal.signal(signal.SIGVTALRM, stop)
        try:
            # The timer repeats, in case a bare `except` catches the first exception.
            signal.setitimer(signal.ITIMER_VIRTUAL, BUDGET_S, 0.1)
            return judge(answer, reference)
        except _OutOfTime:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            # The code that was interrupted may have left the global state of sympy and mpmath changed.
            global_parameters.evaluate = True
            mpmath.mp.dps = 15
            clear_cache()
            _parse.cache_clear()
            return False
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    return bounded


def same_expression(answer: str, reference: str) -> bool:
    """Return whether two LaTeX expressions or relations are equal."""
    import math_verify  # noqa: PLC0415 - optional

    given, wanted = _parse(answer), _parse(reference)
    if not given or not wanted:
        return False
    decided = _same_values(given[0], wanted[0]) if len(given) == len(wanted) == 1 else None
    return bool(math_verify.verify(wanted, given, timeout_seconds=None)) if decided is None else decided


@lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    import math_verify  # noqa: PLC0415 - optional
    import sympy  # type: ignore[import-untyped] # noqa: PLC0415 - comes with math-verify

    found = math_verify.parse(
        "$" + _LETTERS.sub(r"\1", text) + "$",
        [math_verify.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    # sympy takes y for a constant, so dy/dx would be 0: such a derivative becomes a letter of its own.
    return [
        each.xreplace({part: sympy.Symbol(str(part)) for part in each.atoms(sympy.Derivative) if not part.doit()})
        if isinstance(each, sympy.Basic)
        else each
        for each in found
        if not isinstance(each, str)
    ]


class _Undecided(Exception):  # noqa: N818 - not an error
    """The value is out of bounds or has an unknown function."""


def _value(expression: Any, mp: Any, letters: dict[str, Any]) -> Any:  # noqa: ANN401 - sympy and mpmath have no types
    """Return the value of a sympy expression at one point; raise _Undecided if it has no value within bounds."""
    kind, parts = type(expression).__name__, expression.args
    if expression.is_Symbol:
        return mp.j if expression.name == "i" else letters[expression.name]
    if kind in _CONSTANTS:
        return getattr(mp, _CONSTANTS[kind]) * 1
    values = [_value(part, mp, letters) for part in parts]
    if expression.is_Rational:
        result = mp.mpf(expression.p) / expression.q
    elif expression.is_Float:
        result = mp.mpf(str(expression))
    elif kind == "Add":
        result = mp.fsum(values)
        if abs(result) < mp.mpf(10) ** (30 - _DIGITS) * max(map(abs, values)):
            result = mp.mpf(0)
    elif kind == "Mul":
        result = mp.mpf(1)
        for each in values:
            result = _bounded(result * each, mp)
    elif kind == "Pow":
        result = values[0] ** values[1]
    elif kind == "log":
        result = mp.log(values[0]) / (mp.log(values[1]) if len(values) > 1 else 1)
    elif kind == "Abs":
        result = mp.fabs(values[0])
    elif kind in _FUNCTIONS or (kind == "factorial" and parts[0].is_Integer):
        result = getattr(mp, kind)(values[0])
    elif kind == "UnevaluatedExpr":
        result = values[0]
    else:
        raise _Undecided
    return _bounded(result, mp)


def _bounded(value: Any, mp: Any) -> Any:  # noqa: ANN401 - as above
    """Check a value's size, and remove an imaginary part that is only rounding error: its sign would choose a branch."""
    size = abs(value)
    if size and not _LEAST < size < _MOST:
        raise _Undecided
    return value.real if abs(value.imag) < size * mp.mpf(10) ** (10 - _DIGITS) else value


def _same_values(given: Any, wanted: Any) -> bool | None:  # noqa: ANN401 - as above
    """Return whether two sympy expressions are equal by their values; None: sympy must decide."""
    import mpmath  # noqa: PLC0415 - comes with sympy
    import sympy  # type: ignore[import-untyped] # noqa: PLC0415 - comes with math-verify

    if not isinstance(given, sympy.Expr) or not isinstance(wanted, sympy.Expr):
        return None
    nodes = [node for expression in (given, wanted) for node in sympy.preorder_traversal(expression)]
    has_floats = any(node.is_Float for node in nodes)
    # A branch of a root, a logarithm or another such function of letters can hide a difference.
    is_conclusive = not has_floats and not any(
        node.free_symbols
        and (type(node).__name__ in _BRANCHED or (node.is_Pow and not node.exp.is_Integer and node.base.free_symbols))
        for node in nodes
    )
    names = sorted({symbol.name for symbol in given.free_symbols | wanted.free_symbols})
    with mpmath.workdps(_DIGITS):
        for point in _POINTS if names else _POINTS[:1]:
            letters = {name: mpmath.mpf(point[index % 4]) + mpmath.mpf(index // 4) / 7 for index, name in enumerate(names)}
            try:
                first, second = _value(given, mpmath.mp, letters), _value(wanted, mpmath.mp, letters)
            except (_Undecided, ArithmeticError, ValueError, TypeError, KeyError, AttributeError):
                is_conclusive = False
                continue
            largest = max(abs(first), abs(second))
            close = mpmath.mpf(10) ** -_SAME_DIGITS * largest
            if has_floats:
                close = max(_FLOAT_TOLERANCE * min(largest, 1), mpmath.mpf(1e-9) * largest)
            if abs(first - second) > close:
                return False
    return True if is_conclusive else None
