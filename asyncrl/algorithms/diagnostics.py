"""Metrics of a step's data, and of its distance from the policy that trains on it, by name. Pure, no torch.

The caller removes masked tokens.

Legend: N tokens, S sequences; rho = learner / behaviour, log rho = learner - behaviour. Everything is float64, so that the order
of tokens, and therefore the packing, makes no difference.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from asyncrl.schema.samples import StepBatch

FloatArray = NDArray[np.float64]
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus and minus this before `exp`: e^20 is far over every cap, and e^90 is infinite in float32."""
STALENESS_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
"""Numbers of versions behind the learner, in the groups of the `_by_staleness` metrics."""
_BUCKET_STARTS = (1, 2, 3, 5, 9)
RATIO_LEVELS = {"ratio/p01": 0.01, "ratio/p05": 0.05, "ratio/p50": 0.5, "ratio/p95": 0.95, "ratio/p99": 0.99}
"""Quantiles of rho that are metrics."""


def bounded_exp(log_values: FloatArray) -> FloatArray:
    """Return exp of values clamped to plus and minus LOG_RATIO_LIMIT."""
    values: FloatArray = np.exp(np.clip(log_values, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return values


def token_figures(learner: FloatArray, behaviour: FloatArray) -> dict[str, float]:
    """Compare the learner's log-probabilities [N], proximal or current, with the behaviour policy's, N at least 1.

    `ratio/ess` is the effective sample size of the unbounded rho, as a fraction; `ratio/chi2_token` is the mean of rho^2 minus 1;
    `kl/k1` and `kl/mean` (k3) estimate KL(behaviour || learner).

    Source: Kish 1965 (effective sample size); Schulman 2020 (k1, k3); verl `compute_offpolicy_metrics` (chi-squared).
    """
    log_rho = np.clip(learner - behaviour, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho, k3 = np.exp(log_rho), np.expm1(log_rho) - log_rho
    mean, second_moment = float(rho.mean()), float(np.square(rho).mean())
    return {
        "ratio/mean": mean,
        "ratio/max": float(rho.max()),
        "ratio/min": float(rho.min()),
        **dict(zip(RATIO_LEVELS, np.quantile(rho, [*RATIO_LEVELS.values()]).tolist(), strict=True)),
        "ratio/ess": mean * mean / second_moment,
        "ratio/chi2_token": second_moment - 1.0,
        "kl/mean": float(k3.mean()),
        "kl/max": float(k3.max()),
        "kl/k1": -float(log_rho.mean()),
    }


def divergence(learner: FloatArray, behaviour: FloatArray) -> tuple[float, float]:
    """Return the k1 and k3 estimates of KL(behaviour || learner), means over tokens [N], N at least 1."""
    log_rho = np.clip(learner - behaviour, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return -float(log_rho.mean()), float((np.expm1(log_rho) - log_rho).mean())


def sequence_figures(learner: FloatArray, behaviour: FloatArray, sequence_ids: NDArray[np.int64]) -> dict[str, float]:
    """Compare the learner with the behaviour policy, sequence by sequence.

    A perplexity is exp(-mean log-probability) of a sequence. `ratio/chi2_sequence` is the mean of (product of rho)^2, minus 1,
    `ratio/perplexity` the mean of the learner's perplexity over the behaviour policy's; `perplexity/log_gap_*` describe the
    learner's log perplexity minus the behaviour policy's.

    Args:
        learner: [N], log-probabilities, proximal or current, N at least 1.
        behaviour: [N].
        sequence_ids: [N]; numbers without a token here do not count.

    Source: verl `compute_offpolicy_metrics`.
    """
    lengths_S = np.bincount(sequence_ids)
    present_S = lengths_S > 0
    lengths_S = lengths_S[present_S]
    ours_S, theirs_S = (-np.bincount(sequence_ids, part)[present_S] / lengths_S for part in (learner, behaviour))
    gap_S = ours_S - theirs_S
    return {
        "ratio/chi2_sequence": float(np.square(bounded_exp(-gap_S * lengths_S)).mean()) - 1.0,
        "ratio/perplexity": float(bounded_exp(gap_S).mean()),
        "perplexity/learner": float(np.exp(ours_S).mean()),
        "perplexity/learner_log": float(ours_S.mean()),
        "perplexity/behaviour": float(np.exp(theirs_S).mean()),
        "perplexity/behaviour_log": float(theirs_S.mean()),
        "perplexity/log_gap_mean": float(gap_S.mean()),
        "perplexity/log_gap_abs_mean": float(np.abs(gap_S).mean()),
        "perplexity/log_gap_max": float(gap_S.max()),
        "perplexity/log_gap_min": float(gap_S.min()),
    }


def weight_figures(weights: FloatArray, ratios: FloatArray, high: float) -> dict[str, float]:
    """Describe the importance weights that multiplied the loss, and the ratios from which they were made.

    Args:
        weights: [N], of unmasked tokens; at least one.
        ratios: Unbounded: rho of the same N tokens, or its product over each of S sequences.
        high: A ratio over this counts as high; a ratio under 1 / high counts as low.

    Source: Kish 1965; verl `compute_is_metrics` (mean, deviation and sample size over tokens, as here).
    """
    mean, second_moment = float(weights.mean()), float(np.square(weights).mean())
    return {
        "ratio/correction_mean": mean,
        "ratio/correction_std": float(weights.std()),
        "ratio/correction_ess": mean * mean / second_moment if second_moment > 0 else 0.0,
        "ratio/high_fraction": float((ratios > high).mean()),
        "ratio/low_fraction": float((ratios < 1.0 / high).mean()),
    }


def mismatch_figures(learner: FloatArray, behaviour: FloatArray) -> dict[str, float]:
    """Compare two computations of the same log-probabilities [N], N at least 1.

    `mismatch/correlation` is Pearson's correlation of the probabilities (NaN if one does not vary).

    Source: MiniMax-M1 2025, section 3.2 (correlation of the probabilities of trainer and engine).
    """
    gap, (k1, k3) = np.abs(learner - behaviour), divergence(learner, behaviour)
    ours, theirs = (probabilities - probabilities.mean() for probabilities in (np.exp(learner), np.exp(behaviour)))
    spread = math.sqrt(float(np.square(ours).sum() * np.square(theirs).sum()))
    return {
        "mismatch/logprob_gap_mean": float(gap.mean()),
        "mismatch/logprob_gap_max": float(gap.max()),
        "mismatch/correlation": float((ours * theirs).sum()) / spread if spread > 0 else math.nan,
        "mismatch/kl_k1": k1,
        "mismatch/kl_k3": k3,
    }


def staleness_bucket(staleness: FloatArray) -> NDArray[np.int64]:
    """Return [N], the index into STALENESS_BUCKETS of each staleness [N] in versions; -1 if it is negative (unknown)."""
    return np.where(staleness < 0, -1, np.searchsorted(_BUCKET_STARTS, staleness, side="right"))


def explained_variance(values: FloatArray, returns: FloatArray) -> float:
    """Return 1 - var(R - v) / var(R) over trained tokens: 1 is a perfect critic, 0 no better than a constant.

    Args:
        values: [N], of the critic before the step, from which the returns were computed; N at least 1.
        returns: [N].

    Returns:
        At most 1; 0 if the returns vary only by rounding, so that there is nothing to explain.

    Source: Schulman et al., OpenAI baselines `explained_variance`.
    """
    spread, largest = float(returns.var()), max(float(np.abs(returns).max()), float(np.abs(values).max()))
    if spread <= (4.0 * float(np.finfo(np.float64).eps) * largest) ** 2:
        return 0.0
    return 1.0 - float((returns - values).var()) / spread


def batch_metrics(batch: StepBatch, advantages: FloatArray | None) -> dict[str, float]:
    """Return metrics of rewards, advantages and lengths, without greedy baselines.

    Args:
        batch: The step's batch.
        advantages: [S], in the order of `batch.samples`; None: the step has none (preferences).
    """
    drawn = [index for index, sample in enumerate(batch.samples) if not sample.is_greedy]
    samples = [batch.samples[index] for index in drawn]
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.response_tokens for sample in samples])
    pieces = {(sample.group_id, sample.row): sample.prompt_tokens for sample in samples}
    prompts = {sample.group_id: sample.prompt_tokens for sample in samples}
    group_ids = [sample.group_id for sample in samples]
    _, first, groups, counts = np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True)
    # Distances from the group's first member: if all are equal, rounding of their mean would make a spread.
    distances = rewards - rewards[first][groups]
    means = np.bincount(groups, distances) / counts
    spreads = np.sqrt(np.bincount(groups, (distances - means[groups]) ** 2) / counts)
    of_samples = {"reward": rewards} | ({} if advantages is None else {"advantage": advantages[drawn]})
    kinds = ("mean", "std", "max", "min")
    return {
        **batch_staleness(batch),
        **{f"{name}/{kind}": float(getattr(values, kind)()) for name, values in of_samples.items() for kind in kinds},
        "reward/group_std_mean": float(spreads.mean()),
        "reward/zero_spread_fraction": float((spreads == 0).mean()),
        "data/samples": float(len(samples)),
        "data/rows": float(len(batch.rows)),
        "data/trained_tokens": float(batch.num_trained_tokens),
        "data/repeated_prompt_tokens": float(sum(pieces.values()) - sum(prompts.values())),
        "data/prompt_tokens_mean": float(np.mean([sample.prompt_tokens for sample in samples])),
        "data/response_tokens_mean": float(lengths.mean()),
        "data/response_tokens_max": float(lengths.max()),
    }


def batch_staleness(batch: StepBatch) -> dict[str, float]:
    """Return mean and largest staleness of the trained samples, each by its oldest trained token; empty if there is none."""
    ages = [batch.step - sample.oldest_version for sample in batch.samples if sample.oldest_version >= 0]
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))} if ages else {}
