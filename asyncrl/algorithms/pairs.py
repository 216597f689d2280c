"""Preference pairs from the rewards of one group.

Pure; called by algorithms/screening.py, for the buffer (is there a pair?) and for packing (which samples are it?).
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.algorithm import PreferenceConfig

Pair = tuple[int, int]
"""(index of the chosen member, index of the rejected one)."""


def choose_pairs(rewards: Mapping[int, float], config: PreferenceConfig) -> tuple[Pair, ...]:
    """Return the pairs of a group; no member is in two of them.

    `best_worst` pairs the best with the worst member, the first by index among equals, where their rewards differ. `threshold`
    pairs the first member that is good enough with the first that is bad enough, the second with the second, and so on, up to
    `max_pairs_per_group`.

    Args:
        rewards: Member index to reward.
        config: `pairs`, the thresholds and `max_pairs_per_group` are read.

    Source: best against worst as in online DPO (arXiv 2402.04792, two samples) and iterative DPO (arXiv 2312.16682).
    """
    if config.pairs == "best_worst":
        return _best_and_worst(rewards)
    in_order = sorted(rewards)
    chosen = [index for index in in_order if rewards[index] >= config.chosen_at_least]
    rejected = [index for index in in_order if rewards[index] <= config.rejected_at_most]
    return tuple(zip(chosen, rejected, strict=False))[: config.max_pairs_per_group]


def _best_and_worst(rewards: Mapping[int, float]) -> tuple[Pair, ...]:
    if len(set(rewards.values())) < 2:
        return ()
    in_order = sorted(rewards)
    return ((max(in_order, key=rewards.__getitem__), min(in_order, key=rewards.__getitem__)),)
