"""Metrics of a step from its tokens and sequences: recorded row by row, computed once at the end.

Metrics are computed over the tokens of all rows and ranks together, so they do not depend on how samples are divided into rows
and ranks (sums are in float64). Names are those of observe/metrics.py. `NAME_by_staleness/BUCKET` is the metric NAME over the
tokens of a staleness bucket, or over the sequences whose oldest trained token is in it. Metrics of the policy before the step
come from the first pass over the batch (`first`); metrics of the updates come from every pass (`every`). An unknown metric is NaN
and is left out. Records stay on the device until the end and are then copied at once.

Legend: M tokens of a row, N trained tokens of all ranks, C columns.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.diagnostics import (
    RATIO_LEVELS,
    STALENESS_BUCKETS,
    FloatArray,
    bounded_exp,
    divergence,
    mismatch_figures,
    sequence_figures,
    staleness_bucket,
    token_figures,
    weight_figures,
)
from asyncrl.algorithms.types import LossInputs, LossOutputs
from asyncrl.config.algorithm import CorrectionConfig, Truncated, TruncatedGeometric, TruncatedToken
from asyncrl.learner.ranks.group import Ranks
from asyncrl.observe.samples import CLIPPED, KEPT, MOST_ROW_TOKENS, TRAINED, TokenRow, kept_members
from asyncrl.schema.samples import StepBatch

Places = NDArray[np.int64]
Columns = dict[str, FloatArray]
"""Unmasked trained tokens of a step: [N] each, by the column names of `StepTokens.add`."""


class StepTokens:
    """Collects the values that the rows of a step computed, token by token.

    Example:
        tokens = StepTokens(len(rows), state.ranks, corrections=algorithm.corrections, keeps_tokens=False)
        tokens.add(inputs, outputs, proximal_is_learner=True, is_first_update=True, places=row.places)
        metrics = tokens.metrics()
    """

    def __init__(self, rows: int, ranks: Ranks, *, corrections: tuple[CorrectionConfig, ...] = (), keeps_tokens: bool) -> None:
        """Begin a step.

        Args:
            rows: Number of rows in one pass over this rank's part of the batch; metrics of the policy before the step come from
                the first pass.
            ranks: The ranks whose tokens are measured together.
            corrections: Corrections of the step. A ratio over their cap counts as high (over 2 if there is no cap over 1).
            keeps_tokens: Whether to fill `first`.
        """
        self.first: Columns = {}
        """After `metrics`, if tokens are kept: the first pass over the batch."""
        self._keeps_tokens, self._rows, self._corrections, self._ranks = keeps_tokens, rows, corrections, ranks
        self._tables: list[torch.Tensor] = []
        """float32 (float64 for a float64 model) [C, M] per row; ids and versions are exact up to 2^24."""
        self._names: tuple[str, ...] = ()
        """The C columns."""
        self._num_sequences = 0

    @torch.no_grad()
    def add(
        self,
        inputs: LossInputs,
        outputs: LossOutputs,
        *,
        proximal_is_learner: bool,
        is_first_update: bool,
        places: tuple[Places, Places],
    ) -> None:
        """Add one row of one update; in a step that trains the policy every rank adds at least one row, even without tokens.

        Args:
            inputs: Inputs of the loss.
            outputs: Its results.
            proximal_is_learner: Whether the proximal policy is the learner before the step. If not, the current policy is used
                instead, which is the learner before the step only in the first update.
            is_first_update: Whether the weights are still those before the step.
            places: [M] each, the index of each token's sample in the batch, and the token's position in the response.
        """
        current, mask = inputs.logprobs.detach(), inputs.mask
        versions = torch.full_like(inputs.sequence_ids, -1) if inputs.versions is None else inputs.versions
        columns: dict[str, torch.Tensor | float | None] = {
            "learner": inputs.proximal_logprobs if proximal_is_learner else current,
            "is_exact": float(proximal_is_learner or is_first_update),
            "proximal": inputs.proximal_logprobs,
            "current": current,
            "behaviour": inputs.behaviour_logprobs,
            "reference": inputs.reference_logprobs,
            "entropy": inputs.entropy,
            "penalty": outputs.reference_kl,
            "weights": outputs.weights,
            "kept": mask if outputs.kept is None else outputs.kept,
            "clipped": outputs.clipped,
            "dual_clipped": outputs.dual_clipped,
            "mask": mask,
            "staleness": torch.where(versions < 0, -1, inputs.learner_version - versions),
            "sequence_ids": inputs.sequence_ids + self._num_sequences,
            "is_first_pass": float(len(self._tables) < self._rows),
        }
        if self._keeps_tokens:
            samples, offsets = (torch.from_numpy(each) for each in places)
            columns |= {"advantages": inputs.advantages, "samples": samples, "offsets": offsets}
        dtype = torch.promote_types(current.dtype, torch.float32)
        table = current.new_full((len(columns), len(current)), math.nan, dtype=dtype)
        for line, values in zip(table, columns.values(), strict=True):
            if isinstance(values, torch.Tensor):
                line.copy_(values, non_blocking=True)  # a blocking copy of `places` would wait for the row's forward
            elif values is not None:
                line.fill_(values)
        self._names = tuple(columns)
        self._tables.append(table)
        self._num_sequences += inputs.num_sequences

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics, the same on every rank; a collective call. Empty if the policy was not trained."""
        if not self._tables:
            return {}
        own = torch.cat(self._tables, dim=1)
        if self._ranks.size > 1:
            counts = self._ranks.gather(torch.tensor([self._num_sequences], device=own.device)).tolist()
            own[self._names.index("sequence_ids")] += sum(counts[: self._ranks.rank])
            own = self._ranks.gather(own.T).T
        every = dict(zip(self._names, own.cpu().numpy().astype(np.float64), strict=True))
        every = _where(every, every["mask"] > 0)
        first = _where(every, every["is_first_pass"] > 0)
        self.first = first if self._keeps_tokens else {}
        return {name: value for name, value in step_figures(every, first, self._corrections).items() if not math.isnan(value)}


def _where(columns: Columns, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Columns:
    return columns if chosen.all() else {name: values[chosen] for name, values in columns.items()}


def token_rows(batch: StepBatch, first: Columns, most: int) -> list[TokenRow]:
    """Return the learner's values for the tokens of the kept samples, without texts; see `kept_members`.

    Args:
        batch: The step's batch.
        first: `StepTokens.first`; empty if the policy was not trained.
        most: `observe.samples`.
    """
    if not (most and first):
        return []
    log_ratios = first["learner"] - first["behaviour"]
    extremes = first["samples"][[int(log_ratios.argmin()), int(log_ratios.argmax())]].astype(int).tolist()
    chosen = kept_members([(sample.group_id, sample.index, sample.reward) for sample in batch.samples], most)
    places = list(dict.fromkeys([*chosen, *extremes]))
    ends = np.cumsum([batch.samples[place].response_tokens for place in places])
    begins = np.full(len(batch.samples), -1)
    begins[places] = np.concatenate([[0], ends[:-1]])  # position of each kept sample's first token among all tokens
    begin_of_token = begins[first["samples"].astype(int)]
    own = begin_of_token >= 0
    at = (begin_of_token + first["offsets"].astype(int))[own]
    values, flags = np.full((4, ends[-1]), np.nan, dtype="<f4"), np.zeros(ends[-1], dtype=np.uint8)
    values[:, at] = [first[name][own] for name in ("learner", "weights", "entropy", "advantages")]
    clipped = (first["clipped"] > 0) | (first["dual_clipped"] > 0)
    flags[at] = (TRAINED + KEPT * (first["kept"] > 0) + CLIPPED * clipped)[own]
    rows = []
    for place, begin, end in zip(places, begins[places].tolist(), ends.tolist(), strict=True):
        if not flags[begin:end].any():
            continue  # none of its tokens is trained
        sample = batch.samples[place]
        row, start = batch.rows[sample.row], sample.start + sample.prompt_tokens
        for one in range(0, end - begin, MOST_ROW_TOKENS):
            num_tokens = min(MOST_ROW_TOKENS, end - begin - one)
            part, in_row = slice(begin + one, begin + one + num_tokens), slice(4 * (start + one), 4 * (start + one + num_tokens))
            learner, weights, entropy, advantages = (line[part].tobytes() for line in values)
            rows.append(TokenRow(
                batch.step, sample.group_id, sample.index, sample.reward, one, row.token_ids[in_row],
                row.versions[in_row], row.behaviour_logprobs[in_row],
                learner, weights, entropy, advantages, flags[part].tobytes(),
            ))  # fmt: skip
    return rows


def step_figures(every: Columns, first: Columns, corrections: tuple[CorrectionConfig, ...]) -> dict[str, float]:
    """Return all metrics; both token sets have at least one token, and `first` is part of `every`."""
    learner, behaviour, proximal = first["learner"], first["behaviour"], first["proximal"]
    sequence_ids = first["sequence_ids"].astype(np.int64)
    truncation = next((item for item in corrections if isinstance(item, Truncated)), None)
    is_of_sequences = truncation is not None and not isinstance(truncation, TruncatedToken)
    cap = (truncation or TruncatedToken()).cap
    # `auto` reads the share of high ratios, so no recipe may change what is high: a cap of 1 would make it half of any data.
    high = cap if cap > 1.0 else TruncatedToken().cap
    log_ratios = proximal - behaviour
    if is_of_sequences:
        of_S = np.bincount(sequence_ids, log_ratios).astype(np.float64)
        if isinstance(truncation, TruncatedGeometric):
            of_S /= np.maximum(np.bincount(sequence_ids), 1)
        log_ratios = of_S[sequence_ids]
    ratios = bounded_exp(log_ratios)
    first["capped"] = ((ratios >= cap) & (truncation is not None)).astype(np.float64)
    if is_of_sequences:  # equal within a sequence: keep one per sequence that has a token
        ratios = ratios[np.unique(sequence_ids, return_index=True)[1]]
    figures = token_figures(learner, behaviour)
    figures |= sequence_figures(learner, behaviour, sequence_ids)
    figures |= weight_figures(first["weights"], ratios, high)
    figures["kl/proximal_k1"], figures["kl/proximal_k3"] = divergence(proximal, behaviour)
    figures["kl/current_k1"], figures["kl/current_k3"] = divergence(every["current"], every["behaviour"])
    figures["kl/reference_k1"], figures["kl/reference_mean"] = divergence(first["reference"], learner)
    figures["kl/penalty_mean"], figures["policy/entropy"] = float(first["penalty"].mean()), float(first["entropy"].mean())
    figures["policy/clip_fraction"] = float(every["clipped"].mean())
    figures["policy/dual_clip_fraction"] = float(every["dual_clipped"].mean())
    figures["policy/kept_fraction"] = float(every["kept"].mean())
    figures["ratio/capped_fraction"] = float(first["capped"].mean())
    oldest_S = np.full(sequence_ids.max() + 1, -1.0)
    np.maximum.at(oldest_S, sequence_ids, first["staleness"])
    oldest = oldest_S[sequence_ids]
    # Engine and trainer have the same weights: any difference is mismatch. After an older token it could be its keys and values.
    fresh = (first["staleness"] == 0) & (oldest == 0) & (first["is_exact"] > 0)
    figures["mismatch/tokens"] = float(fresh.sum())
    if fresh.any():
        figures |= mismatch_figures(learner[fresh], behaviour[fresh])
    return figures | _by_staleness(every, first, sequence_ids, oldest)


_TOLD_OF_TOKENS = (*RATIO_LEVELS, "ratio/mean", "ratio/ess", "ratio/chi2_token")
_TOLD_OF_SEQUENCES = ("ratio/chi2_sequence", "ratio/perplexity")


def _by_staleness(
    every: Columns, first: Columns, sequence_ids: np.ndarray[tuple[int], np.dtype[np.int64]], oldest: FloatArray
) -> dict[str, float]:
    buckets_of_every, buckets = staleness_bucket(every["staleness"]), staleness_bucket(first["staleness"])
    buckets_of_oldest = staleness_bucket(oldest)
    figures: dict[str, float] = {}
    for index, bucket in enumerate(STALENESS_BUCKETS):
        told: dict[str, float] = {}
        if (chosen := buckets_of_every == index).any():
            told["kl/current_k1"], told["kl/current_k3"] = divergence(every["current"][chosen], every["behaviour"][chosen])
            told["policy/clip_fraction"] = float(every["clipped"][chosen].mean())
            told["policy/kept_fraction"] = float(every["kept"][chosen].mean())
        if (chosen := buckets == index).any():
            behaviour = first["behaviour"][chosen]
            of_tokens = token_figures(first["learner"][chosen], behaviour)
            told |= {name: of_tokens[name] for name in _TOLD_OF_TOKENS}
            told["kl/proximal_k1"], told["kl/proximal_k3"] = divergence(first["proximal"][chosen], behaviour)
            told["ratio/capped_fraction"] = float(first["capped"][chosen].mean())
        if (chosen := buckets_of_oldest == index).any():
            of_sequences = sequence_figures(first["learner"][chosen], first["behaviour"][chosen], sequence_ids[chosen])
            told |= {name: of_sequences[name] for name in _TOLD_OF_SEQUENCES}
        figures |= {f"{name}_by_staleness/{bucket}": value for name, value in told.items()}
    return figures
