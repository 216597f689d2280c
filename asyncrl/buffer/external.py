"""A whole group that outside code generated: why it is refused, or the samples as the buffer holds them.

Pure; called by buffer/buffer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.algorithms.screening import Screen
from asyncrl.buffer.events import ExternalGroupAdded
from asyncrl.buffer.records import IssuedRecord, Record, SampleRecord
from asyncrl.buffer.staleness import VersionCounts
from asyncrl.buffer.validate import SampleRefusedError, examine, group_error
from asyncrl.schema.samples import Prompt, Sample


@dataclass(frozen=True, slots=True)
class ExternalGroup:
    """A submitted group, checked."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """By index, as they came."""
    counts: tuple[VersionCounts, ...]
    """Of each sample."""
    submitter: str

    @property
    def oldest(self) -> int:
        """Return the oldest version of any trained token."""
        return min(each[0][0] for each in self.counts)

    def added(self, group_id: int) -> ExternalGroupAdded:
        """Return the event that enters it under this id."""
        truncated = tuple(index for index, sample in enumerate(self.samples) if sample.finish_reason == "length")
        return ExternalGroupAdded(group_id, self.prompt.prompt_id, self.submitter, self.counts, truncated)

    def held(self, group_id: int) -> dict[int, Sample]:
        """Return the samples by index, named as members of that group."""
        return {
            index: msgspec.structs.replace(sample, group_id=group_id, index=index, generator=self.submitter, purpose="train")
            for index, sample in enumerate(self.samples)
        }

    def records(self, held: dict[int, Sample], group_id: int, now: float, cursor: int) -> list[Record]:
        """Return what the ledger is told."""
        size = len(self.samples)
        issued = IssuedRecord(group_id, self.prompt, self.submitter, self.oldest, size, now, cursor=cursor, external=True)
        return [
            issued,
            *(SampleRecord(held[index], each[0][0], each[-1][0], now) for index, each in enumerate(self.counts)),
        ]


def examine_group(
    prompt: Prompt, samples: Sequence[Sample], submitter: str, *, newest_version: int, screen: Screen, tokens_per_row: int
) -> ExternalGroup | str:
    """Check a submitted group; return it, or why it is refused."""
    try:
        counts = tuple(examine(sample, newest_version=newest_version, max_tokens=tokens_per_row) for sample in samples)
    except SampleRefusedError as error:
        return f"invalid sample from {submitter}: {error}"
    return group_error(samples, screen, tokens_per_row) or ExternalGroup(prompt, tuple(samples), counts, submitter)
