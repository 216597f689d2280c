"""The trained tokens of a step, as each row's loss left them, and laid together over all updates and ranks.

Invariants: figures made from `Tokens` do not depend on how samples share rows and ranks (the order of tokens may; sums are in
float64); no masked token is in `Tokens`. Called by learner/measure.py, which the objectives feed.

Legend: M tokens of a row, N trained tokens of all ranks, S sequences of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from asyncrl.algorithms.types import LossInputs, LossOutputs, masked, segment_sum
from asyncrl.learner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One row of one update [M], detached."""

    learner_logprobs: torch.Tensor
    """Of the learner before the step, or nearest to it."""
    is_exact: torch.Tensor
    """Whether it is that learner, not one that updates of this step have moved."""
    proximal_logprobs: torch.Tensor
    current_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    """NaN where there is no reference."""
    entropy: torch.Tensor
    """NaN where it was not computed."""
    penalty: torch.Tensor
    """KL estimate in the loss, without coefficient; NaN where there is none."""
    weights: torch.Tensor
    kept: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor
    mask: torch.Tensor
    sequence_log_ratios: torch.Tensor
    """Log of proximal / behaviour, the product over the token's sequence."""
    staleness: torch.Tensor
    """Versions behind the learner; -1 where unknown."""
    sequence_ids: torch.Tensor
    num_sequences: int

    @classmethod
    def of(
        cls, inputs: LossInputs, outputs: LossOutputs, *, proximal_is_learner: bool, is_first_update: bool = True
    ) -> TokenRecord:
        """Return the record of one row's loss.

        Args:
            inputs: What the loss was given.
            outputs: What it said.
            proximal_is_learner: Whether the proximal policy is the learner before the step. Where it is not, the current policy
                stands in, which is the learner before the step only in the first update.
            is_first_update: Whether the weights are still those from before the step.
        """
        current, mask = inputs.logprobs.detach(), inputs.mask
        return cls(
            learner_logprobs=inputs.proximal_logprobs if proximal_is_learner else current,
            is_exact=torch.full_like(mask, proximal_is_learner or is_first_update),
            proximal_logprobs=inputs.proximal_logprobs,
            current_logprobs=current,
            behaviour_logprobs=inputs.behaviour_logprobs,
            reference_logprobs=_or_nan(inputs.reference_logprobs, current),
            entropy=_or_nan(inputs.entropy, current),
            penalty=_or_nan(outputs.reference_kl, current),
            weights=outputs.weights,
            kept=mask if outputs.kept is None else outputs.kept,
            clipped=outputs.clipped,
            dual_clipped=outputs.dual_clipped,
            mask=mask,
            sequence_log_ratios=_sequence_log_ratios(inputs),
            staleness=_staleness(inputs),
            sequence_ids=inputs.sequence_ids,
            num_sequences=inputs.num_sequences,
        )

    @classmethod
    def without_loss(cls, inputs: LossInputs, *, is_first_update: bool) -> TokenRecord:
        """Return the record of a row that no policy loss judged (preferences): weights 1, nothing clipped or dropped."""
        nothing = torch.zeros_like(inputs.mask)
        outputs = LossOutputs(torch.zeros(()), inputs.mask.to(inputs.logprobs.dtype), nothing, nothing)
        return cls.of(inputs, outputs, proximal_is_learner=False, is_first_update=is_first_update)


def _or_nan(values: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, torch.nan) if values is None else values.detach()


def _sequence_log_ratios(inputs: LossInputs) -> torch.Tensor:
    log_ratios = masked(inputs.proximal_logprobs - inputs.behaviour_logprobs, inputs.mask)
    return segment_sum(log_ratios, inputs.sequence_ids, inputs.num_sequences)[inputs.sequence_ids]


def _staleness(inputs: LossInputs) -> torch.Tensor:
    if inputs.versions is None:
        return torch.full_like(inputs.sequence_ids, -1)
    return torch.where(inputs.versions < 0, -1, inputs.learner_version - inputs.versions)


_COLUMNS = tuple(field.name for field in fields(TokenRecord) if field.name != "num_sequences")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some trained tokens of a step."""

    table: torch.Tensor
    """float64 [columns, N], a line a column of TokenRecord: one index operation selects tokens from all of them."""
    num_sequences: int
    """S, which `sequence_ids` stay under."""

    def __len__(self) -> int:
        """Return N."""
        return self.table.shape[1]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return float64 [N], one column of TokenRecord by its name."""
        return self.table[_COLUMNS.index(name)]

    @property
    def sequence_ids(self) -> torch.Tensor:
        """Return int64 [N]."""
        return self["sequence_ids"].long()

    @property
    def staleness(self) -> torch.Tensor:
        """Return int64 [N], -1 where unknown."""
        return self["staleness"].long()

    def means(self, *names: str) -> list[float]:
        """Return the mean of each of these columns; NaN where the column is."""
        means = self.table.mean(dim=1).tolist()
        return [means[_COLUMNS.index(name)] for name in names]

    def where(self, chosen: torch.Tensor) -> Tokens:
        """Return the tokens at which `chosen` [N] is true."""
        return Tokens(self.table.index_select(1, chosen.nonzero().flatten()), self.num_sequences)


def gathered(records: list[TokenRecord], rows: int, ranks: Ranks) -> tuple[Tokens, Tokens]:
    """Lay the records of every rank together; a collective call.

    Args:
        records: Of this rank, in the order of rows and updates; at least one, which may be of no token.
        rows: How many of them are the first pass over the batch.
        ranks: Who takes part.

    Returns:
        The tokens of all passes, and those of the first.
    """
    device = records[0].mask.device
    counts = ranks.gather(torch.tensor([sum(record.num_sequences for record in records)], device=device)).tolist()
    offset, tables = int(sum(counts[: ranks.rank])), []
    for index, record in enumerate(records):
        tables.append(_table(record, offset, is_first=index < rows))
        offset += record.num_sequences
    table = ranks.gather(torch.cat(tables)).T.double().contiguous()
    mask, is_first = table[_COLUMNS.index("mask")] > 0, table[-1] > 0
    every = Tokens(table[:-1], int(sum(counts)))
    if not mask.all():
        every, is_first = every.where(mask), is_first[mask]
    return every, every if is_first.all() else every.where(is_first)


def _table(record: TokenRecord, offset: int, *, is_first: bool) -> torch.Tensor:
    """Return [M, columns + 1]: one gather over ranks instead of one a column; ids and versions stay exact up to 2^24."""
    dtype = torch.promote_types(record.current_logprobs.dtype, torch.float32)
    numbered = replace(record, sequence_ids=record.sequence_ids + offset)
    columns = [getattr(numbered, name).to(dtype) for name in _COLUMNS]
    return torch.stack([*columns, torch.full_like(columns[0], float(is_first))], dim=1)
