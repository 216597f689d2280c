"""Packing at the size of a large step: 1,024 log-normal lengths into rows of 16,384 tokens.

Lengths: mean about 2,650, sigma 1, cut at the row, drawn anew with another seed each round. `fill` is the share of the rows'
tokens that are samples, over all rounds; `bins_vs_bound` the rows used over the fewest that the sum of lengths allows.
`idle_R_ranks` is the share of their time in which R ranks wait for each other (packing/pack.py).

Groups: `shared_prefix_GROUPSxMEMBERS` is how many times fewer tokens are computed where a group is packed whole, its prompt
counted once, than where every sample is packed with its own. `no_groups` is the rows that the packer of groups makes of the
lengths above, each a group of its own, under those of the packer of samples. `bench learner` measures the same as speed.
"""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np

from asyncrl.packing.pack import CostModel, RankedRow, Unit, idle_share, num_bins_at_least, pack_lengths, pack_units
from benchmarks.harness import BenchResult, ratio, seconds_of

DEFAULT_ROUNDS = 25
NUM_LENGTHS = 1024
CAPACITY = 16_384
NUM_RANKS = (2, 8)
COST = CostModel.of_model(hidden_size=896)
FILL_GOAL, PACK_MS_GOAL, BINS_GOAL = 0.99, 5.0, 1.02
GROUPS = (((4, 8, 149, 9.0), 4.0), ((64, 4, 6, 3.6), 1.3))
"""Groups, members, tokens of a prompt and on average of a response; the least that sharing must save."""
NO_GROUPS_GOAL = 0.98


def run(rounds: int = 0) -> BenchResult:
    """Pack `rounds` (0: 25) sets of lengths."""
    sets = [_lengths(seed) for seed in range(rounds or DEFAULT_ROUNDS)]
    pack_lengths(sets[0], CAPACITY)
    times_ms = [1e3 * seconds_of(partial(pack_lengths, lengths, CAPACITY)) for lengths in sets]
    bins = sum(len(pack_lengths(lengths, CAPACITY)) for lengths in sets)
    bounds = sum(num_bins_at_least(lengths, CAPACITY) for lengths in sets)
    tokens = sum(map(sum, sets))
    ungrouped = sum(len(_packed(lengths, 1)) for lengths in sets)
    return BenchResult(
        bench="packing",
        figures={
            "mean_length_tokens": tokens / (len(sets) * NUM_LENGTHS),
            "rows_per_step": bins / len(sets),
            "pack_worst_ms": max(times_ms),
            **{
                f"idle_{ranks}_ranks": statistics.mean(
                    idle_share([row.cost for row in _packed(lengths, ranks)], ranks) for lengths in sets
                )
                for ranks in NUM_RANKS
            },
        },
        ratios={
            "fill": ratio(tokens / (CAPACITY * bins), FILL_GOAL),
            "pack_ms": ratio(statistics.median(times_ms), PACK_MS_GOAL, at_least=False),
            "bins_vs_bound": ratio(bins / bounds, BINS_GOAL, at_least=False),
            "no_groups": ratio(bins / ungrouped, NO_GROUPS_GOAL),
            **{
                f"shared_prefix_{groups}x{members}": ratio(_tokens_saved(groups, members, prompt, response), goal)
                for (groups, members, prompt, response), goal in GROUPS
            },
        },
    )


def _lengths(seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(2_800) - 0.5, 1.0, NUM_LENGTHS)
    lengths: list[int] = np.clip(drawn, 1, CAPACITY).astype(int).tolist()
    return lengths


def _packed(lengths: list[int], num_ranks: int) -> list[RankedRow]:
    """Pack samples of which none shares a prompt."""
    return pack_units([Unit(0, (length,), 0.0, (COST.of(length),)) for length in lengths], CAPACITY, num_ranks)


def _tokens_saved(groups: int, members: int, prompt: int, response: float) -> float:
    """Return the tokens of samples with a prompt each, over those in the rows of whole groups."""
    drawn = np.random.default_rng(0).uniform(response - 1, response + 1, (groups, members)).round().astype(int)
    units = [Unit(prompt, tuple(tails), 0.0, (0.0,) * members) for tails in drawn.tolist()]
    rows = pack_units(units, CAPACITY)
    computed = sum(prompt * len({part // members for part in row.members}) for row in rows) + int(drawn.sum())
    return float((drawn + prompt).sum()) / computed
