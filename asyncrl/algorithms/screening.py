"""Which members of a scored group are trained, in which update, and whether the group is trained at all.

The one place for these decisions: the buffer drops groups without a training signal and counts the age of trained tokens only;
packing makes masks and pairs. Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from asyncrl.config.algorithm import AlgorithmConfig, PreferenceConfig
from asyncrl.schema.samples import ScoredGroup

NO_SPREAD = "no spread"
"""Every member has the same reward, so advantages within the group are 0."""
NO_PAIR = "no pair"
"""No two members make a preference pair."""
TRUNCATED = "truncated"
"""Every member was cut off by the length limit, so none is trained."""


class Member(msgspec.Struct, frozen=True, gc=False):
    """The fields of a scored member that screening reads."""

    index: int
    reward: float
    truncated: bool


class Screen(msgspec.Struct, frozen=True):
    """The algorithm's rules for groups; stored with every step, so that a repeated step uses the same rules."""

    drop_equal: bool = False
    """Drop groups whose members have equal rewards (dynamic sampling)."""
    mask_truncated: bool = False
    greedy_index: int = -1
    """The member that is only a baseline; -1: none."""
    preference: PreferenceConfig | None = None
    """For DPO: only paired members are trained; None: no DPO."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Screen:
        """Return the screen of a config."""
        return cls(
            drop_equal=algorithm.dynamic_sampling,
            mask_truncated=algorithm.mask_truncated,
            greedy_index=algorithm.group_size if algorithm.has_greedy_baseline else -1,
            preference=algorithm.preference if algorithm.kind == "dpo" else None,
        )


def members_of(group: ScoredGroup) -> tuple[Member, ...]:
    """Return a scored group's members."""
    return tuple(Member(scored.sample.index, scored.reward, scored.sample.finish_reason == "length") for scored in group.members)


def pairs_among(members: Sequence[Member], screen: Screen) -> tuple[Pair, ...]:
    """Return the preference pairs; none without DPO."""
    if screen.preference is None:
        return ()
    return choose_pairs({member.index: member.reward for member in _whole(members, screen)}, screen.preference)


def trained_members(members: Sequence[Member], screen: Screen) -> tuple[int, ...]:
    """Return the indices of the members whose tokens are trained, ascending.

    The greedy baseline, truncated members (if they are masked) and, with DPO, members without a pair are excluded. A group whose
    members are all truncated is trained completely: the buffer passes such a group on only if it has no other.
    """
    if screen.preference is not None:
        return tuple(sorted(index for pair in pairs_among(members, screen) for index in pair))
    sampled = [member for member in members if member.index != screen.greedy_index]
    return tuple(sorted(member.index for member in _whole(sampled, screen) or sampled))


def surely_trained(members: Sequence[Member], screen: Screen) -> tuple[int, ...]:
    """Return the indices of the members that are trained in any case, even if the group's other members are not known yet.

    With DPO there are none: a later member may replace another in a pair.
    """
    if screen.preference is not None:
        return ()
    return tuple(member.index for member in _whole(members, screen) if member.index != screen.greedy_index)


def objection(members: Sequence[Member], screen: Screen) -> str:
    """Return the reason why this group should not be trained, or an empty string.

    Source: DAPO (arXiv 2503.14476), section 3.2 (dynamic sampling) and 3.4 (overlong filtering).
    """
    if screen.preference is not None:
        return "" if pairs_among(members, screen) else NO_PAIR
    if not _whole([member for member in members if member.index != screen.greedy_index], screen):
        return TRUNCATED
    if screen.drop_equal and len({member.reward for member in members}) == 1:
        return NO_SPREAD
    return ""


def _whole(members: Sequence[Member], screen: Screen) -> list[Member]:
    return [member for member in members if not (screen.mask_truncated and member.truncated)]


Pair = tuple[int, int]
"""(index of the chosen member, index of the rejected one)."""


def choose_pairs(rewards: Mapping[int, float], config: PreferenceConfig) -> tuple[Pair, ...]:
    """Return the pairs of a group; each member is in at most one.

    `best_worst` pairs the best with the worst member if their rewards differ; among equals the first by index. `threshold`
    pairs the first member that is good enough with the first that is bad enough, the second with the second, and so on, up to
    `max_pairs_per_group`.

    Args:
        rewards: Member index to reward.
        config: `pairs`, the thresholds and `max_pairs_per_group` are read.

    Source: best against worst as in online DPO (arXiv 2402.04792, two samples) and iterative DPO (arXiv 2312.16682).
    """
    in_order = sorted(rewards)
    if config.pairs == "best_worst":
        is_pair = len(set(rewards.values())) > 1
        return ((max(in_order, key=rewards.__getitem__), min(in_order, key=rewards.__getitem__)),) if is_pair else ()
    chosen = [index for index in in_order if rewards[index] >= config.chosen_at_least]
    rejected = [index for index in in_order if rewards[index] <= config.rejected_at_most]
    return tuple(zip(chosen, rejected, strict=False))[: config.max_pairs_per_group]


def updates_of_groups(group_ids: Iterable[int], minibatches: int) -> dict[int, int]:
    """Return the update of each group; updates count from 0, and each has at least one group.

    Args:
        group_ids: Groups of the trained samples, in the batch's order; may repeat.
        minibatches: Maximum number of updates (`learner.minibatches`).
    """
    groups = list(dict.fromkeys(group_ids))
    num_updates = min(minibatches, len(groups))
    # Group i is in the last update j that begins, at floor(j * groups / updates), no later than i.
    return {group_id: ((place + 1) * num_updates - 1) // len(groups) for place, group_id in enumerate(groups)}
