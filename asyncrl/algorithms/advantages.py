"""Advantages of samples or of single tokens. No torch: computed from rewards, and a critic's values, before any loss.

Three kinds: samples compared with the other samples of their prompt (grpo, grpo_batch, dr_grpo, rloo, opo,
reinforce_pp_baseline), samples alone (remax, reward), and tokens (reinforce_pp, gae, vtrace). The last kind uses `backwards`,
y_t = x_t + f_t y_{t+1}, on rows without gaps: tokens that the policy did not write (tool output, padding) are removed first and
add no discount (as in verl and AReaL; OpenRLHF discounts through them). Also here: DAPO's penalty for long samples.

Legend: S samples of one step, in any order; G groups; T the most response tokens of a sample, right-padded; L <= T: trained
tokens moved to the left. A trained token is one that the policy wrote and the step trains, so not tool output or padding.

Invariants: the value at an untrained token (even NaN) changes nothing, and its own advantage is exactly 0; the order of samples
and groups does not matter; in the first kind a group of one has advantage 0, because there is nothing to compare with (verl and
OpenRLHF use its reward); samples without a trained token count in their group's mean, except in `opo`, which weights by trained
tokens; with `whiten`, `grpo_batch` or `reinforce_pp*` all samples of a step influence each other, else only one group's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.diagnostics import FloatArray, bounded_exp
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.algorithm_table import ADVANTAGE_RULES
from asyncrl.user_code import load_own, wrong_shape


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """S samples of one step. Only `rewards`, `group_ids` and `mask` are always set."""

    rewards: FloatArray
    """[S], one number per sample."""
    group_ids: NDArray[np.int64]
    """[S]."""
    mask: NDArray[np.bool_]
    """[S, T], true on trained tokens."""
    token_rewards: FloatArray | None = None
    """[S, T], if a penalty changed them; None: `rewards` on the last trained token of each sample, 0 elsewhere."""
    values: FloatArray | None = None
    """[S, T], the critic's estimate in the state before each token."""
    log_ratios: FloatArray | None = None
    """[S, T], log of proximal / behaviour (`vtrace`)."""
    greedy_rewards: FloatArray | None = None
    """[S], reward of the greedy sample of each sample's group (`remax`)."""


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """Parameters of advantages; each function reads the fields that it uses."""

    epsilon: float = 1e-6
    """Added to a group's standard deviation."""
    gamma: float = 1.0
    gae_lambda: float = 1.0
    vtrace_rho: float = 1.0
    """Bound of the importance weight in V-trace's temporal differences."""
    vtrace_c: float = 1.0
    """Bound of the importance weight that cuts V-trace's traces."""
    whiten: bool | Literal["samples"] = False
    """Whether to whiten over all trained tokens (True), over samples, or not at all."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> AdvantageConfig:
        """Return the part of a run's config that advantages read."""
        same = {name: getattr(algorithm, name) for name in ("gamma", "gae_lambda", "vtrace_rho", "vtrace_c", "whiten")}
        return cls(epsilon=algorithm.advantage_epsilon, **same)


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """One number per trained token."""

    advantages: FloatArray
    """[S, T]."""
    returns: FloatArray | None = None
    """[S, T], the critic's training targets; only from advantages that need a critic."""


Advantage = Callable[[AdvantageInputs, AdvantageConfig], AdvantageOutputs]


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return (R - group mean) / (unbiased group standard deviation + epsilon) at every trained token.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1; unbiased deviation as in verl, OpenRLHF, AReaL, TRL.
    """
    groups = Groups.of(inputs.group_ids)
    centred_S = groups.minus_mean(inputs.rewards)
    variance_S = groups.sum(centred_S**2) / np.maximum(groups.sizes - 1, 1)
    advantages_S = centred_S / (np.sqrt(variance_S) + config.epsilon)
    return _of_samples(advantages_S, inputs, config, groups)


def grpo_batch(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return (R - group mean) / (unbiased standard deviation of the step's rewards + epsilon) at every trained token.

    Source: Lite PPO (arXiv 2508.08221), section 4; TRL `scale_rewards="batch"`; AReaL `mean_level: group, std_level: batch`.
    """
    groups = Groups.of(inputs.group_ids)
    deviation = inputs.rewards.std(ddof=1) if len(inputs.rewards) > 1 else 0.0
    return _of_samples(groups.minus_mean(inputs.rewards) / (deviation + config.epsilon), inputs, config, groups)


def dr_grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R - group mean at every trained token.

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    groups = Groups.of(inputs.group_ids)
    return _of_samples(groups.minus_mean(inputs.rewards), inputs, config, groups)


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R - mean of the other samples of the group at every trained token.

    Source: Kool et al. 2019; Ahmadian et al. (arXiv 2402.14740), equation 8.
    """
    groups = Groups.of(inputs.group_ids)
    centred_S = groups.minus_mean(inputs.rewards)
    return _of_samples(centred_S * groups.sizes / np.maximum(groups.sizes - 1, 1), inputs, config, groups)


def opo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R - sum(L_j R_j) / sum(L_j) over the group at every trained token; L_j is a sample's number of trained tokens.

    Source: OPO (arXiv 2505.23585), the optimal baseline if the squared norm of a gradient grows with length.
    """
    groups = Groups.of(inputs.group_ids)
    lengths_S = inputs.mask.sum(axis=1).astype(np.float64)
    return _of_samples(groups.minus_mean(inputs.rewards, lengths_S), inputs, config, groups)


def reinforce_pp(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return the discounted return of each trained token, whitened over all trained tokens of the step.

    Source: REINFORCE++ (arXiv 2501.03262); verl `compute_reinforce_plus_plus_outcome_advantage`.
    """
    returns_ST = discounted_returns(_token_rewards(inputs), inputs.mask, config.gamma)
    return AdvantageOutputs(whitened(returns_ST, inputs.mask, True))


def reinforce_pp_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R - group mean at every trained token, whitened over all trained tokens of the step.

    Source: REINFORCE++ (arXiv 2501.03262), baseline form; unbiased variance as in verl (OpenRLHF's is biased).
    """
    return dr_grpo(inputs, replace(config, whiten=True))


def remax(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R - reward of the group's greedy sample at every trained token.

    Source: ReMax (arXiv 2310.10505), algorithm 1.
    """
    assert inputs.greedy_rewards is not None, "remax needs greedy_rewards"
    return _of_samples(inputs.rewards - inputs.greedy_rewards, inputs, config)


def reward(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R at every trained token.

    Source: REINFORCE without baseline (Williams 1992).
    """
    return _of_samples(inputs.rewards, inputs, config)


def gae(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return GAE over the trained tokens, gaps skipped, and the returns; only the advantages are whitened.

    A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, and the returns A + V. The next state of a token is
    that of the next trained token; after the last one the value is 0.

    Source: Schulman et al. (arXiv 1506.02438), equation 16; over tokens as in verl `compute_gae_advantage_return` and AReaL;
    torchrl `generalized_advantage_estimate`.
    """
    assert inputs.values is not None, "gae needs values"
    mask, gamma, values_SL = inputs.mask, config.gamma, to_the_left(inputs.values, inputs.mask)
    deltas_SL = to_the_left(_token_rewards(inputs), mask) + gamma * _next(values_SL) - values_SL
    advantages_SL = backwards(deltas_SL, np.full_like(deltas_SL, gamma * config.gae_lambda))
    advantages_ST = whitened(to_places(advantages_SL, mask), mask, config.whiten)
    return AdvantageOutputs(advantages_ST, to_places(advantages_SL + values_SL, mask))


def vtrace(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return V-trace over the trained tokens, gaps skipped, and its value targets; only the advantages are whitened.

    With w = proximal / behaviour: vs_t - V_t = min(w, rho) delta_t + gamma min(w, c) (vs_{t+1} - V_{t+1}), delta as in `gae`;
    advantage = min(w, rho) (r_t + gamma vs_{t+1} - V_t). `vtrace_rho` bounds the weight of a temporal difference (this sets which
    policy's value is learned) and of the advantage; `vtrace_c` bounds the weight that propagates a difference to earlier tokens.
    With a loss or correction that also weights tokens, the advantage's weight would count twice.

    Source: IMPALA (arXiv 1802.01561), equation 1 and section 4.2; torchrl `vtrace_advantage_estimate`.
    """
    assert inputs.values is not None, "vtrace needs values"
    assert inputs.log_ratios is not None, "vtrace needs log_ratios"
    mask, gamma, values_SL = inputs.mask, config.gamma, to_the_left(inputs.values, inputs.mask)
    rewards_SL = to_the_left(_token_rewards(inputs), mask)
    weights_SL = bounded_exp(to_the_left(inputs.log_ratios, mask))
    rho_SL, c_SL = np.minimum(weights_SL, config.vtrace_rho), np.minimum(weights_SL, config.vtrace_c)
    targets_SL = values_SL + backwards(rho_SL * (rewards_SL + gamma * _next(values_SL) - values_SL), gamma * c_SL)
    advantages_SL = rho_SL * (rewards_SL + gamma * _next(targets_SL) - values_SL)
    return AdvantageOutputs(whitened(to_places(advantages_SL, mask), mask, config.whiten), to_places(targets_SL, mask))


def _next(values: FloatArray) -> FloatArray:
    """Return [S, L], each token's right neighbour, 0 after the last."""
    return np.concatenate([values[:, 1:], np.zeros_like(values[:, :1])], axis=1)


ADVANTAGES: dict[str, Advantage] = {name: globals()[name] for name in ADVANTAGE_RULES}
"""Advantages by the names of their rows in config/algorithm_table.py."""


@functools.cache
def load_advantage(name: str) -> Advantage:
    """Return the advantage of this name, or a user's own function, whose file runs once per process and not at each step.

    Args:
        name: A name in ADVANTAGES, `module:function` or `file.py:function`.

    Raises:
        ConfigError: The user's function cannot be imported.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    return load_own(name, "algorithm.advantage", AdvantageOutputs, _fault_in)


def _fault_in(inputs: AdvantageInputs, outputs: AdvantageOutputs) -> str:
    """Return what is wrong with the result of a user's function; empty if nothing is."""
    for name in ("advantages", "returns"):
        values = getattr(outputs, name)
        if values is None and name == "returns":
            continue
        if not isinstance(values, np.ndarray):
            return f"{name} must be a numpy array [S, T], got {type(values).__name__}"
        if fault := wrong_shape(name, values, inputs.mask.shape, "[S, T]"):
            return fault
        if not np.isfinite(values[inputs.mask]).all():
            return f"{name} are not finite at {int((~np.isfinite(values[inputs.mask])).sum())} trained tokens"
    return ""


def _of_samples(
    advantages_S: FloatArray, inputs: AdvantageInputs, config: AdvantageConfig, groups: Groups | None = None
) -> AdvantageOutputs:
    """Broadcast over trained tokens; groups of one get 0 and are not part of the whitening."""
    told_ST = inputs.mask if groups is None else inputs.mask & (groups.sizes > 1)[:, None]
    return AdvantageOutputs(whitened(np.where(told_ST, advantages_S[:, None], 0.0), told_ST, config.whiten))


def _token_rewards(inputs: AdvantageInputs) -> FloatArray:
    """Return [S, T]: the given token rewards, or each sample's reward on its last trained token."""
    if inputs.token_rewards is not None:
        return inputs.token_rewards
    return rewards_on_last_tokens(inputs.rewards, inputs.mask)


@dataclass(frozen=True, slots=True)
class Groups:
    """Which samples belong to the same prompt."""

    numbers: NDArray[np.intp]
    """[S], index of each sample's group, from 0 to G - 1."""
    firsts: NDArray[np.intp]
    """[S], the first sample of each sample's group."""
    sizes: FloatArray
    """[S], number of samples in each sample's group."""

    @classmethod
    def of(cls, group_ids: NDArray[np.int64]) -> Groups:
        """Return the groups of samples with these ids [S]."""
        _, firsts_G, numbers_S, sizes_G = np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True)
        return cls(numbers_S, firsts_G[numbers_S], sizes_G[numbers_S].astype(np.float64))

    def sum(self, values: FloatArray) -> FloatArray:
        """Return [S], the sum of `values` [S] over each sample's group."""
        sums_S: FloatArray = np.bincount(self.numbers, weights=values)[self.numbers].astype(np.float64)
        return sums_S

    def minus_mean(self, values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
        """Return [S], `values` minus their group's mean, weighted by `weights` [S]; exactly 0 if a group's values are equal."""
        # Use distances from one member, because the rounded mean of equal values is not always equal to them.
        distances_S = values - values[self.firsts]
        if weights is None:
            return distances_S - self.sum(distances_S) / self.sizes
        totals_S = self.sum(weights)
        means_S: FloatArray = self.sum(weights * distances_S) / np.where(totals_S > 0, totals_S, 1.0)
        return distances_S - means_S


WHITEN_EPSILON = 1e-8
"""Keeps 1 / sqrt(variance) finite (verl)."""


def whitened(values: FloatArray, mask: NDArray[np.bool_], over: bool | Literal["samples"]) -> FloatArray:
    """Return (x - mean) / sqrt(unbiased variance + epsilon) at the tokens where `mask` is true, 0 elsewhere.

    Args:
        values: [S, T]; values where `mask` is false (even NaN) change nothing.
        mask: [S, T].
        over: Mean and variance are over tokens (True) or over samples, each by its mean; False: `values` are returned unchanged.

    Source: verl `masked_whiten`; by samples: TRL's RLOO, `normalize_advantages`.
    """
    if not over:
        return values
    if not mask.any():
        return np.zeros(mask.shape)
    # Use distances from one token, because the rounded mean of equal values is not always equal to them.
    distances_ST = np.where(mask, values - values[mask][0], 0.0)
    lengths_S = mask.sum(axis=1)
    of_samples = over == "samples"
    counted_N = distances_ST.sum(axis=1)[lengths_S > 0] / lengths_S[lengths_S > 0] if of_samples else distances_ST[mask]
    mean = counted_N.mean()
    variance = float(np.square(counted_N - mean).sum()) / max(len(counted_N) - 1, 1) + WHITEN_EPSILON
    return np.where(mask, (distances_ST - mean) / np.sqrt(variance), 0.0)


def rewards_on_last_tokens(rewards: FloatArray, mask: NDArray[np.bool_]) -> FloatArray:
    """Return [S, T], each sample's reward [S] on its last trained token and 0 elsewhere; `mask` [S, T] marks trained tokens."""
    rewards_ST = np.zeros(mask.shape)
    if not mask.any():
        return rewards_ST
    trained_S = np.flatnonzero(mask.any(axis=1))
    last_S = mask.shape[1] - 1 - np.argmax(mask[trained_S, ::-1], axis=1)
    rewards_ST[trained_S, last_S] = rewards[trained_S]
    return rewards_ST


def discounted_returns(token_rewards: FloatArray, mask: NDArray[np.bool_], gamma: float) -> FloatArray:
    """Return G_t = r_t + gamma G of the next trained token, [S, T].

    Args:
        token_rewards: [S, T].
        mask: [S, T]; tokens where it is false are skipped and add no discount.
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


def to_the_left(values: FloatArray, mask: NDArray[np.bool_]) -> FloatArray:
    """Return [S, L], the entries where `mask` is true moved to the left of their rows, 0 after them; L is the largest count."""
    places = _places_on_the_left(mask)
    moved = np.zeros(places.shape)
    moved[places] = values[mask]
    return moved


def to_places(values: FloatArray, mask: NDArray[np.bool_]) -> FloatArray:
    """Undo `to_the_left`: return [S, T], 0 where `mask` is false."""
    placed = np.zeros(mask.shape)
    placed[mask] = values[_places_on_the_left(mask)]
    return placed


def _places_on_the_left(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    lengths_S = mask.sum(axis=1)
    places: NDArray[np.bool_] = np.arange(lengths_S.max(initial=0)) < lengths_S[:, None]
    return places


def overlong_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """Return DAPO's soft penalty for long answers, in [-1, 0].

    0 up to max_tokens - buffer_tokens, then linear to -1 at max_tokens, and -1 beyond. The caller scales it.

    Args:
        length: Generated tokens.
        max_tokens: Desired maximum length.
        buffer_tokens: Number of tokens over which the penalty grows; at least 1.

    Source: DAPO (arXiv 2503.14476), equation 13; OpenRLHF `apply_overlong_penalty` (in AReaL and verl it decreases below -1).
    """
    excess = length - (max_tokens - buffer_tokens)
    return max(-max(excess, 0) / buffer_tokens, -1.0)
