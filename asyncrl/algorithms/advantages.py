"""How good each sample, or each of its tokens, was. No torch: runs on rewards, and a critic's values, before any loss exists.

Three kinds: of samples against the others of their prompt (grpo, dr_grpo, rloo, opo, reinforce_pp_baseline), of samples alone
(remax, reward), of tokens (reinforce_pp, gae, vtrace; their recursions are in returns.py).

Legend: S samples, G groups, T tokens of a sample.

Invariants: order of samples and of groups does not matter; a group of one has advantage 0 in the first kind (nothing to compare
it with), unless `singleton_keeps_reward` says what verl does; samples without a trained token still count in their group's
mean; with `whiten`, all trained tokens of the step influence each other, else only samples of one group do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms import returns as recursions
from asyncrl.algorithms.advantage_types import Advantage, AdvantageConfig, AdvantageInputs, AdvantageOutputs, FloatArray
from asyncrl.config.algorithm_table import ADVANTAGE_RULES
from asyncrl.errors import ConfigError
from asyncrl.user_code import load_own, wrong_shape


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return (R - group mean) / (unbiased group standard deviation + epsilon) at every trained token.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1; unbiased deviation as in verl, OpenRLHF, AReaL, TRL.
    """
    groups = Groups.of(inputs.group_ids)
    centred_S = groups.minus_mean(inputs.rewards)
    variance_S = groups.sum(centred_S**2) / np.maximum(groups.sizes - 1, 1)
    advantages_S = centred_S / (np.sqrt(variance_S) + config.epsilon)
    return _of_samples(advantages_S, inputs, config, groups, singleton_scale=1.0 / (1.0 + config.epsilon))


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

    Source: OPO (arXiv 2505.23585), the optimal baseline where a gradient's squared norm grows with length.
    """
    groups = Groups.of(inputs.group_ids)
    lengths_S = inputs.mask.sum(axis=1).astype(np.float64)
    return _of_samples(groups.minus_mean(inputs.rewards, lengths_S), inputs, config, groups)


def reinforce_pp(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return the discounted return of each trained token, whitened over all trained tokens of the step.

    Source: REINFORCE++ (arXiv 2501.03262); verl `compute_reinforce_plus_plus_outcome_advantage`.
    """
    returns_ST = recursions.discounted_returns(_token_rewards(inputs), inputs.mask, config.gamma)
    return AdvantageOutputs(whitened(returns_ST, inputs.mask, biased=config.biased_variance))


def reinforce_pp_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return R - group mean at every trained token, whitened over all trained tokens of the step.

    Source: REINFORCE++ (arXiv 2501.03262), baseline form; unbiased variance as in verl, biased (`biased_variance`) as in
    OpenRLHF's `reinforce_baseline`.
    """
    groups = Groups.of(inputs.group_ids)
    centred_S = groups.minus_mean(inputs.rewards)
    return _of_samples(centred_S, inputs, config, groups, whiten=True)


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

    Source: Schulman et al. (arXiv 1506.02438), equation 16; over tokens as in verl and AReaL.
    """
    assert inputs.values is not None, "gae needs values"
    outputs = recursions.gae(_token_rewards(inputs), inputs.values, inputs.mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
    return AdvantageOutputs(_whitened_if_told(outputs.advantages, inputs.mask, config), outputs.returns)


def vtrace(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Return V-trace over the trained tokens, gaps skipped, and its value targets; only the advantages are whitened.

    The advantages carry the importance weight min(proximal / behaviour, vtrace_rho): a loss or correction that weighs tokens too
    would count it twice.

    Source: IMPALA (arXiv 1802.01561), equation 1 and section 4.2.
    """
    assert inputs.values is not None, "vtrace needs values"
    assert inputs.log_ratios is not None, "vtrace needs log_ratios"
    outputs = recursions.vtrace(
        _token_rewards(inputs),
        inputs.values,
        inputs.log_ratios,
        inputs.mask,
        gamma=config.gamma,
        rho_bar=config.vtrace_rho,
        c_bar=config.vtrace_c,
    )
    return AdvantageOutputs(_whitened_if_told(outputs.advantages, inputs.mask, config), outputs.returns)


ADVANTAGES: dict[str, Advantage] = {name: globals()[name] for name in ADVANTAGE_RULES}
"""Each by the name of its row in the table of config/algorithm_table.py."""


def load_advantage(name: str) -> Advantage:
    """Return the advantage of that name, or a user's own.

    Args:
        name: A name in ADVANTAGES, `module:function` or `file.py:function`.

    Raises:
        ConfigError: No such name (the known ones are listed), or the user's function cannot be imported.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    if ":" not in name:
        known = ", ".join(ADVANTAGES)
        raise ConfigError(f"algorithm.advantage must be one of {known}, or your own function as module:function, got {name!r}")
    return load_own(name, "algorithm.advantage", AdvantageOutputs, _fault_in)


def _fault_in(inputs: AdvantageInputs, outputs: AdvantageOutputs) -> str:
    """Return what is wrong with a user's answer."""
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
    advantages_S: FloatArray,
    inputs: AdvantageInputs,
    config: AdvantageConfig,
    groups: Groups | None = None,
    *,
    singleton_scale: float = 1.0,
    whiten: bool = False,
) -> AdvantageOutputs:
    """Broadcast over trained tokens; of `groups`, those of one get 0 and stay out of the whitening, or keep their reward."""
    told_ST = inputs.mask
    if groups is not None and config.singleton_keeps_reward:
        advantages_S = np.where(groups.sizes == 1, inputs.rewards * singleton_scale, advantages_S)
    elif groups is not None:
        told_ST = inputs.mask & (groups.sizes > 1)[:, None]
    return AdvantageOutputs(_whitened_if_told(np.where(told_ST, advantages_S[:, None], 0.0), told_ST, config, always=whiten))


def _whitened_if_told(
    advantages_ST: FloatArray, told_ST: NDArray[np.bool_], config: AdvantageConfig, *, always: bool = False
) -> FloatArray:
    if not config.whiten and not always:
        return advantages_ST
    return whitened(advantages_ST, told_ST, biased=config.biased_variance, by_sample=config.whiten == "samples" and not always)


def _token_rewards(inputs: AdvantageInputs) -> FloatArray:
    """Return [S, T]: those given, or each sample's reward on its last trained token."""
    if inputs.token_rewards is not None:
        return inputs.token_rewards
    return recursions.rewards_on_last_tokens(inputs.rewards, inputs.mask)


@dataclass(frozen=True, slots=True)
class Groups:
    """Which samples answer the same prompt."""

    numbers: NDArray[np.intp]
    """[S], number of each sample's group, from 0 to G - 1."""
    firsts: NDArray[np.intp]
    """[S], the first sample of each sample's group."""
    sizes: FloatArray
    """[S], how many samples each sample's group has."""

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
        """Return [S], `values` minus their group's mean, weighted by `weights` [S]; exactly 0 where a group's are equal."""
        # Distances from one member: the rounded mean of equal values is not always equal to them.
        distances_S = values - values[self.firsts]
        if weights is None:
            return distances_S - self.sum(distances_S) / self.sizes
        totals_S = self.sum(weights)
        means_S: FloatArray = self.sum(weights * distances_S) / np.where(totals_S > 0, totals_S, 1.0)
        return distances_S - means_S


WHITEN_EPSILON = 1e-8
"""Keeps 1 / sqrt(variance) finite (verl, OpenRLHF)."""


def whitened(values: FloatArray, mask: NDArray[np.bool_], *, biased: bool = False, by_sample: bool = False) -> FloatArray:
    """Return (x - mean) / sqrt(variance) at the tokens where `mask` is true, 0 elsewhere.

    Args:
        values: [S, T]; whatever stands where `mask` is false (NaN too) changes nothing.
        mask: [S, T].
        biased: The variance is max(sum of squares / N, epsilon), as in OpenRLHF, not sum of squares / (N - 1) + epsilon, as in
            verl.
        by_sample: Mean and variance are over samples, each by the mean of its tokens, and not over tokens.

    Source: verl `masked_whiten`; OpenRLHF `compute_advantages_and_returns`; by samples: TRL's RLOO, `normalize_advantages`.
    """
    if not mask.any():
        return np.zeros(mask.shape)
    # Distances from one token: the rounded mean of equal values is not always equal to them.
    distances_ST = np.where(mask, values - values[mask][0], 0.0)
    lengths_S = mask.sum(axis=1)
    counted_N = distances_ST.sum(axis=1)[lengths_S > 0] / lengths_S[lengths_S > 0] if by_sample else distances_ST[mask]
    mean, count = counted_N.mean(), len(counted_N)
    squares = float(np.square(counted_N - mean).sum())
    variance = max(squares / count, WHITEN_EPSILON) if biased else squares / max(count - 1, 1) + WHITEN_EPSILON
    return np.where(mask, (distances_ST - mean) / np.sqrt(variance), 0.0)
