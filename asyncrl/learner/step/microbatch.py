"""From the bytes of a `StepBatch` to the tensors that model and loss read. A row is one micro-batch.

A step's groups are divided evenly over its updates (minibatches), in the batch's order. A row whose samples belong to several
updates becomes one micro-batch in each. So packing and ranks do not decide which update trains a sample. Every rank knows the
whole batch and trains the rows with its number. A rank with fewer rows in an update runs fillers: forward and backward without
effect, because ranks that share a model's weights must call it equally often.

A forward runs only what the loss needs: each sample up to the token before its last trained one. A prompt that several members
of a group in one row begin with is run once; its hidden states are the same for all of them.

What rows compute token by token is collected in a `TokenTable`: one line a sample, one column a response token. What looks at
the whole step (advantages, corrections) reads and makes such tables, and rows take their part again. Lines follow
`StepBatch.samples`, so no packing and no number of ranks changes a table.

Invariants: one target for every position of the loss mask that is 1; a target's hidden state is that of the token before it in
its own sample; every rank has equally many rows in each update. numpy only until the tensors are built, so `prepare` can run on
a thread beside a step.

Legend: N tokens the model sees, M targets of a row, S samples (of a row, or of the step for a table), T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.advantage_types import FloatArray
from asyncrl.algorithms.screening import updates_of_groups
from asyncrl.errors import LearnerError
from asyncrl.learner.ranks.group import Ranks
from asyncrl.models.attention import SequenceLayout, build_layout
from asyncrl.schema.batches import PackedRow, PackedSample, StepBatch
from asyncrl.schema.samples import ids_from_bytes, logprobs_from_bytes

Member = tuple[int, PackedSample]
"""A sample and its position in `StepBatch.samples`."""


@dataclass(frozen=True, slots=True)
class RowTargets:
    """Where a row's targets lie in the step's table."""

    samples: NDArray[np.int64]
    """[M], the line."""
    offsets: NDArray[np.int64]
    """[M], the column."""


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch as tensors."""

    input_ids: torch.Tensor
    """int64 [N]."""
    position_ids: torch.Tensor
    """int64 [N]."""
    layout: SequenceLayout
    hidden_index: torch.Tensor
    """int64 [M], the token whose hidden state predicts the target."""
    target_ids: torch.Tensor
    """int64 [M]."""
    behaviour_logprobs: torch.Tensor
    """float32 [M]."""
    versions: torch.Tensor
    """int64 [M], the version that sampled each target; -1 where unknown."""
    sequence_ids: torch.Tensor
    """int64 [M], which of the row's samples (0 to S - 1)."""
    sample_index: NDArray[np.int64]
    """[S], position of each of them in `StepBatch.samples`."""
    targets: RowTargets
    reference_logprobs: torch.Tensor | None = None
    """float32 [M], where the batch brings them."""
    is_filler: bool = False
    """Run but not trained: another rank has one row more."""

    @property
    def num_targets(self) -> int:
        """M."""
        return len(self.target_ids)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.sample_index)

    @property
    def mask(self) -> torch.Tensor:
        """Bool [M], which targets count: all, or none of a filler."""
        return torch.full_like(self.target_ids, not self.is_filler, dtype=torch.bool)

    def to(self, device: torch.device) -> Row:
        """Return the row on `device` (itself where it is there already)."""
        if device.type == "cpu":
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor | SequenceLayout)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The trained tokens of all ranks."""

    mask: NDArray[np.bool_]
    """[S, T], true on trained tokens."""

    @classmethod
    def of(cls, trained: Sequence[NDArray[np.int64]]) -> TokenTable:
        """Return the table of S samples whose response tokens at the offsets `trained` are trained."""
        width = max((int(offsets[-1]) + 1 for offsets in trained if len(offsets)), default=1)
        mask = np.zeros((len(trained), width), dtype=np.bool_)
        for line, offsets in enumerate(trained):
            mask[line, offsets] = True
        return cls(mask)

    def collect(self, rows: Sequence[Row], values: Sequence[torch.Tensor], ranks: Ranks) -> FloatArray:
        """Return [S, T], every rank's values of its rows, 0 at untrained tokens.

        Args:
            rows: This rank's.
            values: [M] of each of them, on any device.
            ranks: All must call.
        """
        own = [
            (row.targets.samples * self.mask.shape[1] + row.targets.offsets, part.detach().double().cpu().numpy())
            for row, part in zip(rows, values, strict=True)
            if not row.is_filler
        ]
        places = np.concatenate([place for place, _ in own]) if own else np.zeros(0)
        parts = np.concatenate([part for _, part in own]) if own else np.zeros(0)
        table = np.zeros(self.mask.shape)
        if ranks.size > 1:
            received = ranks.gather(torch.from_numpy(np.stack([places.astype(np.float64), parts], axis=1))).cpu().numpy()
            places, parts = received[:, 0], received[:, 1]
        table.reshape(-1)[places.astype(np.int64)] = parts
        return table

    @staticmethod
    def of_row(table: FloatArray, row: Row) -> torch.Tensor:
        """Return [M], the row's part of a table, on the CPU."""
        return torch.from_numpy(table[row.targets.samples, row.targets.offsets])


@dataclass(frozen=True, slots=True)
class Division:
    """How a step's work is split."""

    minibatches: int = 1
    rank: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A `StepBatch` ready to train by one rank. Rows without a trained token are left out."""

    batch: StepBatch
    division: Division
    updates: tuple[tuple[Row, ...], ...]
    """This rank's rows of each update, fillers included; at most `minibatches` updates, none empty."""
    table: TokenTable
    """Every rank's targets."""
    update_of_sample: NDArray[np.int64]
    """[S of the step], which update trains it; -1: none of its tokens is trained."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """This rank's rows, update by update, fillers included."""
        return tuple(row for update in self.updates for row in update)


def prepare(batch: StepBatch, division: Division | None = None) -> PreparedBatch:
    """Decode a batch. CPU only, no model needed; safe on any thread.

    Args:
        batch: As it came.
        division: Into how many updates, and for which rank; None: one update, one rank.

    Raises:
        LearnerError: Arrays of a row differ in length, or a sample lies outside its row.
    """
    division = Division() if division is None else division
    samples = batch.samples
    arrays = [_decode(row) for row in batch.rows]
    trained = [_trained(arrays[sample.row], sample) for sample in samples]
    table = TokenTable.of([places - sample.prompt_tokens for places, sample in zip(trained, samples, strict=True)])
    groups = [sample.group_id for sample, places in zip(samples, trained, strict=True) if len(places)]
    update_of_group = updates_of_groups(groups, division.minibatches)
    update_of_sample = np.array([
        update_of_group[sample.group_id] if len(places) else -1 for sample, places in zip(samples, trained, strict=True)
    ], dtype=np.int64)  # fmt: skip
    pieces: list[_Pieces] = [{} for _ in range(int(update_of_sample.max(initial=-1)) + 1)]
    for index in sorted(np.flatnonzero(update_of_sample >= 0).tolist(), key=lambda index: samples[index].row):
        pieces[update_of_sample[index]].setdefault(samples[index].row, []).append((index, samples[index]))
    updates = tuple(_own_rows(batch, arrays, update, division) for update in pieces)
    return PreparedBatch(batch, division, updates, table, update_of_sample)


def prepare_row(row: PackedRow, members: list[Member]) -> Row | None:
    """Decode one row with its samples; None when nothing in it is trained."""
    arrays = _decode(row)
    kept = [(index, sample) for index, sample in members if len(_trained(arrays, sample))]
    return _build(arrays, kept) if kept else None


@dataclass(frozen=True, slots=True)
class _RowArrays:
    """A packed row's arrays, [L] each, views of its bytes."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    behaviour_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reference_logprobs: NDArray[np.float32] | None


_Pieces = dict[int, list[Member]]
"""What an update trains of each packed row, by the row's number."""


def _decode(row: PackedRow) -> _RowArrays:
    token_ids = ids_from_bytes(row.token_ids)
    mask = np.frombuffer(row.loss_mask, dtype=np.uint8)
    logprobs = logprobs_from_bytes(row.behaviour_logprobs)
    if not len(token_ids) == len(mask) == len(logprobs):
        raise LearnerError(
            f"arrays of a row differ in length: {len(token_ids)} tokens, {len(mask)} of mask, {len(logprobs)} logprobs"
        )
    versions = ids_from_bytes(row.versions) if row.versions else np.full(len(token_ids), -1, dtype=np.int32)
    reference = logprobs_from_bytes(row.reference_logprobs) if row.reference_logprobs else None
    return _RowArrays(token_ids, mask, logprobs, versions, reference)


def _trained(arrays: _RowArrays, sample: PackedSample) -> NDArray[np.int64]:
    """Return the places of a sample's trained tokens, counted from its first prompt token."""
    end = sample.start + sample.prompt_tokens + sample.response_tokens
    if end > len(arrays.token_ids):
        raise LearnerError(f"sample g{sample.group_id}.{sample.index} ends at {end}, its row at {len(arrays.token_ids)}")
    trained = np.flatnonzero(arrays.mask[sample.start : end])
    if len(trained) and trained[0] < max(1, sample.prompt_tokens):
        raise LearnerError(
            f"sample g{sample.group_id}.{sample.index}: token {trained[0]} is to be trained, and is part of the prompt "
            f"({sample.prompt_tokens} tokens) or has nothing before it"
        )
    return trained


def _own_rows(batch: StepBatch, arrays: list[_RowArrays], pieces: _Pieces, division: Division) -> tuple[Row, ...]:
    """Return the micro-batches of one rank in one update, with fillers up to the count of the rank that has most."""
    of_rank: list[list[int]] = [[] for _ in range(division.num_ranks)]
    for row in pieces:
        of_rank[batch.rows[row].rank % division.num_ranks].append(row)
    own = [_build(arrays[row], pieces[row]) for row in of_rank[division.rank]]
    missing = max(map(len, of_rank)) - len(own)
    if not missing:
        return tuple(own)
    shortest = min(pieces, key=lambda row: sum(sample.prompt_tokens + sample.response_tokens for _, sample in pieces[row]))
    filler = replace(_build(arrays[shortest], pieces[shortest]), is_filler=True)
    return (*own, *[filler] * missing)


def _build(arrays: _RowArrays, members: list[Member]) -> Row:
    """Lay out samples that each have a trained token; a prompt that several of a group share lies there once."""
    trained = [_trained(arrays, sample) for _, sample in members]
    counts = [len(places) for places in trained]
    prompts: dict[tuple[int, bytes], NDArray[np.int64]] = {}
    sources, positions, sequences = [], [], []
    num_tokens = 0
    for (_, sample), places in zip(members, trained, strict=True):
        length = int(places[-1])
        num_prompt = min(sample.prompt_tokens, length)
        key = (sample.group_id, arrays.token_ids[sample.start : sample.start + num_prompt].tobytes())
        new = np.arange(num_prompt if key in prompts else 0, length)
        laid = np.arange(num_tokens, num_tokens + len(new))
        prompt = prompts.setdefault(key, laid[:num_prompt])
        sources.append(sample.start + new)
        positions.append(new)
        sequences.append(np.concatenate([prompt, laid[len(new) - (length - num_prompt) :]]))
        num_tokens += len(new)
    token_ids = arrays.token_ids.astype(np.int64)
    targets = np.concatenate([places + sample.start for (_, sample), places in zip(members, trained, strict=True)])
    offsets = [places - sample.prompt_tokens for (_, sample), places in zip(members, trained, strict=True)]
    hidden = [sequence[places - 1] for sequence, places in zip(sequences, trained, strict=True)]
    sample_index = np.array([index for index, _ in members])
    reference = arrays.reference_logprobs
    return Row(
        input_ids=torch.from_numpy(token_ids[np.concatenate(sources)]),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        layout=build_layout(sequences, num_tokens),
        hidden_index=torch.from_numpy(np.concatenate(hidden)),
        target_ids=torch.from_numpy(token_ids[targets]),
        behaviour_logprobs=torch.from_numpy(arrays.behaviour_logprobs[targets].copy()),
        versions=torch.from_numpy(arrays.versions[targets].astype(np.int64)),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        sample_index=sample_index,
        targets=RowTargets(np.repeat(sample_index, counts), np.concatenate(offsets)),
        reference_logprobs=None if reference is None else torch.from_numpy(reference[targets].copy()),
    )
