r"""Whether two LaTeX expressions have the same value: by numbers where these decide, else by sympy, for at most `BUDGET_S`.

math-verify reads the LaTeX. Both expressions are then evaluated at a few points, with `_DIGITS` digits and every value on the way
within bounds. Values that differ somewhere make them different. Values that agree everywhere make them equal, where no branch of
a function of letters can hide a difference (`_Evaluation.is_conclusive`). Only what is left is sympy's to simplify.

The budget is of CPU time, so a busy machine judges as an idle one does. It ends the reading, the evaluation and sympy alike.
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
"""Where one of them has a decimal fraction, as math-verify compares those; of values below 1, relative to them."""
_POINTS = ((1.3171, 0.7193, 2.2361, 1.8437), (-0.8391, 1.6180, -1.4427, 0.5772), (2.0946, -1.2021, 0.3679, -2.5029))
_LETTERS = re.compile(r"(?<![\\A-Za-z])([A-Za-z])\s+(?=[A-Za-z])")
"""Letters with blanks between them, which math-verify takes for words and leaves out."""
_ENTIRE = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp"}
_BRANCHED = {"asin", "acos", "atan", "Abs"}


class _OutOfTime(BaseException):
    """Passes every `except Exception` of sympy."""


def within_budget(judge: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """Return `judge`, which says False where it would take more than `BUDGET_S` of CPU time. Only in the main thread."""
    import mpmath  # type: ignore[import-untyped] # noqa: PLC0415
    from sympy.core.cache import clear_cache  # type: ignore[import-untyped] # noqa: PLC0415
    from sympy.core.parameters import global_parameters  # type: ignore[import-untyped] # noqa: PLC0415

    def stop(*_: object) -> None:
        raise _OutOfTime

    def bounded(answer: str, reference: str) -> bool:
        before = signal.signal(signal.SIGVTALRM, stop)
        try:
            # Again and again, in case a bare `except` takes the first.
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


def build_same_expression() -> Callable[[str, str], bool]:
    """Return a function of two LaTeX expressions or relations that says whether they are equal.

    Raises:
        RewardError: math-verify is not installed.
    """
    math_verify = import_optional("math_verify", "answer_match")
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        # Both warn at every call that their own timeouts are off.
        logging.getLogger(name).setLevel(logging.ERROR)

    def same_expression(answer: str, reference: str) -> bool:
        given, wanted = _parse(answer), _parse(reference)
        if not given or not wanted:
            return False
        decided = _same_values(given[0], wanted[0]) if len(given) == len(wanted) == 1 else None
        return bool(math_verify.verify(wanted, given, timeout_seconds=None)) if decided is None else decided

    return same_expression


@lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    import math_verify  # noqa: PLC0415 - optional

    found = math_verify.parse(
        "$" + _LETTERS.sub(r"\1", text) + "$",
        [math_verify.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return [each for each in found if not isinstance(each, str)]


class _Undecided(Exception):  # noqa: N818 - not an error
    """The value is out of bounds or of an unknown function."""


class _Evaluation:
    """Values of sympy expressions at one point, and whether they are all that can be said about the expressions."""

    def __init__(self, mp: Any, letters: dict[str, Any]) -> None:  # noqa: ANN401 - mpmath has no types
        self.mp, self.letters = mp, letters
        self.is_conclusive = True
        self.has_floats = False

    def value(self, expression: Any) -> Any:  # noqa: ANN401 - sympy and mpmath have no types
        """Return the value at the point; raise _Undecided where it has none within bounds."""
        kind, parts = type(expression).__name__, expression.args
        if expression.is_Symbol:
            return self.mp.j if expression.name == "i" else self.letters[expression.name]
        if expression.is_Rational:
            result = self._bounded(self.mp.mpf(expression.p) / expression.q)
        elif expression.is_Float:
            self.has_floats = True
            result = self.mp.mpf(str(expression))
        elif kind in ("Pi", "Exp1", "ImaginaryUnit"):
            return {"Pi": self.mp.pi, "Exp1": self.mp.e, "ImaginaryUnit": self.mp.j}[kind] * 1
        else:
            values = [self.value(part) for part in parts]
            if kind == "Add":
                result = self.mp.fsum(values)
                if abs(result) < self.mp.mpf(10) ** (30 - _DIGITS) * max(map(abs, values)):
                    result = self.mp.mpf(0)
            elif kind == "Mul":
                result = self.mp.mpf(1)
                for each in values:
                    result = self._bounded(result * each)
            elif kind == "Pow":
                self.is_conclusive &= parts[1].is_Integer or not parts[0].free_symbols
                result = values[0] ** values[1]
            elif kind == "log":
                self.is_conclusive &= not expression.free_symbols
                result = self.mp.log(values[0]) / (self.mp.log(values[1]) if len(values) > 1 else 1)
            elif kind in _ENTIRE | _BRANCHED:
                self.is_conclusive &= kind in _ENTIRE or not expression.free_symbols
                result = self.mp.fabs(values[0]) if kind == "Abs" else getattr(self.mp, kind)(values[0])
            elif kind == "factorial" and parts[0].is_Integer:
                result = self.mp.factorial(values[0])
            elif kind == "UnevaluatedExpr":
                result = values[0]
            else:
                raise _Undecided
        return self._bounded(result)

    def _bounded(self, value: Any) -> Any:  # noqa: ANN401 - as above
        """Check a value's size, and take off an imaginary part that is rounding: the sign of it would choose a branch."""
        size = abs(value)
        if size and not _LEAST < size < _MOST:
            raise _Undecided
        return value.real if abs(value.imag) < size * self.mp.mpf(10) ** (10 - _DIGITS) else value


def _same_values(given: Any, wanted: Any) -> bool | None:  # noqa: ANN401 - as above
    """Return whether two sympy expressions are the same as far as their values tell; None: ask sympy."""
    import mpmath  # noqa: PLC0415 - comes with sympy
    import sympy  # type: ignore[import-untyped] # noqa: PLC0415 - comes with math-verify

    if not isinstance(given, sympy.Expr) or not isinstance(wanted, sympy.Expr):
        return None
    names = sorted({symbol.name for symbol in given.free_symbols | wanted.free_symbols})
    is_conclusive = True
    with mpmath.workdps(_DIGITS):
        for point in _POINTS if names else _POINTS[:1]:
            letters = {name: mpmath.mpf(point[index % 4]) + mpmath.mpf(index // 4) / 7 for index, name in enumerate(names)}
            evaluation = _Evaluation(mpmath.mp, letters)
            try:
                first, second = evaluation.value(given), evaluation.value(wanted)
            except (_Undecided, ArithmeticError, ValueError, TypeError, KeyError, AttributeError):
                is_conclusive = False
                continue
            largest = max(abs(first), abs(second))
            close = mpmath.mpf(10) ** -_SAME_DIGITS * largest
            if evaluation.has_floats:
                is_conclusive, close = False, max(_FLOAT_TOLERANCE * min(largest, 1), mpmath.mpf(1e-9) * largest)
            if abs(first - second) > close:
                return False
            is_conclusive &= evaluation.is_conclusive
    return True if is_conclusive else None
