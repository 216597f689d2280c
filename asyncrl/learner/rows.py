"""From a `StepBatch`'s bytes to what the model and the loss read; numpy on the way, so that it can run on a thread beside a step.

A step's groups are divided evenly over its updates (minibatches), in the batch's order; a packed row whose samples belong to
several updates (packing/tensors.py makes none) becomes one micro-batch in each. So which update trains a sample depends on no
packing and no ranks. Every rank knows the whole batch and trains the rows with its number; one that has fewer of an update than
another runs fillers, forward and backward without effect, because ranks that share a model's weights must call it equally
often.

A forward runs only what the loss needs: each sample up to the token before its last trained one, and a prompt that several
members of a group in the same row begin with only once (its hidden states are the same for all of them: same values, same
gradients, fewer tokens).

Invariants: one `target` for every position of the loss mask that is 1; a target's hidden state is that of the token before it
in its own sample; every rank has equally many rows in each update. Called by learner/step.py, learner/worker.py (prefetch) and
learner/follower.py.

Legend: N tokens the model sees, M targets, S samples of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.updates import updates_of_groups
from asyncrl.errors import LearnerError
from asyncrl.learner.token_table import RowTargets, TokenTable
from asyncrl.models.attention import SequenceLayout, build_layout
from asyncrl.schema.batches import PackedRow, PackedSample, StepBatch
from asyncrl.schema.samples import ids_from_bytes, logprobs_from_bytes

Member = tuple[int, PackedSample]
"""A sample and its position in `StepBatch.samples`."""


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
    """Where the targets lie in the step's table."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [M], where the batch brings them."""
    is_filler: bool = False
    """Run, and not trained: another rank has one row more."""

    @property
    def num_targets(self) -> int:
        """Return M."""
        return len(self.target_ids)

    @property
    def num_sequences(self) -> int:
        """Return S."""
        return len(self.sample_index)

    def to(self, device: torch.device) -> Row:
        """Return the row on `device` (itself where it is there already)."""
        if device.type == "cpu":
            return self
        movable = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in movable.items() if isinstance(value, torch.Tensor | SequenceLayout)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class Division:
    """How a step's work is split."""

    minibatches: int = 1
    rank: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A `StepBatch` ready to train by one rank, rows without a trained token left out."""

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
        """Return this rank's rows, update by update, fillers included."""
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
    arrays = [_decode(row) for row in batch.rows]
    trained = [_trained(arrays[sample.row], sample) for sample in batch.samples]
    table = TokenTable.of([offsets - sample.prompt_tokens for offsets, sample in zip(trained, batch.samples, strict=True)])
    update_of_sample = _divide(batch.samples, table, division.minibatches)
    pieces = _pieces(batch.samples, update_of_sample)
    updates = tuple(_own_rows(batch, arrays, update, division) for update in pieces)
    return PreparedBatch(batch, division, updates, table, update_of_sample)


def prepare_row(row: PackedRow, members: list[Member]) -> Row | None:
    """Decode one row; None when nothing in it is trained.

    Args:
        row: The arrays.
        members: The row's samples with their positions in the batch.
    """
    arrays = _decode(row)
    trained = {index: _trained(arrays, sample) for index, sample in members}
    kept = [(index, sample) for index, sample in members if len(trained[index])]
    return _build(arrays, kept) if kept else None


def split_row(batch: StepBatch, row: Row) -> tuple[Row, ...]:
    """Return two rows of about half the tokens each, which together train what the row trains, in its order; or the row itself.

    Samples are never split, nor are the two samples of a preference pair.

    Args:
        batch: Which the row is of.
        row: On any device.
    """
    members = [(int(index), batch.samples[index]) for index in row.sample_index]
    cuts = [cut for cut in range(1, len(members)) if members[cut][1].pair < 0 or members[cut][1].pair != members[cut - 1][1].pair]
    if not cuts:
        return (row,)
    upto = np.cumsum([sample.prompt_tokens + sample.response_tokens for _, sample in members])
    middle = min(cuts, key=lambda cut: abs(2 * upto[cut - 1] - upto[-1]))
    arrays = _decode(batch.rows[members[0][1].row])
    halves = (_build(arrays, members[:middle]), _build(arrays, members[middle:]))
    return tuple(half.to(row.input_ids.device) for half in halves)


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


def _divide(samples: Sequence[PackedSample], table: TokenTable, minibatches: int) -> NDArray[np.int64]:
    """Return the update of each sample; -1 where nothing of it is trained."""
    trained = np.any(table.mask, axis=1).tolist()
    groups = [sample.group_id for sample, some in zip(samples, trained, strict=True) if some]
    update_of_group = updates_of_groups(groups, minibatches)
    chosen = [update_of_group[sample.group_id] if some else -1 for sample, some in zip(samples, trained, strict=True)]
    return np.array(chosen, dtype=np.int64)


def _pieces(samples: Sequence[PackedSample], update_of_sample: NDArray[np.int64]) -> list[_Pieces]:
    """Return what each update trains of which rows, rows in order."""
    updates: list[_Pieces] = [{} for _ in range(int(update_of_sample.max(initial=-1)) + 1)]
    for index in sorted(np.flatnonzero(update_of_sample >= 0).tolist(), key=lambda index: samples[index].row):
        updates[update_of_sample[index]].setdefault(samples[index].row, []).append((index, samples[index]))
    return updates


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
    builder = _RowBuilder(arrays)
    for index, sample in members:
        builder.add(index, sample, _trained(arrays, sample))
    return builder.build()


class _RowBuilder:
    """Collects samples of one row; lives for one `_build`."""

    def __init__(self, arrays: _RowArrays) -> None:
        self.arrays = arrays
        self.num_tokens = 0
        self.sources: list[NDArray[np.int64]] = []
        self.positions: list[NDArray[np.int64]] = []
        self.sequences: list[NDArray[np.int64]] = []
        self.targets: list[NDArray[np.int64]] = []
        self.offsets: list[NDArray[np.int64]] = []
        self.hidden_index: list[NDArray[np.int64]] = []
        self.sample_index: list[int] = []
        self.prompts: dict[tuple[int, bytes], int] = {}
        """First kept token of each group's prompt."""

    def add(self, index: int, sample: PackedSample, trained: NDArray[np.int64]) -> None:
        """Add a sample whose tokens at the places `trained` (at least one) are trained."""
        length, prompt = int(trained[-1]), min(sample.prompt_tokens, int(trained[-1]))
        first = self._place_prompt(sample, prompt)
        sequence = np.concatenate([
            np.arange(first, first + prompt),
            self._place(sample.start + prompt, range(prompt, length)),
        ])
        self.sequences.append(sequence)
        self.hidden_index.append(sequence[trained - 1])
        self.targets.append(trained + sample.start)
        self.offsets.append(trained - sample.prompt_tokens)
        self.sample_index.append(index)

    def _place_prompt(self, sample: PackedSample, prompt: int) -> int:
        key = (sample.group_id, self.arrays.token_ids[sample.start : sample.start + prompt].tobytes())
        if key not in self.prompts:
            self.prompts[key] = self.num_tokens
            self._place(sample.start, range(prompt))
        return self.prompts[key]

    def _place(self, source: int, positions: range) -> NDArray[np.int64]:
        placed = np.arange(self.num_tokens, self.num_tokens + len(positions))
        self.sources.append(np.arange(source, source + len(positions)))
        self.positions.append(np.arange(positions.start, positions.stop))
        self.num_tokens += len(positions)
        return placed

    def build(self) -> Row:
        arrays, targets = self.arrays, np.concatenate(self.targets)
        counts = [len(places) for places in self.targets]
        reference = arrays.reference_logprobs
        return Row(
            input_ids=torch.from_numpy(arrays.token_ids[np.concatenate(self.sources)].astype(np.int64)),
            position_ids=torch.from_numpy(np.concatenate(self.positions)),
            layout=build_layout(self.sequences, self.num_tokens),
            hidden_index=torch.from_numpy(np.concatenate(self.hidden_index)),
            target_ids=torch.from_numpy(arrays.token_ids[targets].astype(np.int64)),
            behaviour_logprobs=torch.from_numpy(arrays.behaviour_logprobs[targets].copy()),
            versions=torch.from_numpy(arrays.versions[targets].astype(np.int64)),
            sequence_ids=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
            sample_index=np.array(self.sample_index),
            targets=RowTargets(np.repeat(self.sample_index, counts), np.concatenate(self.offsets)),
            reference_logprobs=None if reference is None else torch.from_numpy(reference[targets].copy()),
        )
