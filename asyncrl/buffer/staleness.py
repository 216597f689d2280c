"""How old the tokens of one step are: figures for people and metrics, from version counts alone.

Staleness of a token at step k is k minus its version; that of a sample is that of its oldest trained token. The in-flight part of
a sample's staleness is newest minus oldest version (it grew while the sample was generated), the in-queue part is k minus newest.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

VersionCounts = tuple[tuple[int, int], ...]
"""(version, number of trained tokens) of one sample, ascending by version, never empty: all that staleness needs to know."""


class StalenessFigures(msgspec.Struct, frozen=True):
    """Of the trained tokens of one step, and of the samples that have some."""

    num_samples: int
    num_tokens: int
    token_max: int
    """Versions; 0 for no token."""
    metrics: dict[str, float]
    """By name. Tokens that are masked for being older than eta are counted apart; all others are 0 for no sample."""


def staleness_figures(
    step: int, samples: Iterable[VersionCounts], *, mask_below: int = 0, queue_s: Sequence[float] = ()
) -> StalenessFigures:
    """Return the figures of a step.

    Args:
        step: The optimizer step, which trains version `step`.
        samples: Version counts of every scored sample of the step.
        mask_below: Tokens of a version under this one are masked.
        queue_s: Seconds each group was ready before it was taken.
    """
    tokens: dict[int, int] = {}
    oldest: list[int] = []
    in_flight: list[int] = []
    in_queue: list[int] = []
    masked = 0
    for counts in samples:
        trained = counts
        if counts[0][0] < mask_below:
            masked += sum(count for version, count in counts if version < mask_below)
            trained = tuple(pair for pair in counts if pair[0] >= mask_below)
            if not trained:
                continue
        for version, count in trained:
            tokens[step - version] = tokens.get(step - version, 0) + count
        first, last = trained[0][0], trained[-1][0]
        oldest.append(step - first)
        in_flight.append(last - first)
        in_queue.append(step - last)
    num_tokens, num_samples = sum(tokens.values()), max(len(in_flight), 1)
    metrics = {
        "staleness/masked_tokens": float(masked),
        "staleness/token_mean": sum(age * count for age, count in tokens.items()) / max(num_tokens, 1),
        "staleness/token_max": float(max(tokens, default=0)),
        "staleness/mean": sum(oldest) / num_samples,
        "staleness/max": float(max(oldest, default=0)),
        "staleness/in_flight_mean": sum(in_flight) / num_samples,
        "staleness/in_flight_max": float(max(in_flight, default=0)),
        "staleness/in_queue_mean": sum(in_queue) / num_samples,
        "staleness/in_queue_max": float(max(in_queue, default=0)),
        "queue/wait_mean_s": sum(queue_s) / max(len(queue_s), 1),
        "queue/wait_max_s": max(queue_s, default=0.0),
    }
    metrics |= {f"staleness/histogram/{age}": count / num_tokens for age, count in sorted(tokens.items())}
    return StalenessFigures(len(in_flight), num_tokens, max(tokens, default=0), metrics)
