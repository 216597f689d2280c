"""Figures of a step's tokens, by the names of observe/metrics.py: over all of them, and by staleness bucket.

`NAME_by_staleness/BUCKET` is the figure NAME over the tokens of a bucket, or over the sequences whose oldest trained token is of
it. Figures of the policy before the step come from the first pass over the batch (`first`), those of what the updates did from
every pass (`every`). A figure that nothing is known for is NaN. Called by learner/measure.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from asyncrl.algorithms.diagnostics import (
    RATIO_LEVELS,
    STALENESS_BUCKETS,
    bucket_means,
    divergence,
    logprob_gap,
    ratio_terms,
    sequence_mismatch,
    sequence_staleness,
    sequence_terms,
    staleness_bucket,
    token_mismatch,
    weight_figures,
)
from asyncrl.algorithms.quantiles import quantiles
from asyncrl.algorithms.ratios import LOG_RATIO_LIMIT
from asyncrl.algorithms.types import segment_sum
from asyncrl.config.corrections import CorrectionConfig, TruncatedSequence, TruncatedToken
from asyncrl.learner.token_records import Tokens

_QUANTILE_NAMES = ("ratio/p01", "ratio/p05", "ratio/p50", "ratio/p95", "ratio/p99")
"""Of RATIO_LEVELS."""


@dataclass(frozen=True, slots=True)
class Cap:
    """Where importance weights are truncated."""

    value: float
    is_of_sequences: bool = False
    is_applied: bool = True
    """False where the step truncates nothing and `value` only says what counts as a high ratio."""

    @classmethod
    def of(cls, corrections: tuple[CorrectionConfig, ...]) -> Cap:
        """Return the cap of a step's corrections; that of a plain tis_token where they have none."""
        for item in corrections:
            if isinstance(item, TruncatedToken | TruncatedSequence):
                return cls(item.cap, is_of_sequences=isinstance(item, TruncatedSequence))
        return cls(TruncatedToken().cap, is_applied=False)


@torch.no_grad()
def step_figures(every: Tokens, first: Tokens, corrections: tuple[CorrectionConfig, ...]) -> dict[str, float]:
    """Return all figures; both token sets have at least one token, and `first` is part of `every`."""
    cap = Cap.of(corrections)
    return {
        **_token_figures(every, first, cap),
        **_sequence_figures(first),
        **_weight_figures(first, cap),
        **_policy_figures(first),
        **_engine_figures(first),
        **_by_staleness(every, first, cap),
    }


def _ratios(first: Tokens, cap: Cap) -> torch.Tensor:
    """Return [N], the ratio that the cap bounds at each token: its own, or the product over its sequence."""
    log_rho = first["sequence_log_ratios"] if cap.is_of_sequences else first["proximal_logprobs"] - first["behaviour_logprobs"]
    return log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _is_capped(first: Tokens, cap: Cap) -> torch.Tensor:
    """Return float64 [N], 1 where the token's correction met its cap."""
    return ((_ratios(first, cap) >= cap.value) & cap.is_applied).double()


def _token_figures(every: Tokens, first: Tokens, cap: Cap) -> dict[str, float]:
    clipped, dual_clipped, kept = every.means("clipped", "dual_clipped", "kept")
    tokens = token_mismatch(first["learner_logprobs"], first["behaviour_logprobs"])
    proximal_k1, proximal_k3 = divergence(first["proximal_logprobs"], first["behaviour_logprobs"])
    current_k1, current_k3 = divergence(every["current_logprobs"], every["behaviour_logprobs"])
    return {
        "ratio/mean": tokens.ratio_mean,
        "ratio/max": tokens.ratio_max,
        "ratio/min": tokens.ratio_min,
        **dict(zip(_QUANTILE_NAMES, tokens.ratio_quantiles, strict=True)),
        "ratio/ess": tokens.ess,
        "ratio/chi2_token": tokens.chi2,
        "ratio/capped_fraction": _is_capped(first, cap).mean().item(),
        "kl/mean": tokens.kl_k3,
        "kl/max": tokens.kl_max,
        "kl/k1": tokens.kl_k1,
        "kl/proximal_k1": proximal_k1,
        "kl/proximal_k3": proximal_k3,
        "kl/current_k1": current_k1,
        "kl/current_k3": current_k3,
        "policy/clip_fraction": clipped,
        "policy/dual_clip_fraction": dual_clipped,
        "policy/kept_fraction": kept,
    }


def _sequence_figures(first: Tokens) -> dict[str, float]:
    sequences = sequence_mismatch(first["learner_logprobs"], first["behaviour_logprobs"], first.sequence_ids, first.num_sequences)
    return {
        "ratio/chi2_sequence": sequences.chi2,
        "ratio/perplexity": sequences.perplexity_ratio,
        "perplexity/learner": sequences.learner_perplexity,
        "perplexity/learner_log": sequences.learner_log_perplexity,
        "perplexity/behaviour": sequences.behaviour_perplexity,
        "perplexity/behaviour_log": sequences.behaviour_log_perplexity,
        "perplexity/log_gap_mean": sequences.log_perplexity_gap,
        "perplexity/log_gap_abs_mean": sequences.log_perplexity_gap_abs,
        "perplexity/log_gap_max": sequences.log_perplexity_gap_max,
        "perplexity/log_gap_min": sequences.log_perplexity_gap_min,
    }


def _weight_figures(first: Tokens, cap: Cap) -> dict[str, float]:
    ratios = _ratios(first, cap)
    if cap.is_of_sequences:
        ratios = _one_a_sequence(ratios, first)
    weights = weight_figures(first["weights"], ratios, cap.value, "sequence" if cap.is_of_sequences else "token")
    return {
        "ratio/correction_mean": weights.mean,
        "ratio/correction_std": weights.std,
        "ratio/correction_ess": weights.ess,
        "ratio/high_fraction": weights.high_fraction,
        "ratio/low_fraction": weights.low_fraction,
    }


def _one_a_sequence(values: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return [S'], of values [N] that are the same all over a sequence, one for each sequence that has a token."""
    values_S = values.new_full((tokens.num_sequences,), -1.0).scatter_reduce(0, tokens.sequence_ids, values, "amax")
    return values_S[values_S >= 0]


def _policy_figures(first: Tokens) -> dict[str, float]:
    entropy, penalty = first.means("entropy", "penalty")
    reference_k1, reference_k3 = divergence(first["reference_logprobs"], first["learner_logprobs"])
    return {
        "policy/entropy": entropy,
        "kl/reference_mean": reference_k3,
        "kl/reference_k1": reference_k1,
        "kl/penalty_mean": penalty,
    }


def _engine_figures(first: Tokens) -> dict[str, float]:
    """Return what differs although engine and trainer hold the same weights: tokens of version gap 0."""
    fresh = first.where((first.staleness == 0) & (first["is_exact"] > 0))
    if not len(fresh):
        return {"mismatch/tokens": 0.0}
    kl_k1, kl_k3 = divergence(fresh["learner_logprobs"], fresh["behaviour_logprobs"])
    gap_mean, gap_max, correlation = logprob_gap(fresh["learner_logprobs"], fresh["behaviour_logprobs"])
    return {
        "mismatch/tokens": float(len(fresh)),
        "mismatch/kl_k1": kl_k1,
        "mismatch/kl_k3": kl_k3,
        "mismatch/logprob_gap_mean": gap_mean,
        "mismatch/logprob_gap_max": gap_max,
        "mismatch/correlation": correlation,
    }


def _by_staleness(every: Tokens, first: Tokens, cap: Cap) -> dict[str, float]:
    buckets = staleness_bucket(first.staleness)
    figures = _ratios_by_staleness(first, buckets, cap)
    figures |= _updates_by_staleness(every, buckets if every is first else staleness_bucket(every.staleness))
    return figures | _sequences_by_staleness(first)


def _ratios_by_staleness(first: Tokens, buckets: torch.Tensor, cap: Cap) -> dict[str, float]:
    ratios = ratio_terms(first["learner_logprobs"], first["behaviour_logprobs"])
    proximal = ratio_terms(first["proximal_logprobs"], first["behaviour_logprobs"])
    means = bucket_means(torch.cat([ratios[:2], proximal[2:], _is_capped(first, cap)[None]]), buckets)
    figures: dict[str, float] = {}
    for bucket, (mean, second_moment, kl_k1, kl_k3, capped) in means.items():
        of_bucket = ratios[0][buckets == STALENESS_BUCKETS.index(bucket)]
        by_name = dict(zip(_QUANTILE_NAMES, quantiles(of_bucket, RATIO_LEVELS), strict=True)) | {
            "ratio/mean": mean,
            "ratio/ess": mean * mean / second_moment,
            "ratio/chi2_token": second_moment - 1.0,
            "ratio/capped_fraction": capped,
            "kl/proximal_k1": kl_k1,
            "kl/proximal_k3": kl_k3,
        }
        figures |= _named(by_name, bucket)
    return figures


def _updates_by_staleness(every: Tokens, buckets: torch.Tensor) -> dict[str, float]:
    current = ratio_terms(every["current_logprobs"], every["behaviour_logprobs"])
    names = ("kl/current_k1", "kl/current_k3", "policy/clip_fraction", "policy/kept_fraction")
    means = bucket_means(torch.cat([current[2:], every["clipped"][None], every["kept"][None]]), buckets)
    return _merged(_named(dict(zip(names, values, strict=True)), bucket) for bucket, values in means.items())


def _sequences_by_staleness(first: Tokens) -> dict[str, float]:
    oldest_S = sequence_staleness(first.staleness, first.sequence_ids, first.num_sequences)
    log_ratios = first["learner_logprobs"] - first["behaviour_logprobs"]
    sums_S = segment_sum(log_ratios, first.sequence_ids, first.num_sequences)
    lengths_S = segment_sum(first["mask"], first.sequence_ids, first.num_sequences)
    means = bucket_means(sequence_terms(sums_S, lengths_S.clamp(min=1.0)), staleness_bucket(oldest_S))
    return _merged(
        _named({"ratio/chi2_sequence": second_moment - 1.0, "ratio/perplexity": perplexity}, bucket)
        for bucket, (second_moment, perplexity) in means.items()
    )


def _named(figures: dict[str, float], bucket: str) -> dict[str, float]:
    return {f"{name}_by_staleness/{bucket}": value for name, value in figures.items()}


def _merged(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    return {name: value for part in parts for name, value in part.items()}
