"""What a step's tokens, samples and pairs say about it: recorded row by row, computed once at the end.

Figures are computed over the tokens of all rows and ranks together, so they do not depend on how samples share rows and ranks
(sums are in float64). Names are those of observe/metrics.py. `NAME_by_staleness/BUCKET` is the figure NAME over the tokens of a
staleness bucket, or over the sequences whose oldest trained token is in it. Figures of the policy before the step come from the
first pass over the batch (`first`); figures of what the updates did come from every pass (`every`). An unknown figure is NaN and
is left out.

Legend: M tokens of a row, N trained tokens of all ranks, S sequences of all ranks, C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.algorithms.diagnostics import (
    RATIO_LEVELS,
    STALENESS_BUCKETS,
    bucket_means,
    divergence,
    logprob_gap,
    quantiles,
    ratio_terms,
    sequence_mismatch,
    sequence_staleness,
    sequence_terms,
    staleness_bucket,
    token_mismatch,
    weight_figures,
)
from asyncrl.algorithms.preference import PreferenceOutputs
from asyncrl.algorithms.types import LOG_RATIO_LIMIT, LossInputs, LossOutputs, masked, segment_sum
from asyncrl.config.algorithm import CorrectionConfig, TruncatedSequence, TruncatedToken
from asyncrl.learner.ranks.group import OneRank, Ranks
from asyncrl.schema.batches import StepBatch

COLUMNS = (
    "learner_logprobs",  # of the learner before the step, or nearest to it
    "is_exact",  # whether it is that learner, not one that updates of this step have changed
    "proximal_logprobs",
    "current_logprobs",
    "behaviour_logprobs",
    "reference_logprobs",  # NaN where there is no reference
    "entropy",  # NaN where it was not computed
    "penalty",  # KL estimate in the loss, without coefficient; NaN where there is none
    "weights",
    "kept",
    "clipped",
    "dual_clipped",
    "mask",
    "sequence_log_ratios",  # log of proximal / behaviour, the product over the token's sequence
    "staleness",  # versions behind the learner; -1 where unknown
    "sequence_ids",
)
_QUANTILE_NAMES = ("ratio/p01", "ratio/p05", "ratio/p50", "ratio/p95", "ratio/p99")
"""Of RATIO_LEVELS."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One row of one update, without gradient."""

    table: torch.Tensor
    """float32 (float64 of a float64 model) [M, C]; ids and versions are exact up to 2^24."""
    num_sequences: int

    @classmethod
    @torch.no_grad()
    def of(
        cls, inputs: LossInputs, outputs: LossOutputs, *, proximal_is_learner: bool, is_first_update: bool = True
    ) -> TokenRecord:
        """Return the record of one row's loss.

        Args:
            inputs: What the loss was given.
            outputs: What it returned.
            proximal_is_learner: Whether the proximal policy is the learner before the step. Where it is not, the current policy
                stands in, which is the learner before the step only in the first update.
            is_first_update: Whether the weights are still those from before the step.
        """
        current, mask = inputs.logprobs, inputs.mask
        unknown = torch.full_like(current, torch.nan)
        log_ratios = masked(inputs.proximal_logprobs - inputs.behaviour_logprobs, mask)
        staleness = torch.full_like(inputs.sequence_ids, -1)
        if inputs.versions is not None:
            staleness = torch.where(inputs.versions < 0, -1, inputs.learner_version - inputs.versions)
        columns: dict[str, torch.Tensor | None] = {
            "learner_logprobs": inputs.proximal_logprobs if proximal_is_learner else current,
            "is_exact": torch.full_like(mask, proximal_is_learner or is_first_update),
            "proximal_logprobs": inputs.proximal_logprobs,
            "current_logprobs": current,
            "behaviour_logprobs": inputs.behaviour_logprobs,
            "reference_logprobs": inputs.reference_logprobs,
            "entropy": inputs.entropy,
            "penalty": outputs.reference_kl,
            "weights": outputs.weights,
            "kept": mask if outputs.kept is None else outputs.kept,
            "clipped": outputs.clipped,
            "dual_clipped": outputs.dual_clipped,
            "mask": mask,
            "sequence_log_ratios": segment_sum(log_ratios, inputs.sequence_ids, inputs.num_sequences)[inputs.sequence_ids],
            "staleness": staleness,
            "sequence_ids": inputs.sequence_ids,
        }
        dtype = torch.promote_types(current.dtype, torch.float32)
        known = [unknown if (values := columns[name]) is None else values for name in COLUMNS]
        return cls(torch.stack([values.detach().to(dtype) for values in known], dim=1), inputs.num_sequences)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some trained tokens of a step; none of them is masked."""

    table: torch.Tensor
    """float64 [C, N]: one index operation selects tokens from all columns."""
    num_sequences: int
    """S, which `sequence_ids` stay under."""

    def __len__(self) -> int:
        """Return N."""
        return self.table.shape[1]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return float64 [N], one of COLUMNS."""
        return self.table[COLUMNS.index(name)]

    @property
    def sequence_ids(self) -> torch.Tensor:
        """int64 [N]."""
        return self["sequence_ids"].long()

    @property
    def staleness(self) -> torch.Tensor:
        """int64 [N], -1 where unknown."""
        return self["staleness"].long()

    def means(self, *names: str) -> list[float]:
        """Return the mean of each of these columns; NaN where the column is."""
        means = self.table.mean(dim=1).tolist()
        return [means[COLUMNS.index(name)] for name in names]

    def where(self, chosen: torch.Tensor) -> Tokens:
        """Return the tokens at which `chosen` [N] is true."""
        return Tokens(self.table.index_select(1, chosen.nonzero().flatten()), self.num_sequences)


class StepTokens:
    """Collects the records of a step.

    Example:
        tokens = StepTokens(len(rows), corrections=algorithm.corrections, ranks=state.ranks)
        tokens.add(TokenRecord.of(inputs, outputs, proximal_is_learner=True))
        metrics = tokens.metrics()
    """

    def __init__(self, rows: int, *, corrections: tuple[CorrectionConfig, ...] = (), ranks: Ranks | None = None) -> None:
        """Begin a step.

        Args:
            rows: Records of one pass over this rank's part of the batch; figures of the policy before the step come from the
                first pass.
            corrections: Of the step; their cap is where a ratio counts as high.
            ranks: All ranks' tokens are measured together; None: this process has all of them.
        """
        self._rows = rows
        self._corrections = corrections
        self._ranks: Ranks = OneRank() if ranks is None else ranks
        self._records: list[TokenRecord] = []

    def add(self, record: TokenRecord) -> None:
        """Add one row of one update; in a step that trains the policy every rank adds at least one, if of no token."""
        self._records.append(record)

    def metrics(self) -> dict[str, float]:
        """Return the step's figures, the same on every rank; a collective call. Empty where no token was trained."""
        if not self._records:
            return {}
        every, first = self._gathered()
        if not len(first):
            return {}
        return {name: value for name, value in step_figures(every, first, self._corrections).items() if not math.isnan(value)}

    def _gathered(self) -> tuple[Tokens, Tokens]:
        """Return the tokens of all passes and of the first, of every rank, in one gather."""
        device = self._records[0].table.device
        num_own = sum(record.num_sequences for record in self._records)
        counts = self._ranks.gather(torch.tensor([num_own], device=device)).tolist()
        offset, tables = int(sum(counts[: self._ranks.rank])), []
        for index, record in enumerate(self._records):
            is_first = record.table.new_full((len(record.table), 1), float(index < self._rows))
            tables.append(torch.cat([record.table, is_first], dim=1))
            tables[-1][:, COLUMNS.index("sequence_ids")] += offset
            offset += record.num_sequences
        table = self._ranks.gather(torch.cat(tables)).T.double().contiguous()
        mask, in_first = table[COLUMNS.index("mask")] > 0, table[-1] > 0
        every = Tokens(table[:-1], int(sum(counts)))
        if not mask.all():
            every, in_first = every.where(mask), in_first[mask]
        return every, every if in_first.all() else every.where(in_first)


class StepPairs:
    """Collects what preference losses return over the rows and updates of a step."""

    def __init__(self, *, ranks: Ranks | None = None) -> None:
        """Begin a step, over these ranks; None: this process has all pairs."""
        self._ranks: Ranks = OneRank() if ranks is None else ranks
        self._sums: list[torch.Tensor] = []

    def add(self, outputs: PreferenceOutputs) -> None:
        """Add one row of one update; every rank adds at least one, if of no pair."""
        figures = (outputs.losses, outputs.correct, outputs.margins, outputs.chosen_rewards, outputs.rejected_rewards)
        self._sums.append(torch.stack([values.double().sum() for values in (torch.ones_like(outputs.margins), *figures)]))

    def metrics(self) -> dict[str, float]:
        """Return the step's figures, the same on every rank; a collective call. Empty where there was no pair."""
        pairs, *sums = self._ranks.sum(torch.stack(self._sums).sum(dim=0)).tolist()
        if not pairs:
            return {}
        names = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")
        return {"dpo/pairs": pairs} | {f"dpo/{name}": value / pairs for name, value in zip(names, sums, strict=True)}


def batch_metrics(batch: StepBatch, advantages: FloatArray | None) -> dict[str, float]:
    """Return what rewards, advantages and lengths say; greedy baselines are left out.

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
    _, groups, counts = np.unique([sample.group_id for sample in samples], return_inverse=True, return_counts=True)
    means = np.bincount(groups, rewards) / counts
    spreads = np.sqrt(np.bincount(groups, (rewards - means[groups]) ** 2) / counts)
    return {
        **batch_staleness(batch),
        **_spread("reward", rewards),
        **({} if advantages is None else _spread("advantage", advantages[drawn])),
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
    """Return mean and largest staleness of the trained samples, each that of its oldest trained token; empty if there is none."""
    ages = [batch.step - sample.oldest_version for sample in batch.samples if sample.oldest_version >= 0]
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))} if ages else {}


def _spread(name: str, values: FloatArray) -> dict[str, float]:
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in ("mean", "std", "max", "min")}


@torch.no_grad()
def step_figures(every: Tokens, first: Tokens, corrections: tuple[CorrectionConfig, ...]) -> dict[str, float]:
    """Return all figures; both token sets have at least one token, and `first` is part of `every`."""
    truncation = next((item for item in corrections if isinstance(item, TruncatedToken | TruncatedSequence)), None)
    cap = (truncation or TruncatedToken()).cap  # without truncation it only says what counts as a high ratio
    is_of_sequences = isinstance(truncation, TruncatedSequence)
    of_token = first["proximal_logprobs"] - first["behaviour_logprobs"]
    log_ratios = first["sequence_log_ratios"] if is_of_sequences else of_token
    ratios = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    capped = ((ratios >= cap) & (truncation is not None)).double()
    if is_of_sequences:  # the same all over a sequence: one for each that has a token
        ratios_S = ratios.new_full((first.num_sequences,), -1.0).scatter_reduce(0, first.sequence_ids, ratios, "amax")
        ratios = ratios_S[ratios_S >= 0]
    weights = weight_figures(first["weights"], ratios, cap, "sequence" if is_of_sequences else "token")
    clipped, dual_clipped, kept = every.means("clipped", "dual_clipped", "kept")
    entropy, penalty = first.means("entropy", "penalty")
    learner, behaviour = first["learner_logprobs"], first["behaviour_logprobs"]
    tokens = token_mismatch(learner, behaviour)
    proximal_k1, proximal_k3 = divergence(first["proximal_logprobs"], behaviour)
    current_k1, current_k3 = divergence(every["current_logprobs"], every["behaviour_logprobs"])
    reference_k1, reference_k3 = divergence(first["reference_logprobs"], learner)
    sequences = sequence_mismatch(learner, behaviour, first.sequence_ids, first.num_sequences)
    # What differs although engine and trainer hold the same weights: tokens of version gap 0.
    fresh = first.where((first.staleness == 0) & (first["is_exact"] > 0))
    figures = {
        "ratio/mean": tokens.ratio_mean,
        "ratio/max": tokens.ratio_max,
        "ratio/min": tokens.ratio_min,
        **dict(zip(_QUANTILE_NAMES, tokens.ratio_quantiles, strict=True)),
        "ratio/ess": tokens.ess,
        "ratio/chi2_token": tokens.chi2,
        "kl/mean": tokens.kl_k3,
        "kl/max": tokens.kl_max,
        "kl/k1": tokens.kl_k1,
        "kl/proximal_k1": proximal_k1,
        "kl/proximal_k3": proximal_k3,
        "kl/current_k1": current_k1,
        "kl/current_k3": current_k3,
        "kl/reference_mean": reference_k3,
        "kl/reference_k1": reference_k1,
        "kl/penalty_mean": penalty,
        "policy/entropy": entropy,
        "policy/clip_fraction": clipped,
        "policy/dual_clip_fraction": dual_clipped,
        "policy/kept_fraction": kept,
        "ratio/capped_fraction": capped.mean().item(),
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
        "ratio/correction_mean": weights.mean,
        "ratio/correction_std": weights.std,
        "ratio/correction_ess": weights.ess,
        "ratio/high_fraction": weights.high_fraction,
        "ratio/low_fraction": weights.low_fraction,
        "mismatch/tokens": float(len(fresh)),
    }
    if len(fresh):
        names = ("mismatch/logprob_gap_mean", "mismatch/logprob_gap_max", "mismatch/correlation")
        pair = fresh["learner_logprobs"], fresh["behaviour_logprobs"]
        figures |= dict(zip(names, logprob_gap(*pair), strict=True))
        figures |= dict(zip(("mismatch/kl_k1", "mismatch/kl_k3"), divergence(*pair), strict=True))
    return figures | _by_staleness(every, first, capped)


def _by_staleness(every: Tokens, first: Tokens, capped: torch.Tensor) -> dict[str, float]:
    figures: dict[str, float] = {}

    def note(bucket: str, values: dict[str, float]) -> None:
        figures.update({f"{name}_by_staleness/{bucket}": value for name, value in values.items()})

    buckets = staleness_bucket(first.staleness)
    ratios = ratio_terms(first["learner_logprobs"], first["behaviour_logprobs"])
    proximal = ratio_terms(first["proximal_logprobs"], first["behaviour_logprobs"])
    means = bucket_means(torch.cat([ratios[:2], proximal[2:], capped[None]]), buckets)
    for bucket, (mean, second_moment, kl_k1, kl_k3, share_capped) in means.items():
        of_bucket = ratios[0][buckets == STALENESS_BUCKETS.index(bucket)]
        note(bucket, dict(zip(_QUANTILE_NAMES, quantiles(of_bucket, RATIO_LEVELS), strict=True)))
        note(bucket, {"ratio/mean": mean, "ratio/ess": mean * mean / second_moment, "ratio/chi2_token": second_moment - 1.0})
        note(bucket, {"ratio/capped_fraction": share_capped, "kl/proximal_k1": kl_k1, "kl/proximal_k3": kl_k3})

    current = ratio_terms(every["current_logprobs"], every["behaviour_logprobs"])
    every_buckets = buckets if every is first else staleness_bucket(every.staleness)
    names = ("kl/current_k1", "kl/current_k3", "policy/clip_fraction", "policy/kept_fraction")
    means = bucket_means(torch.cat([current[2:], every["clipped"][None], every["kept"][None]]), every_buckets)
    for bucket, values in means.items():
        note(bucket, dict(zip(names, values, strict=True)))

    oldest_S = sequence_staleness(first.staleness, first.sequence_ids, first.num_sequences)
    log_ratios = first["learner_logprobs"] - first["behaviour_logprobs"]
    sums_S = segment_sum(log_ratios, first.sequence_ids, first.num_sequences)
    lengths_S = segment_sum(first["mask"], first.sequence_ids, first.num_sequences)
    means = bucket_means(sequence_terms(sums_S, lengths_S.clamp(min=1.0)), staleness_bucket(oldest_S))
    for bucket, (second_moment, perplexity) in means.items():
        note(bucket, {"ratio/chi2_sequence": second_moment - 1.0, "ratio/perplexity": perplexity})
    return figures
