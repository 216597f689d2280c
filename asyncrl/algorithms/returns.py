"""Recursions over the tokens of a sample: discounted returns, GAE, V-trace, with the conventions of several projects. No torch.

Every one of them is `backwards`, y_t = x_t + f_t y_{t+1}, on rows without gaps. Tokens the policy did not write (tool output,
padding) are taken out first (`skip`: verl, AReaL), so they cost no discount, or stand in as zeros (`discount`: OpenRLHF).
Also here: DAPO's penalty on a sample's reward for its length.

Legend: S rows, T tokens of a row, right-padded; L at most T, trained tokens of a row moved to the left.

Invariants: whatever stands at a masked token (NaN too) changes nothing; results are exactly 0 there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import AdvantageOutputs, FloatArray

Mask = NDArray[np.bool_]
Gaps = Literal["skip", "discount"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within plus and minus this before `exp`; the same as in types.py, which needs torch."""


def rewards_on_last_tokens(rewards: FloatArray, mask: Mask) -> FloatArray:
    """Return [S, T], each sample's reward [S] on its last trained token and 0 elsewhere; `mask` [S, T] says which are trained."""
    rewards_ST = np.zeros(mask.shape)
    if not mask.any():
        return rewards_ST
    trained_S = np.flatnonzero(mask.any(axis=1))
    last_S = mask.shape[1] - 1 - np.argmax(mask[trained_S, ::-1], axis=1)
    rewards_ST[trained_S, last_S] = rewards[trained_S]
    return rewards_ST


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Rows [S, T] without gaps; a row may hold several episodes, one after the other."""

    rewards: FloatArray
    """[S, T]."""
    values: FloatArray
    """[S, T], estimate in the state before each token."""
    next_values: FloatArray
    """[S, T], estimate in the state after each token; where a row goes on, `values` one token later."""
    bootstrap_discounts: FloatArray
    """[S, T], gamma, and 0 where the episode terminated: nothing comes after."""
    trace_discounts: FloatArray
    """[S, T], gamma, and 0 where the episode ended: terminated, or cut and worth `next_values`."""

    @classmethod
    def of_episodes(
        cls, rewards: FloatArray, values: FloatArray, next_values: FloatArray, done: Mask, terminated: Mask, gamma: float
    ) -> Trajectories:
        """Return rows whose episodes end where `done` says, and are worth nothing more where `terminated` says (torchrl)."""
        return cls(rewards, values, next_values, np.where(terminated, 0.0, gamma), np.where(done, 0.0, gamma))

    @classmethod
    def of_discounts(
        cls, rewards: FloatArray, values: FloatArray, bootstrap_values: FloatArray, discounts: FloatArray
    ) -> Trajectories:
        """Return rows whose `discounts` [S, T] are 0 where an episode ends; `bootstrap_values` [S] come last (IMPALA)."""
        next_values = np.concatenate([values, bootstrap_values[:, None]], axis=1)[:, 1:]
        return cls(rewards, values, next_values, discounts, discounts)

    @classmethod
    def of_samples(cls, rewards: FloatArray, values: FloatArray, gamma: float) -> Trajectories:
        """Return rows of one episode each, worth nothing after the last token."""
        discounts = np.broadcast_to(np.float64(gamma), rewards.shape)
        return cls.of_discounts(rewards, values, np.zeros(len(rewards)), discounts)


def discounted_returns(token_rewards: FloatArray, mask: Mask, gamma: float) -> FloatArray:
    """Return G_t = r_t + gamma G of the next trained token, [S, T].

    Args:
        token_rewards: [S, T].
        mask: [S, T]; what is false is skipped and costs no discount.
        gamma: In [0, 1].

    Source: REINFORCE++ (arXiv 2501.03262); verl `compute_reinforce_plus_plus_outcome_advantage`.
    """
    rewards_SL = to_the_left(token_rewards, mask)
    return to_places(backwards(rewards_SL, np.broadcast_to(np.float64(gamma), rewards_SL.shape)), mask)


def gae(
    token_rewards: FloatArray, values: FloatArray, mask: Mask, *, gamma: float, gae_lambda: float, gaps: Gaps
) -> AdvantageOutputs:
    """Return GAE's advantages and returns over the trained tokens of samples that end with their last token.

    Args:
        token_rewards: [S, T].
        values: [S, T].
        mask: [S, T].
        gamma: Discount, in [0, 1].
        gae_lambda: In [0, 1].
        gaps: `skip`: the next state of a token is that of the next trained token (verl, AReaL); `discount`: each masked token
            between has value and reward 0 and costs a factor gamma * lambda (OpenRLHF).

    Source: Schulman et al. (arXiv 1506.02438), equation 16; verl `compute_gae_advantage_return`; OpenRLHF
    `get_advantages_and_returns`.
    """
    arrange, put_back = _GAPS[gaps]
    of_rows = gae_of_trajectories(Trajectories.of_samples(arrange(token_rewards, mask), arrange(values, mask), gamma), gae_lambda)
    assert of_rows.returns is not None
    return AdvantageOutputs(put_back(of_rows.advantages, mask), put_back(of_rows.returns, mask))


def gae_of_trajectories(rows: Trajectories, gae_lambda: float) -> AdvantageOutputs:
    """Return A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V(next) - V, and the returns A + V.

    Source: Schulman et al. (arXiv 1506.02438), equation 16; ends of episodes as in torchrl `generalized_advantage_estimate`.
    """
    deltas = rows.rewards + rows.bootstrap_discounts * rows.next_values - rows.values
    advantages = backwards(deltas, gae_lambda * rows.trace_discounts)
    return AdvantageOutputs(advantages, advantages + rows.values)


def vtrace(
    token_rewards: FloatArray,
    values: FloatArray,
    log_ratios: FloatArray,
    mask: Mask,
    *,
    gamma: float,
    rho_bar: float | None,
    c_bar: float | None,
) -> AdvantageOutputs:
    """Return V-trace's advantages and targets over the trained tokens of samples that end with their last one; gaps are skipped.

    Args:
        token_rewards: [S, T].
        values: [S, T].
        log_ratios: [S, T], log of learner / behaviour.
        mask: [S, T].
        gamma: In [0, 1].
        rho_bar: As in `vtrace_of_trajectories`; the advantage is weighted with it too.
        c_bar: As in `vtrace_of_trajectories`.

    Source: IMPALA (arXiv 1802.01561), section 4.1.
    """
    rows = Trajectories.of_samples(to_the_left(token_rewards, mask), to_the_left(values, mask), gamma)
    of_rows = vtrace_of_trajectories(rows, to_the_left(log_ratios, mask), rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=rho_bar)
    assert of_rows.returns is not None
    return AdvantageOutputs(to_places(of_rows.advantages, mask), to_places(of_rows.returns, mask))


def vtrace_of_trajectories(
    rows: Trajectories, log_ratios: FloatArray, *, rho_bar: float | None, c_bar: float | None, pg_rho_bar: float | None
) -> AdvantageOutputs:
    """Return V-trace's policy-gradient advantages, and its targets vs as `returns`.

    With w = learner / behaviour: vs_t - V_t = min(w, rho_bar) delta_t + gamma min(w, c_bar) (vs_{t+1} - V_{t+1});
    advantage = min(w, pg_rho_bar) (r_t + gamma vs_{t+1} - V_t). After an end, vs_{t+1} is `next_values`.

    Args:
        rows: [S, T].
        log_ratios: [S, T], log w.
        rho_bar: Bound of the weight of a temporal difference: which policy's value is learned; None: unbounded.
        c_bar: Bound of the weight that carries a difference back: how far it reaches; None: unbounded.
        pg_rho_bar: Bound of the advantage's weight (torchbeast); torchrl takes rho_bar; None: unbounded.

    Source: IMPALA (arXiv 1802.01561), equation 1 and section 4.2; torchrl `vtrace_advantage_estimate`; torchbeast
    `vtrace.from_importance_weights`.
    """
    weights = np.exp(np.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    deltas = _bounded(weights, rho_bar) * (rows.rewards + rows.bootstrap_discounts * rows.next_values - rows.values)
    targets = rows.values + backwards(deltas, rows.trace_discounts * _bounded(weights, c_bar))
    next_targets = rows.next_values.copy()
    next_targets[:, :-1] = np.where(rows.trace_discounts[:, :-1] > 0.0, targets[:, 1:], rows.next_values[:, :-1])
    differences = rows.rewards + rows.bootstrap_discounts * next_targets - rows.values
    return AdvantageOutputs(_bounded(weights, pg_rho_bar) * differences, targets)


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


def zeroed(values: FloatArray, mask: Mask) -> FloatArray:
    """Return `values` with exact zeros where `mask` is false."""
    return np.where(mask, values, 0.0)


_GAPS: dict[str, tuple[Callable[[FloatArray, Mask], FloatArray], Callable[[FloatArray, Mask], FloatArray]]] = {
    "skip": (to_the_left, to_places),
    "discount": (zeroed, zeroed),
}


def _places_on_the_left(mask: Mask) -> Mask:
    lengths_S = mask.sum(axis=1)
    places: Mask = np.arange(lengths_S.max(initial=0)) < lengths_S[:, None]
    return places


def _bounded(weights: FloatArray, bound: float | None) -> FloatArray:
    return weights if bound is None else np.minimum(weights, bound)


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
