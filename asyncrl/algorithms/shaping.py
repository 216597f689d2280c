"""Penalties on a sample's reward, pure numbers. No torch: the reward stage computes them too.

Called by reward/overlong.py (`kind = "overlong"`).
"""

from __future__ import annotations


def overlong_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """Return DAPO's soft punishment of long answers, in [-1, 0].

    0 up to max_tokens - buffer_tokens, then down linearly to -1 at max_tokens, and -1 beyond. A caller scales it.

    Args:
        length: Generated tokens.
        max_tokens: The longest answer wanted.
        buffer_tokens: Over how many tokens the penalty grows; at least 1.

    Source: DAPO (arXiv 2503.14476), equation 13; OpenRLHF `apply_overlong_penalty`.
    """
    return max(overlong_penalty_unfloored(length, max_tokens, buffer_tokens), -1.0)


def overlong_penalty_unfloored(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """Return the same without its floor: it goes on falling beyond max_tokens.

    Source: AReaL `reward_overlong_penalty`; verl `DAPORewardManager`.
    """
    excess = length - (max_tokens - buffer_tokens)
    return -max(excess, 0) / buffer_tokens
