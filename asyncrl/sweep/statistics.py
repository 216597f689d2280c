"""Confidence intervals and tests for a few seeds, in numpy; every random draw has a fixed seed.

With n seeds the smallest two-sided p of a paired test is 2 / 2^n: six are needed for one comparison at 0.05, more for several.
A bootstrap interval over few seeds is somewhat too narrow (a 95 % interval of 8 seeds covers about 90 %): claims rely on p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError

Values = Sequence[float] | NDArray[np.float64]

DRAWS = 100_000
MOST_EXACT = 16
"""Up to this number of pairs all 2^n signs are tried."""


def bootstrap_interval(values: Values, repeats: int = 10_000) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean, of 95 %.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    sample = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(sample), size=(repeats, len(sample)))
    low, high = np.quantile(sample[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def sign_flip_p(differences: Values) -> float:
    """Return the two-sided p of paired differences: how often random signs give a sum that is as far from 0.

    Exact up to MOST_EXACT pairs; above that, from DRAWS random signs that include the observed ones.
    Source: Fisher, The Design of Experiments, 1935, section 21.
    """
    sizes = np.asarray(differences, dtype=np.float64)
    observed = abs(sizes.sum())
    if len(sizes) <= MOST_EXACT:
        bits = (np.arange(1 << len(sizes))[:, None] >> np.arange(len(sizes))) & 1
    else:
        bits = np.random.default_rng(0).integers(2, size=(DRAWS, len(sizes)), dtype=np.int8)
    # Sums of the same numbers in another order differ in their last bits.
    as_far = np.count_nonzero(abs((1 - 2 * bits) @ sizes) >= observed - 1e-12 * abs(sizes).sum())
    return float(as_far / len(bits) if len(sizes) <= MOST_EXACT else (as_far + 1) / (len(bits) + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for the whole family, in the given order.

    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979.
    """
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(raised), 1.0) if len(raised) else raised
    return [float(p) for p in adjusted]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm compared with the baseline, by seed."""

    arm: str
    num: int
    """Number of seeds with a value."""
    mean: float
    interval: tuple[float, float]
    """95 % interval of the mean."""
    pairs: int
    """Number of seeds that the baseline has too; 0 for the baseline itself."""
    difference: float
    """Mean difference from the baseline over the pairs; 0.0 without pairs."""
    p: float
    """Two-sided p of the pairs; 1.0 without pairs."""
    family_p: float
    """The same p, corrected for the number of arms."""


def compare(arms: Mapping[str, Mapping[int, float]], baseline: str = "") -> list[Comparison]:
    """Compare arms by their values, which are paired by seed.

    Args:
        arms: By name, values by seed; an arm without values is left out.
        baseline: Name of the arm that the others are compared with; empty: the first.

    Returns:
        In the given order: means with bootstrap intervals, p by `sign_flip_p`, corrected by `holm`.

    Raises:
        ConfigError: `baseline` is not an arm with values.
    """
    arms = {arm: values for arm, values in arms.items() if values}
    baseline = baseline or next(iter(arms), "")
    if baseline not in arms:
        raise ConfigError(f"there is no arm {baseline!r} with values to compare with; there are {sorted(arms) or 'none'}")
    base = arms[baseline]
    pairs = {
        arm: [values[seed] - base[seed] for seed in values if seed in base] for arm, values in arms.items() if arm != baseline
    }
    p_values = {arm: sign_flip_p(differences) for arm, differences in pairs.items() if differences}
    family = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    made = []
    for arm, values in arms.items():
        numbers, differences = list(values.values()), pairs.get(arm) or []
        mean, difference = float(np.mean(numbers)), float(np.mean(differences)) if differences else 0.0
        p, family_p = p_values.get(arm, 1.0), family.get(arm, 1.0)
        made.append(Comparison(arm, len(numbers), mean, bootstrap_interval(numbers), len(differences), difference, p, family_p))
    return made
