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
    if screen.preference is None:
        return [role for group in groups for role in _sampled(group, screen)]
    roles: list[Role] = []
    for group in groups:
        roles += _paired(group, screen, len(roles) // 2)
    if not roles:
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


def _sampled(group: ScoredGroup, screen: Screen) -> list[Role]:
    trained = set(trained_members(members_of(group), screen))
    return [Role(scored, scored.sample.index in trained, scored.sample.index == screen.greedy_index) for scored in group.members]


def _paired(group: ScoredGroup, screen: Screen, first_pair: int) -> list[Role]:
    by_index = {scored.sample.index: scored for scored in group.members}
    roles = {}
    for pair, (chosen, rejected) in enumerate(pairs_among(members_of(group), screen), start=first_pair):
        roles[chosen] = Role(by_index[chosen], pair=pair, is_chosen=True)
        roles[rejected] = Role(by_index[rejected], pair=pair)
    return [roles[index] for index in sorted(roles)]
