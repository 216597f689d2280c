"""From a `StepBatch`'s bytes to what the model and the loss read; numpy on the way, so that it can run on a thread beside a step.

A forward runs only what the loss needs: each sample up to the token before its last trained one, and a prompt that several
members of a group in the same row begin with only once (its hidden states are the same for all of them: same values, same
gradients, fewer tokens).

Invariants: one `target` for every position of the loss mask that is 1; a target's hidden state is that of the token before it
in its own sample. Called by learner/step.py and learner/worker.py (prefetch).

Legend: N tokens the model sees, M targets, S samples of the row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import LearnerError
from asyncrl.models.attention import SequenceLayout, build_layout
from asyncrl.schema.batches import PackedRow, PackedSample, StepBatch
from asyncrl.schema.samples import ids_from_bytes, logprobs_from_bytes


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
    sequence_ids: torch.Tensor
    """int64 [M], which of the row's samples (0 to S - 1)."""
    sample_index: NDArray[np.int64]
    """[S], position of each of them in `StepBatch.samples`."""

    @property
    def num_targets(self) -> int:
        """Return M."""
        return len(self.target_ids)

    def to(self, device: torch.device) -> Row:
        """Return the row on `device` (itself where it is there already)."""
        if device.type == "cpu":
            return self
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self) if field.name != "sample_index"}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A `StepBatch` ready to train, rows without a trained token left out."""

    batch: StepBatch
    rows: tuple[Row, ...]


def prepare(batch: StepBatch) -> PreparedBatch:
    """Decode a batch. CPU only, no model needed; safe on any thread.

    Raises:
        LearnerError: Arrays of a row differ in length, or a sample lies outside its row.
    """
    members: list[list[tuple[int, PackedSample]]] = [[] for _ in batch.rows]
    for index, sample in enumerate(batch.samples):
        members[sample.row].append((index, sample))
    rows = [prepare_row(row, row_members) for row, row_members in zip(batch.rows, members, strict=True)]
    return PreparedBatch(batch, tuple(row for row in rows if row is not None))


def prepare_row(row: PackedRow, members: list[tuple[int, PackedSample]]) -> Row | None:
    """Decode one row; None when nothing in it is trained.

    Args:
        row: The arrays.
        members: The row's samples with their positions in the batch.
    """
    token_ids = ids_from_bytes(row.token_ids)
    mask = np.frombuffer(row.loss_mask, dtype=np.uint8)
    logprobs = logprobs_from_bytes(row.behaviour_logprobs)
    if not len(token_ids) == len(mask) == len(logprobs):
        raise LearnerError(
            f"arrays of a row differ in length: {len(token_ids)} tokens, {len(mask)} of mask, {len(logprobs)} logprobs"
        )
    builder = _RowBuilder(token_ids)
    for index, sample in members:
        end = sample.start + sample.prompt_tokens + sample.response_tokens
        if end > len(token_ids):
            raise LearnerError(f"sample g{sample.group_id}.{sample.index} ends at {end}, its row at {len(token_ids)}")
        builder.add(index, sample, np.flatnonzero(mask[sample.start : end]))
    return builder.build(logprobs)


class _RowBuilder:
    """Collects samples of one row; lives for one `prepare_row`."""

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        self.token_ids = token_ids
        self.num_tokens = 0
        self.sources: list[NDArray[np.int64]] = []
        self.positions: list[NDArray[np.int64]] = []
        self.sequences: list[NDArray[np.int64]] = []
        self.targets: list[NDArray[np.int64]] = []
        self.hidden_index: list[NDArray[np.int64]] = []
        self.sample_index: list[int] = []
        self.prompts: dict[tuple[int, bytes], int] = {}
        """First kept token of each group's prompt."""

    def add(self, index: int, sample: PackedSample, trained: NDArray[np.int64]) -> None:
        """Add a sample whose tokens at the offsets `trained` are trained."""
        if not len(trained):
            return
        if trained[0] == 0:
            raise LearnerError(
                f"sample g{sample.group_id}.{sample.index}: its first token has nothing before it and cannot be trained"
            )
        length, prompt = int(trained[-1]), min(sample.prompt_tokens, int(trained[-1]))
        first = self._place_prompt(sample, prompt)
        sequence = np.concatenate([
            np.arange(first, first + prompt),
            self._place(sample.start + prompt, range(prompt, length)),
        ])
        self.sequences.append(sequence)
        self.hidden_index.append(sequence[trained - 1])
        self.targets.append(trained + sample.start)
        self.sample_index.append(index)

    def _place_prompt(self, sample: PackedSample, prompt: int) -> int:
        key = (sample.group_id, self.token_ids[sample.start : sample.start + prompt].tobytes())
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

    def build(self, logprobs: NDArray[np.float32]) -> Row | None:
        if not self.sequences:
            return None
        targets = np.concatenate(self.targets)
        counts = [len(offsets) for offsets in self.targets]
        return Row(
            input_ids=torch.from_numpy(self.token_ids[np.concatenate(self.sources)].astype(np.int64)),
            position_ids=torch.from_numpy(np.concatenate(self.positions)),
            layout=build_layout(self.sequences, self.num_tokens),
            hidden_index=torch.from_numpy(np.concatenate(self.hidden_index)),
            target_ids=torch.from_numpy(self.token_ids[targets].astype(np.int64)),
            behaviour_logprobs=torch.from_numpy(logprobs[targets].copy()),
            sequence_ids=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
            sample_index=np.array(self.sample_index),
        )
