"""From logits to tokens and behaviour logprobs: temperature, top-k, top-p, and a draw that depends on (seed, position) alone.

Invariants:
- The logprob of a token is that of the final distribution: divided by the temperature, filtered, renormalised.
- A token of probability 0 is never drawn. Temperature 0 is greedy, with logprob 0.
- Row r of the result depends on row r of the inputs only; every operation here works on rows one by one.

R rows (slots), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.generate.engine import uniforms

DRAW_FIELDS: Final = [("seed", np.uint64), ("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64)]
"""Of a row: how it draws. Temperature 1, top_p 1 and top_k 0 are the plainest way."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each of R rows draws its tokens, as tensors, at one moment."""

    seeds_R: NDArray[np.uint64]  # noqa: N815
    temperatures_R1: torch.Tensor  # noqa: N815
    """float32; 1 where the row is greedy."""
    greedy_R: torch.Tensor  # noqa: N815
    """bool."""
    any_greedy: bool
    all_unscaled: bool
    """Every temperature is 1: the division can be left out."""
    top_k_rows: torch.Tensor
    """int64 [K], the rows with a top-k filter."""
    top_k: tuple[int, ...]
    top_p_rows: torch.Tensor
    """int64 [P], the rows with a top-p filter."""
    top_p_P1: torch.Tensor  # noqa: N815

    @classmethod
    def of(cls, rows_R: NDArray[Any], device: torch.device | str = "cpu") -> SamplingBatch:
        """Copy the fields `DRAW_FIELDS` of a structured array."""
        greedy_R = rows_R["temperature"] == 0
        scales_R = np.where(greedy_R, np.float32(1), rows_R["temperature"])
        k_rows, p_rows = np.flatnonzero(rows_R["top_k"]), np.flatnonzero(rows_R["top_p"] < 1)
        return cls(
            seeds_R=rows_R["seed"].copy(),
            temperatures_R1=torch.from_numpy(scales_R).to(device).unsqueeze(1),
            greedy_R=torch.from_numpy(greedy_R).to(device),
            any_greedy=bool(greedy_R.any()),
            all_unscaled=bool((scales_R == 1).all()),
            top_k_rows=torch.from_numpy(k_rows).to(device),
            top_k=tuple(rows_R["top_k"][k_rows].tolist()),
            top_p_rows=torch.from_numpy(p_rows).to(device),
            top_p_P1=torch.from_numpy(rows_R["top_p"][p_rows]).to(device).unsqueeze(1),
        )


def filtered_logprobs(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return the log-probabilities that tokens are drawn from.

    Args:
        logits_RV: Any float dtype; not changed.
        batch: The rows' parameters.

    Returns:
        float32 [R, V], -inf where a filter cut the token off. Ties at the top-k threshold are all kept.
    """
    scores_RV = logits_RV.float()
    if not batch.all_unscaled:
        scores_RV = scores_RV / batch.temperatures_R1
    if len(batch.top_k) or len(batch.top_p_rows):
        scores_RV = scores_RV.clone()
    if len(batch.top_k):
        scores_KV, vocabulary = scores_RV[batch.top_k_rows], scores_RV.shape[-1]
        ranks = torch.tensor([min(k, vocabulary) - 1 for k in batch.top_k], device=scores_KV.device).unsqueeze(1)
        largest = scores_KV.topk(min(max(batch.top_k), vocabulary), dim=-1).values
        scores_RV[batch.top_k_rows] = scores_KV.masked_fill(scores_KV < largest.gather(1, ranks), -torch.inf)
    if len(batch.top_p_rows):
        # The smallest set of most likely tokens whose mass reaches top_p stays; always at least one.
        scores_PV = scores_RV[batch.top_p_rows]
        ascending, order = scores_PV.sort(dim=-1)
        cut = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - batch.top_p_P1
        cut[:, -1] = False
        scores_RV[batch.top_p_rows] = scores_PV.masked_fill(cut.scatter(1, order, cut), -torch.inf)
    return torch.log_softmax(scores_RV, dim=-1)


def sample(
    logits_RV: torch.Tensor, batch: SamplingBatch, positions_R: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token a row.

    Args:
        logits_RV: Any float dtype.
        batch: The rows' parameters and seeds.
        positions_R: Ordinal of the token within its request's completion.

    Returns:
        Token ids and behaviour logprobs [R]. A row of non-finite logits gives a non-finite logprob.
    """
    logprobs_RV = filtered_logprobs(logits_RV, batch)
    draws_R1 = torch.from_numpy(uniforms(batch.seeds_R, positions_R)).to(logprobs_RV.device).unsqueeze(1)
    cumulative_RV = logprobs_RV.exp().cumsum(dim=-1, dtype=torch.float64)
    targets_R1 = draws_R1 * cumulative_RV[:, -1:]
    tokens_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True).clamp_(max=logprobs_RV.shape[-1] - 1)
    chosen_R = logprobs_RV.gather(1, tokens_R1).squeeze(1)
    if batch.any_greedy:
        best_R, at_R = logprobs_RV.max(dim=-1)
        tokens_R1 = torch.where(batch.greedy_R, at_R, tokens_R1.squeeze(1)).unsqueeze(1)
        chosen_R = torch.where(batch.greedy_R, best_R - best_R, chosen_R)
    return tokens_R1.squeeze(1).cpu().numpy(), chosen_R.cpu().numpy()
