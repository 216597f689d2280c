"""Recursions over the tokens of a sample: discounted returns, GAE, V-trace. No torch.

Every one of them is `backwards`, y_t = x_t + f_t y_{t+1}, on rows without gaps: tokens the policy did not write (tool output,
padding) are taken out first, so they cost no discount (verl, AReaL; OpenRLHF discounts through them). Also here: DAPO's penalty
on a sample's reward for its length.

Legend: S rows, T tokens of a row, right-padded; L at most T, trained tokens of a row moved to the left.

Invariants: whatever stands at a masked token (NaN too) changes nothing; results are exactly 0 there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import AdvantageOutputs, FloatArray

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


def gae(token_rewards: FloatArray, values: FloatArray, mask: Mask, *, gamma: float, gae_lambda: float) -> AdvantageOutputs:
    """Return GAE's advantages and returns over the trained tokens of samples that are worth nothing after the last of them.

    A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, and the returns A + V.

    Args:
        token_rewards: [S, T].
        values: [S, T], of the state before each token.
        mask: [S, T]; the next state of a token is that of the next trained token.
        gamma: Discount, in [0, 1].
        gae_lambda: In [0, 1].

    Source: Schulman et al. (arXiv 1506.02438), equation 16; verl `compute_gae_advantage_return`, AReaL; torchrl
    `generalized_advantage_estimate`.
    """
    values_SL = to_the_left(values, mask)
    deltas_SL = to_the_left(token_rewards, mask) + gamma * _next(values_SL) - values_SL
    advantages_SL = backwards(deltas_SL, np.full_like(deltas_SL, gamma * gae_lambda))
    return AdvantageOutputs(to_places(advantages_SL, mask), to_places(advantages_SL + values_SL, mask))


def vtrace(
    token_rewards: FloatArray,
    values: FloatArray,
    log_ratios: FloatArray,
    mask: Mask,
    *,
    gamma: float,
    rho_bar: float,
    c_bar: float,
) -> AdvantageOutputs:
    """Return V-trace's policy-gradient advantages, and its targets vs as `returns`, over the trained tokens; gaps as in `gae`.

    With w = learner / behaviour: vs_t - V_t = min(w, rho_bar) delta_t + gamma min(w, c_bar) (vs_{t+1} - V_{t+1});
    advantage = min(w, rho_bar) (r_t + gamma vs_{t+1} - V_t).

    Args:
        token_rewards: [S, T].
        values: [S, T].
        log_ratios: [S, T], log w.
        mask: [S, T].
        gamma: In [0, 1].
        rho_bar: Bound of the weight of a temporal difference: which policy's value is learned; and of the advantage's weight.
        c_bar: Bound of the weight that carries a difference back: how far it reaches.

    Source: IMPALA (arXiv 1802.01561), equation 1 and section 4.2; torchrl `vtrace_advantage_estimate`.
    """
    rewards_SL, values_SL = to_the_left(token_rewards, mask), to_the_left(values, mask)
    weights_SL = np.exp(np.clip(to_the_left(log_ratios, mask), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    rho_SL, c_SL = np.minimum(weights_SL, rho_bar), np.minimum(weights_SL, c_bar)
    deltas_SL = rho_SL * (rewards_SL + gamma * _next(values_SL) - values_SL)
    targets_SL = values_SL + backwards(deltas_SL, gamma * c_SL)
    advantages_SL = rho_SL * (rewards_SL + gamma * _next(targets_SL) - values_SL)
    return AdvantageOutputs(to_places(advantages_SL, mask), to_places(targets_SL, mask))


def _next(values: FloatArray) -> FloatArray:
    """Return [S, L], each token's right neighbour, 0 after the last."""
    return np.concatenate([values[:, 1:], np.zeros_like(values[:, :1])], axis=1)


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
