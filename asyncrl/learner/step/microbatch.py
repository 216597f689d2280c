"""Turns the bytes of a `StepBatch` into the tensors that model and loss read. A row is one micro-batch.

A step's groups are divided evenly over its updates (minibatches), in the batch's order. A row whose samples belong to several
updates becomes one micro-batch in each of them, so packing and ranks do not decide which update trains a sample. Every rank has
the whole batch and trains the rows with its number. A rank with fewer rows in an update runs fillers (forward and backward
without effect), because ranks that share a model's weights must call the model equally often.

A forward runs only what the loss needs: each sample up to the token before its last trained token. If several members of a group
share a row, their prompt is run once; so is a beginning that all prompts of a row share (a system prompt, worked examples). The
hidden states are the same for all of them.

Values that rows compute per token are collected in a table: one line per sample, one column per response token. Computations over
the whole step (advantages, corrections) read and write such tables, and each row then takes its part. Lines follow
`StepBatch.samples`, so neither packing nor the number of ranks changes a table.

Invariants: one target for every position of the loss mask that is 1; a target's hidden state is that of the token before it in
its own sample; every rank has equally many rows in each update. numpy only until the tensors are built, so `prepare` can run on
a thread beside a step.

Legend: N tokens the model sees, M targets of a row, S samples (of a row, or of the step for a table), T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.algorithms.diagnostics import FloatArray
from asyncrl.algorithms.screening import updates_of_groups
from asyncrl.learner.ranks.group import Ranks
from asyncrl.models.attention import SMALLEST_BUCKET, SequenceLayout, build_layout, on_device
from asyncrl.schema.samples import PackedRow, PackedSample, StepBatch, ids_from_bytes, logprobs_from_bytes

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch as tensors; the model's inputs are int64 [N]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: SequenceLayout
    hidden_index: torch.Tensor
    """int64 [M], the token whose hidden state predicts the target."""
    hidden_tokens: torch.Tensor
    """int64, the tokens in `hidden_index`, each once, ascending."""
    target_ids: torch.Tensor
    """int64 [M]."""
    behaviour_logprobs: torch.Tensor
    """float32 [M]."""
    versions: torch.Tensor
    """int64 [M], the version that sampled each target; -1 where unknown."""
    sequence_ids: torch.Tensor
    """int64 [M], which of the row's samples (0 to S - 1)."""
    sample_index: NDArray[np.int64]
    """[S], position of each of the row's samples in `StepBatch.samples`."""
    places: tuple[NDArray[np.int64], NDArray[np.int64]]
    """[M] each, line and column of every target in a table: its sample's position in `StepBatch.samples`, and its position in
    the response."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [M]; None where the batch has none."""
    is_filler: bool = False
    """Run but not trained, because another rank has more rows."""

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.sample_index)

    @property
    def mask(self) -> torch.Tensor:
        """Bool [M], which targets count: all of them, or none in a filler."""
        return torch.full_like(self.target_ids, not self.is_filler, dtype=torch.bool)

    def part_of(self, table: NDArray[Scalar]) -> torch.Tensor:
        """Return [M], the row's part of a table [S, T], on the row's device."""
        return torch.from_numpy(table[self.places]).to(self.target_ids.device)

    def to(self, device: torch.device) -> Row:
        """Return the row on `device` (itself where it is there already)."""
        return self if device.type == "cpu" else on_device(self, device)


@dataclass(frozen=True, slots=True)
class Division:
    """How a step's work is split."""

    minibatches: int = 1
    rank: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A `StepBatch` prepared for one rank. Rows without a trained token are left out."""

    batch: StepBatch
    division: Division
    updates: tuple[tuple[Row, ...], ...]
    """This rank's rows of each update, fillers included; at most `minibatches` updates, none empty."""
    mask: NDArray[np.bool_]
    """[S, T], the trained tokens of all ranks."""
    update_of_sample: NDArray[np.int64]
    """[S of the step], the update that trains each sample; -1: none of its tokens is trained."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """This rank's rows, update by update, fillers included."""
        return tuple(row for update in self.updates for row in update)

    def collect(self, values: Sequence[torch.Tensor], ranks: Ranks) -> FloatArray:
        """Return the table [S, T] of every rank's values of its rows, 0 at untrained tokens.

        Args:
            values: [M] for each of this rank's rows, on any device.
            ranks: The learner's ranks; every rank must call this.
        """
        own = [(row, part) for row, part in zip(self.rows, values, strict=True) if not row.is_filler]
        places = [np.ravel_multi_index(row.places, self.mask.shape) for row, _ in own]
        parts = [part.detach().double().cpu().numpy() for _, part in own]
        placed_N2 = np.stack([np.concatenate([np.zeros(0), *places]), np.concatenate([np.zeros(0), *parts])], axis=1)
        placed_N2 = ranks.gather(torch.from_numpy(placed_N2)).cpu().numpy()
        table = np.zeros(self.mask.shape)
        table.reshape(-1)[placed_N2[:, 0].astype(np.int64)] = placed_N2[:, 1]
        return table


def prepare(batch: StepBatch, division: Division = Division()) -> PreparedBatch:
    """Decode a batch. Runs on the CPU, needs no model, and is safe on any thread.

    Args:
        batch: As received.
        division: The number of updates, and the rank to prepare for; by default one update and one rank.
    """
    samples = batch.samples
    arrays = [_decode(row) for row in batch.rows]
    trained = [_trained(arrays[sample.row], sample) for sample in samples]
    columns = [places - sample.prompt_tokens for places, sample in zip(trained, samples, strict=True)]
    mask = np.zeros((len(samples), max((int(own[-1]) + 1 for own in columns if len(own)), default=1)), dtype=np.bool_)
    for line, own in enumerate(columns):
        mask[line, own] = True
    groups = [sample.group_id for sample, places in zip(samples, trained, strict=True) if len(places)]
    update_of_group = updates_of_groups(groups, division.minibatches)
    update_of_sample = np.array([
        update_of_group[sample.group_id] if len(places) else -1 for sample, places in zip(samples, trained, strict=True)
    ], dtype=np.int64)  # fmt: skip
    pieces: list[_Pieces] = [{} for _ in range(int(update_of_sample.max(initial=-1)) + 1)]
    for index in sorted(np.flatnonzero(update_of_sample >= 0).tolist(), key=lambda index: samples[index].row):
        member = _Member(index, samples[index], trained[index])
        pieces[update_of_sample[index]].setdefault(member.sample.row, []).append(member)
    updates = tuple(_own_rows(batch, arrays, update, division) for update in pieces)
    return PreparedBatch(batch, division, updates, mask, update_of_sample)


@dataclass(frozen=True, slots=True)
class _RowArrays:
    """A packed row's arrays, [L] each, as views of its bytes."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    behaviour_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reference_logprobs: NDArray[np.float32] | None


class _Member(NamedTuple):
    number: int
    """Position in `StepBatch.samples`."""
    sample: PackedSample
    trained: NDArray[np.int64]
    """Positions of its trained tokens, counted from its first prompt token; at least one."""


_Pieces = dict[int, list[_Member]]
"""What an update trains in each packed row, by the row's number."""


def _decode(row: PackedRow) -> _RowArrays:
    token_ids = ids_from_bytes(row.token_ids)
    mask = np.frombuffer(row.loss_mask, dtype=np.uint8)
    logprobs = logprobs_from_bytes(row.behaviour_logprobs)
    assert len(token_ids) == len(mask) == len(logprobs), "arrays of a row differ in length"
    versions = ids_from_bytes(row.versions) if row.versions else np.full(len(token_ids), -1, dtype=np.int32)
    reference = logprobs_from_bytes(row.reference_logprobs) if row.reference_logprobs else None
    return _RowArrays(token_ids, mask, logprobs, versions, reference)


def _trained(arrays: _RowArrays, sample: PackedSample) -> NDArray[np.int64]:
    """Return the positions of a sample's trained tokens, counted from its first prompt token."""
    end = sample.start + sample.prompt_tokens + sample.response_tokens
    assert end <= len(arrays.token_ids), f"{sample} ends after its row"
    trained = np.flatnonzero(arrays.mask[sample.start : end])
    assert not len(trained) or trained[0] >= max(1, sample.prompt_tokens), f"a prompt token of {sample} is to be trained"
    return trained


def _own_rows(batch: StepBatch, arrays: list[_RowArrays], pieces: _Pieces, division: Division) -> tuple[Row, ...]:
    """Return the micro-batches of one rank in one update, with fillers up to the largest count of any rank."""
    of_rank: list[list[int]] = [[] for _ in range(division.num_ranks)]
    for row in pieces:
        of_rank[batch.rows[row].rank % division.num_ranks].append(row)
    own = [_build(arrays[row], pieces[row]) for row in of_rank[division.rank]]
    missing = max(map(len, of_rank)) - len(own)
    if not missing:
        return tuple(own)
    shortest = min(pieces, key=lambda row: sum(one.sample.prompt_tokens + one.sample.response_tokens for one in pieces[row]))
    filler = replace(_build(arrays[shortest], pieces[shortest]), is_filler=True)
    return (*own, *[filler] * missing)


def _build(arrays: _RowArrays, members: list[_Member]) -> Row:
    """Lay out samples that each have a trained token; a prompt that several members of a group share is included once."""
    lengths = [int(member.trained[-1]) for member in members]
    keys = [
        (sample.group_id, arrays.token_ids[sample.start : sample.start + min(sample.prompt_tokens, length)].tobytes())
        for (_, sample, _), length in zip(members, lengths, strict=True)
    ]
    begun_with = {prompt for _, prompt in keys}
    first, last = (np.frombuffer(prompt, np.int32) for prompt in (min(begun_with), max(begun_with)))
    shorter = min(len(first), len(last))
    common = int(np.argmin(np.append(first[:shorter] == last[:shorter], False)))  # tokens that all prompts begin with
    if len(set(keys)) == 1 or common < SMALLEST_BUCKET:
        common = 0  # too few to be worth a run of their own
    prompts: dict[tuple[int, bytes], NDArray[np.int64]] = {}
    sequences: list[NDArray[np.int64]] = []
    sources, positions = [], []
    num_tokens = 0
    for (_, sample, _), length, key in zip(members, lengths, keys, strict=True):
        num_prompt = len(key[1]) // 4
        shared = prompts[key] if key in prompts else sequences[0][:common] if sequences else np.arange(0)
        new = np.arange(len(shared), length)
        sequence = np.concatenate([shared, np.arange(num_tokens, num_tokens + len(new))])
        prompts.setdefault(key, sequence[:num_prompt])
        sources.append(sample.start + new)
        positions.append(new)
        sequences.append(sequence)
        num_tokens += len(new)
    counts, indices = [len(member.trained) for member in members], np.array([member.number for member in members])
    token_ids, reference = arrays.token_ids.astype(np.int64), arrays.reference_logprobs
    targets = np.concatenate([member.trained + member.sample.start for member in members])
    hidden = np.concatenate([sequence[member.trained - 1] for sequence, member in zip(sequences, members, strict=True)])
    return Row(
        input_ids=torch.from_numpy(token_ids[np.concatenate(sources)]),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        layout=build_layout(sequences, num_tokens),
        hidden_index=torch.from_numpy(hidden),
        hidden_tokens=torch.from_numpy(np.unique(hidden)),
        target_ids=torch.from_numpy(token_ids[targets]),
        behaviour_logprobs=torch.from_numpy(arrays.behaviour_logprobs[targets].copy()),
        versions=torch.from_numpy(arrays.versions[targets].astype(np.int64)),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        sample_index=indices,
        places=(np.repeat(indices, counts), np.concatenate([member.trained - member.sample.prompt_tokens for member in members])),
        reference_logprobs=None if reference is None else torch.from_numpy(reference[targets].copy()),
    )
