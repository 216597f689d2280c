"""How old the tokens of one step are: figures for people and metrics, from version counts alone.

Staleness of a token at step k is k minus its version; that of a sample is that of its oldest trained token. The in-flight part of
a sample's staleness is newest minus oldest version (it grew while the sample was generated), the in-queue part is k minus newest.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import field

VersionCounts = tuple[tuple[int, int], ...]
"""(version, number of trained tokens) of one sample, ascending by version, never empty: all that staleness needs to know."""


class StalenessFigures(msgspec.Struct, frozen=True):
    """Of the trained tokens of one step; masked ones are counted apart. All zero for no sample. Encoded by metrics' names."""

    num_samples: int = 0
    num_tokens: int = 0
    masked_tokens: int = field(default=0, name="staleness/masked_tokens")
    """Older than eta, weight 0 (policy `mask`)."""
    token_mean: float = field(default=0.0, name="staleness/token_mean")
    token_max: int = field(default=0, name="staleness/token_max")
    sample_mean: float = field(default=0.0, name="staleness/mean")
    sample_max: int = field(default=0, name="staleness/max")
    in_flight_mean: float = field(default=0.0, name="staleness/in_flight_mean")
    in_flight_max: int = field(default=0, name="staleness/in_flight_max")
    in_queue_mean: float = field(default=0.0, name="staleness/in_queue_mean")
    in_queue_max: int = field(default=0, name="staleness/in_queue_max")
    queue_mean_s: float = field(default=0.0, name="queue/wait_mean_s")
    """From `ready` to `taken`, over groups."""
    queue_max_s: float = field(default=0.0, name="queue/wait_max_s")
    token_histogram: dict[int, int] = {}
    """Staleness to number of trained tokens."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return those that are metrics, by name."""
        shares = {f"staleness/histogram/{age}": count / self.num_tokens for age, count in self.token_histogram.items()}
        return {name: float(value) for name, value in msgspec.to_builtins(self).items() if "/" in name} | shares


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
    num_tokens, num_samples = sum(tokens.values()), len(in_flight)
    return StalenessFigures(
        num_samples=num_samples,
        num_tokens=num_tokens,
        masked_tokens=masked,
        token_mean=sum(age * count for age, count in tokens.items()) / max(num_tokens, 1),
        token_max=max(tokens, default=0),
        sample_mean=sum(oldest) / max(num_samples, 1),
        sample_max=max(oldest, default=0),
        in_flight_mean=sum(in_flight) / max(num_samples, 1),
        in_flight_max=max(in_flight, default=0),
        in_queue_mean=sum(in_queue) / max(num_samples, 1),
        in_queue_max=max(in_queue, default=0),
        queue_mean_s=sum(queue_s) / max(len(queue_s), 1),
        queue_max_s=max(queue_s, default=0.0),
        token_histogram=dict(sorted(tokens.items())),
    )
