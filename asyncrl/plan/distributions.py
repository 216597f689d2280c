"""Durations and lengths as a simulation draws them: given by a shape, or measured.

Written on the command line as `fixed:0.3`, `uniform:1:9`, `lognormal:MEAN:SIGMA[:MOST]`, `exponential:MEAN`.
Called by plan/scenario.py and plan/simulate.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError

Draw = Callable[[], float]
_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Distribution:
    """One shape with its parameters, or the values that were measured."""

    kind: str
    parameters: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    """Of kind `measured`: drawn from with replacement; of kind `recorded`: one after the other, and drawn from after the last."""

    @property
    def mean(self) -> float:
        """Return the mean; a log-normal's before it is cut."""
        match self.kind:
            case "measured" | "recorded":
                return float(np.mean(self.values))
            case "uniform":
                return sum(self.parameters) / 2
        return self.parameters[0]

    def drawer(self, rng: np.random.Generator) -> Draw:
        """Return a function that draws one value after the other, in blocks from `rng`."""
        block: list[float] = []

        def draw() -> float:
            if not block:
                block.extend(self._draw(rng, _AT_ONCE).tolist())
            return block.pop()

        if self.kind == "recorded":
            block.extend(reversed(self.values))
        if self.kind == "fixed":
            value = self.parameters[0]
            return lambda: value
        return draw

    def _draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        match self.kind, self.parameters:
            case "uniform", (low, high):
                return rng.uniform(low, high, count)
            case "exponential", (mean,):
                return rng.exponential(mean, count)
            case "lognormal", (mean, sigma, *most):
                drawn = rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
                return np.minimum(drawn, most[0]) if most else drawn
        return rng.choice(np.asarray(self.values), count)


_PARAMETERS = {"fixed": (1, 1), "uniform": (2, 2), "exponential": (1, 1), "lognormal": (2, 3)}


def fixed(value: float) -> Distribution:
    """Return the distribution that is always `value`."""
    return Distribution("fixed", (value,))


def measured(values: Sequence[float]) -> Distribution:
    """Return the distribution of what was measured.

    Raises:
        ConfigError: Nothing was.
    """
    if not values:
        raise ConfigError("a measured distribution needs at least one value")
    return Distribution("measured", values=tuple(map(float, values)))


def recorded(values: Sequence[float]) -> Distribution:
    """Return what was measured, in its order: a simulation of that very run then meets the same draws.

    Raises:
        ConfigError: Nothing was measured.
    """
    return Distribution("recorded", values=measured(values).values)


def parse_distribution(text: str) -> Distribution:
    """Return what `lognormal:64:1` names; a number alone is fixed.

    Raises:
        ConfigError: No such shape, or other parameters.
    """
    kind, *rest = text.split(":") if ":" in text else ("fixed", text)
    try:
        numbers = tuple(map(float, rest))
    except ValueError:
        numbers = ()
    least, most = _PARAMETERS.get(kind, (1, 0))
    if not least <= len(numbers) <= most or any(not math.isfinite(number) or number < 0 for number in numbers):
        raise ConfigError(
            f"a distribution is a number, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEAN:SIGMA[:MOST]; got {text!r}"
        )
    if kind in {"lognormal", "exponential"} and numbers[0] == 0:
        raise ConfigError(f"the mean of {text!r} must be above 0")
    return Distribution(kind, numbers)
