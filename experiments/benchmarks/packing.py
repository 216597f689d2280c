"""Packing at the size of a large step: 1,024 log-normal lengths into rows of 16,384 tokens.

Lengths: mean about 2,650, sigma 1, cut at the row, drawn anew with another seed each round. `fill` is the share of the rows'
tokens that are samples, over all rounds; `bins_vs_bound` the rows used over the fewest that the sum of lengths allows.
`idle_R_ranks` is the share of their time in which R ranks wait for each other (packing/pack.py). All of these are of
`pack_units`, with which a run packs a step; each length is a group of its own. `pack_ms` is the time of one call.

`no_groups` is the rows that the packer of samples (`pack_lengths`) makes of the same lengths, over those of `pack_units`. No
prompt is shared here, so where the rows are as many, the learner trains as many samples a second.

`shared_prefix_GROUPSxMEMBERS` is how many times fewer tokens are computed where a group is packed whole, its prompt counted once,
than where every sample is packed with its own; `bench learner` measures the same as speed.
"""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np

from asyncrl.packing.pack import CostModel, Unit, idle_share, pack_lengths, pack_units
from benchmarks.harness import BenchResult, ratio, seconds_of

DEFAULT_ROUNDS = 25
NUM_LENGTHS, CAPACITY = 1024, 16_384
NUM_RANKS = (2, 8)
COST = CostModel.of_model(hidden_size=896)
GROUPS = (((4, 8, 149, 9.0), 4.0), ((64, 4, 6, 3.6), 1.3))
"""Groups, members, tokens of a prompt and on average of a response; the least that sharing must save."""
FILL_GOAL, PACK_MS_GOAL, BINS_GOAL, NO_GROUPS_GOAL = 0.99, 5.0, 1.02, 0.98


def run(rounds: int = 0) -> BenchResult:
    """Pack `rounds` (0: 25) sets of lengths."""
    sets = [_units(seed) for seed in range(rounds or DEFAULT_ROUNDS)]
    pack_units(sets[0], CAPACITY)
    times_ms = [1e3 * seconds_of(partial(pack_units, units, CAPACITY)) for units in sets]
    rows = sum(len(pack_units(units, CAPACITY)) for units in sets)
    lengths = [[unit.tails[0] for unit in units] for units in sets]
    tokens = [sum(each) for each in lengths]
    figures = {"mean_length_tokens": sum(tokens) / (len(sets) * NUM_LENGTHS), "rows_per_step": rows / len(sets)}
    for ranks in NUM_RANKS:
        shares = [idle_share([row.cost for row in pack_units(units, CAPACITY, ranks)], ranks) for units in sets]
        figures[f"idle_{ranks}_ranks"] = statistics.mean(shares)
    ratios = {
        "fill": ratio(sum(tokens) / (CAPACITY * rows), FILL_GOAL),
        "pack_ms": ratio(statistics.median(times_ms), PACK_MS_GOAL, at_least=False),
        "bins_vs_bound": ratio(rows / sum(-(-total // CAPACITY) for total in tokens), BINS_GOAL, at_least=False),
        "no_groups": ratio(sum(len(pack_lengths(each, CAPACITY)) for each in lengths) / rows, NO_GROUPS_GOAL),
    }
    for (groups, members, prompt, response), goal in GROUPS:
        ratios[f"shared_prefix_{groups}x{members}"] = ratio(_tokens_saved(groups, members, prompt, response), goal)
    return BenchResult("packing", figures, ratios)


def _units(seed: int) -> list[Unit]:
    drawn = np.random.default_rng(seed).lognormal(np.log(2_800) - 0.5, 1.0, NUM_LENGTHS)
    lengths = np.clip(drawn, 1, CAPACITY).astype(int).tolist()
    return [Unit(0, (length,), 0.0, (COST.of(length),)) for length in lengths]


def _tokens_saved(groups: int, members: int, prompt: int, response: float) -> float:
    """Return the tokens of samples with a prompt each, over those in the rows of whole groups."""
    drawn = np.random.default_rng(0).uniform(response - 1, response + 1, (groups, members)).round().astype(int)
    units = [Unit(prompt, tuple(tails), 0.0, (0.0,) * members) for tails in drawn.tolist()]
    rows = pack_units(units, CAPACITY)
    computed = sum(prompt * len({part // members for part in row.members}) for row in rows) + int(drawn.sum())
    return float((drawn + prompt).sum()) / computed
