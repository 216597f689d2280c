"""Which update of a step trains which group: whole groups, in the batch's order, in parts of about equal size.

Pure Python. Called by packing/tensors.py, so that no row has samples of two updates, and by learner/rows.py, which decides.
"""

from __future__ import annotations

from collections.abc import Iterable


def updates_of_groups(group_ids: Iterable[int], minibatches: int) -> dict[int, int]:
    """Return the update of each group; the first is 0, and none is without a group.

    Args:
        group_ids: Of what is trained, in the batch's order; a group may come more than once.
        minibatches: Most updates there may be (`learner.minibatches`).
    """
    groups = list(dict.fromkeys(group_ids))
    num_updates = min(minibatches, len(groups))
    # Group i is in the last update j that begins, at floor(j * groups / updates), no later than i.
    return {group_id: ((place + 1) * num_updates - 1) // len(groups) for place, group_id in enumerate(groups)}
