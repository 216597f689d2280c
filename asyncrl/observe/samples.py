"""Recent samples as text: a table a step, in samples.jsonl and in every destination that shows text.

Of each step `observe.samples` members are kept, spread over its groups. The file is bounded: a full one is set behind
(samples.old.jsonl) and the one before that goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from asyncrl.observe.steps import read_lines
from asyncrl.schema.samples import ScoredGroup, ids_from_bytes

SAMPLES_FILE = "samples.jsonl"
MOST_FILE_BYTES = 32 << 20


class SampleRow(msgspec.Struct, frozen=True):
    """One trained sample as people read it."""

    step: int
    group_id: int
    index: int
    prompt_id: str
    prompt: str
    text: str
    reward: float
    parts: dict[str, float]
    oldest_version: int
    newest_version: int
    num_tokens: int
    finish_reason: str

    @property
    def name(self) -> str:
        """What `asyncrl inspect --sample` calls it."""
        return f"g{self.group_id}.{self.index}"

    @property
    def cells(self) -> dict[str, str]:
        """Column to text, for tables of samples."""
        versions = f"{self.oldest_version}-{self.newest_version}"
        return {"sample": self.name, "prompt": self.prompt, "text": self.text, "reward": f"{self.reward:g}",
                "parts": str(self.parts), "versions": versions}  # fmt: skip


def rows_of(step: int, groups: Sequence[ScoredGroup], most: int) -> list[SampleRow]:
    """Return at most `most` rows of a step: the first member of every group, then the second, and so on, in that order."""
    turns = max((len(group.members) for group in groups), default=0)
    members = [(group, group.members[turn]) for turn in range(turns) for group in groups if turn < len(group.members)]
    rows = []
    for group, member in members[:most]:
        versions = ids_from_bytes(member.sample.versions)
        prompt = group.prompt.text or "\n".join(f"{turn.role}: {turn.content}" for turn in group.prompt.messages)
        rows.append(
            SampleRow(
                step=step,
                group_id=group.group_id,
                index=member.sample.index,
                prompt_id=group.prompt.prompt_id,
                prompt=prompt,
                text=member.sample.text,
                reward=member.reward,
                parts=member.parts,
                oldest_version=int(versions.min()) if len(versions) else -1,
                newest_version=int(versions.max()) if len(versions) else -1,
                num_tokens=member.sample.num_tokens,
                finish_reason=member.sample.finish_reason,
            )
        )
    return rows


def read_samples(run_folder: Path) -> Iterator[SampleRow]:
    """Yield the rows that are kept, oldest first."""
    return read_lines(run_folder / SAMPLES_FILE, SampleRow)


def find_sample(run_folder: Path, group_id: int, index: int) -> SampleRow | None:
    """Return one sample's row, or None where it is not kept."""
    return next((row for row in read_samples(run_folder) if (row.group_id, row.index) == (group_id, index)), None)
