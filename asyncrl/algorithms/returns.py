"""Recursions over the tokens of a sample: discounted returns, and what GAE and V-trace (advantages.py) are made of. No torch.

Every one of them is `backwards`, y_t = x_t + f_t y_{t+1}, on rows without gaps: tokens the policy did not write (tool output,
padding) are taken out first, so they cost no discount (verl, AReaL; OpenRLHF discounts through them). Also here: DAPO's penalty
on a sample's reward for its length.

Legend: S rows, T tokens of a row, right-padded; L at most T, trained tokens of a row moved to the left.

Invariants: whatever stands at a masked token (NaN too) changes nothing; results are exactly 0 there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within plus and minus this before `exp`: e^20 is far past every cap, and e^90 is infinite in float32."""


def rewards_on_last_tokens(rewards: FloatArray, mask: Mask) -> FloatArray:
    """Return [S, T], each sample's reward [S] on its last trained token and 0 elsewhere; `mask` [S, T] says which are trained."""
    rewards_ST = np.zeros(mask.shape)
    if not mask.any():
        return rewards_ST
    trained_S = np.flatnonzero(mask.any(axis=1))
    last_S = mask.shape[1] - 1 - np.argmax(mask[trained_S, ::-1], axis=1)
    rewards_ST[trained_S, last_S] = rewards[trained_S]
    return rewards_ST


def discounted_returns(token_rewards: FloatArray, mask: Mask, gamma: float) -> FloatArray:
    """Return G_t = r_t + gamma G of the next trained token, [S, T].

    Args:
        token_rewards: [S, T].
        mask: [S, T]; what is false is skipped and costs no discount.
        gamma: In [0, 1].

    Source: REINFORCE++ (arXiv 2501.03262); verl `compute_reinforce_plus_plus_outcome_advantage`.
    """
    rewards_SL = to_the_left(token_rewards, mask)
    return to_places(backwards(rewards_SL, np.full_like(rewards_SL, gamma)), mask)


def backwards(terms: FloatArray, factors: FloatArray) -> FloatArray:
    """Return y_t = x_t + f_t y_{t+1} along the last axis, 0 after its end; x, f and y are [S, T]."""
    terms_TS, factors_TS = np.ascontiguousarray(terms.T), factors.T
    sums_TS = np.empty_like(terms_TS)
    sum_S = np.zeros(terms.shape[0])
    for token in reversed(range(terms.shape[1])):
        sum_S = terms_TS[token] + factors_TS[token] * sum_S
        sums_TS[token] = sum_S
    return np.ascontiguousarray(sums_TS.T)


def to_the_left(values: FloatArray, mask: Mask) -> FloatArray:
    """Return [S, L], the entries where `mask` is true moved to the left of their rows, 0 after them; L is the most of a row."""
    places = _places_on_the_left(mask)
    moved = np.zeros(places.shape)
    moved[places] = values[mask]
    return moved


def to_places(values: FloatArray, mask: Mask) -> FloatArray:
    """Undo `to_the_left`: return [S, T], 0 where `mask` is false."""
    placed = np.zeros(mask.shape)
    placed[mask] = values[_places_on_the_left(mask)]
    return placed


def _places_on_the_left(mask: Mask) -> Mask:
    lengths_S = mask.sum(axis=1)
    places: Mask = np.arange(lengths_S.max(initial=0)) < lengths_S[:, None]
    return places


def overlong_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """Return DAPO's soft punishment of long answers, in [-1, 0].

    0 up to max_tokens - buffer_tokens, then down linearly to -1 at max_tokens, and -1 beyond. A caller scales it.

    Args:
        length: Generated tokens.
        max_tokens: The longest answer wanted.
        buffer_tokens: Over how many tokens the penalty grows; at least 1.

    Source: DAPO (arXiv 2503.14476), equation 13; OpenRLHF `apply_overlong_penalty` (AReaL and verl go on falling beyond -1).
    """
    excess = length - (max_tokens - buffer_tokens)
    return max(-max(excess, 0) / buffer_tokens, -1.0)
