"""Identities and seeds: what makes one sample itself, on every process and after every restart.

A group is one prompt issued once to the generators; it has `group_size` members, numbered from 0. `attempt` counts how often a
member was handed out (1 at first; more after a generator died). A repeat of a member that the ledger already holds is harmless.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else.

    Args:
        parts: For a sample: run seed, group id, member index. The attempt is left out on purpose: the same request under the
            same weights gives the same tokens.

    Returns:
        An integer in [0, 2^63).
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
