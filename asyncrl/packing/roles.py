"""What each sample of a step is there for: trained, a baseline, half of a preference pair. Decided before anything is laid out.

Invariants: with preferences only paired samples have a role; pairs are numbered over the step in the order of the groups; a
sample that is not trained has loss mask 0 and still counts in its group. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.algorithms.screening import Screen, members_of, pairs_among, trained_members
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import ScoredGroup, ScoredSample


class Role(msgspec.Struct, frozen=True, gc=False):
    """One sample of the step."""

    scored: ScoredSample
    is_trained: bool = True
    is_greedy: bool = False
    pair: int = -1
    is_chosen: bool = False


def roles_of(step: int, groups: Sequence[ScoredGroup], screen: Screen) -> list[Role]:
    """Return the samples that belong into the batch, in the order of the groups and by member index.

    Raises:
        ConfigError: The step is to train preferences and no group has a pair.
    """
    roles: list[Role] = []
    for group in groups:
        members = members_of(group)
        if screen.preference is None:
            trained, greedy = set(trained_members(members, screen)), screen.greedy_index
            roles += [Role(one, one.sample.index in trained, one.sample.index == greedy) for one in group.members]
            continue
        by_index, paired = {one.sample.index: one for one in group.members}, {}
        for pair, (chosen, rejected) in enumerate(pairs_among(members, screen), start=len(roles) // 2):
            paired[chosen] = Role(by_index[chosen], pair=pair, is_chosen=True)
            paired[rejected] = Role(by_index[rejected], pair=pair)
        roles += [paired[index] for index in sorted(paired)]
    if screen.preference is not None and not roles:
        raise ConfigError(
            f"step {step} has nothing to train: none of its {len(groups)} groups has a preference pair; the buffer gives a step "
            "only groups that have one, so these come from elsewhere: leave them out (algorithm.preference says what a pair is)"
        )
    return roles


def units_of(roles: Sequence[Role]) -> list[list[list[int]]]:
    """Return the samples of each group, as positions in `roles`, in parts that must share a row: a sample, or both of a pair."""
    units: dict[tuple[int, bytes], dict[int, list[int]]] = {}
    for position, role in enumerate(roles):
        sample = role.scored.sample
        parts = units.setdefault((sample.group_id, sample.prompt_ids), {})
        parts.setdefault(role.pair if role.pair >= 0 else -1 - position, []).append(position)
    return [list(parts.values()) for parts in units.values()]
