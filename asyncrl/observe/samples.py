"""Recent samples: the controller writes them as text to samples.jsonl, the learner token by token to tokens.jsonl.

For each step, `observe.samples` members are kept, spread over the groups of the step, and also the members with the lowest and
the highest reward. tokens.jsonl also has the samples with the lowest and the highest importance ratio of a token. Both files are
bounded: a full file is renamed to NAME.old.jsonl and replaces an older file of this name.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from asyncrl.observe.steps import JsonLines, read_lines
from asyncrl.schema.samples import ScoredGroup, ids_from_bytes

log = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"
TOKENS_FILE = "tokens.jsonl"
MOST_FILE_BYTES = 32 << 20
MOST_ROW_TOKENS = 8192
"""Largest number of tokens in a `TokenRow`; a longer sample takes several rows."""
TRAINED, KEPT, CLIPPED = 1, 2, 4
"""Bits of `TokenRow.flags`: the token is part of the loss; no correction dropped it; a clip stops its gradient."""


class SampleRow(msgspec.Struct, frozen=True):
    """One trained sample as text, for people."""

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
        """Name of the sample for `asyncrl inspect --sample`."""
        return f"g{self.group_id}.{self.index}"

    @property
    def cells(self) -> dict[str, str]:
        """Text by column, for tables of samples."""
        versions = f"{self.oldest_version}-{self.newest_version}"
        return {"sample": self.name, "prompt": self.prompt, "text": self.text, "reward": f"{self.reward:g}",
                "parts": str(self.parts), "versions": versions}  # fmt: skip


class TokenRow(msgspec.Struct, frozen=True):
    """The learner's values for T tokens of a trained sample before the step; arrays are little-endian, in the file as base64."""

    step: int
    group_id: int
    index: int
    reward: float
    first: int
    """Position in the response of the first of these tokens."""
    token_ids: bytes
    """int32 [T]."""
    versions: bytes
    """int32 [T], the version that sampled each token; -1: unknown."""
    behaviour: bytes
    """float32 [T], log-probability under the behaviour policy."""
    learner: bytes
    """float32 [T], log-probability under the learner. This field and the next ones are NaN at untrained tokens and if unknown."""
    weights: bytes
    """float32 [T], weight of the off-policy correction."""
    entropy: bytes
    """float32 [T], entropy of the learner's distribution, in nat."""
    advantages: bytes
    """float32 [T]."""
    flags: bytes
    """uint8 [T]."""
    texts: tuple[str, ...] = ()
    """[T], text of each single token."""


class TokenFile:
    """Writes tokens.jsonl of a run, with each token as text. If the disk is full, only the rows of this moment are lost.

    Args:
        run_folder: Folder of the run.
        decode: Turns one token into text; called once for each different token.
    """

    def __init__(self, run_folder: Path, decode: Callable[[int], str]) -> None:
        self._path, self._decode = run_folder / TOKENS_FILE, decode
        self._file: JsonLines[TokenRow] | None = None
        self._texts: dict[int, str] = {}

    def write(self, rows: Sequence[TokenRow]) -> None:
        """Append rows whose texts are still empty."""
        told = []
        for row in rows:
            ids = ids_from_bytes(row.token_ids).tolist()
            self._texts |= {token: self._decode(token) for token in set(ids) - self._texts.keys()}
            told.append(msgspec.structs.replace(row, texts=tuple(map(self._texts.__getitem__, ids))))
        try:
            if told:
                self._file = self._file or JsonLines(self._path, MOST_FILE_BYTES)
                self._file.write(*told)
        except OSError as error:
            log.warning("%d rows for %s are lost: %s", len(told), self._path, error)

    def close(self) -> None:
        """Close the file; safe to repeat."""
        if self._file is not None:
            self._file.close()


def kept_members(members: Sequence[tuple[int, int, float]], most: int) -> list[int]:
    """Return which samples of a step are kept, as positions in `members` (group, index and reward of each sample).

    At most `most` samples are kept: the first member of every group, then the second, and so on. In addition, the samples with
    the lowest and the highest reward are kept. If `most` is 0, no sample is kept.
    """
    places = sorted(range(len(members)), key=lambda place: members[place][:2])
    by_group = [list(alike) for _, alike in itertools.groupby(places, key=lambda place: members[place][0])]
    chosen = [place for turn in itertools.zip_longest(*by_group) for place in turn if place is not None][:most]
    extremes = [best(places, key=lambda place: members[place][2]) for best in (min, max)] if chosen else []
    return list(dict.fromkeys([*chosen, *extremes]))


def rows_of(step: int, groups: Sequence[ScoredGroup], most: int) -> list[SampleRow]:
    """Return the rows of the samples of a step that are kept; see `kept_members`."""
    members = [(group, member) for group in groups for member in group.members]
    kept = kept_members([(group.group_id, member.sample.index, member.reward) for group, member in members], most)
    rows = []
    for group, member in (members[place] for place in kept):
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
                oldest_version=int(versions.min()),
                newest_version=int(versions.max()),
                num_tokens=member.sample.num_tokens,
                finish_reason=member.sample.finish_reason,
            )
        )
    return rows


def read_samples(run_folder: Path) -> Iterator[SampleRow]:
    """Yield the rows in the files, oldest first."""
    return read_lines(run_folder / SAMPLES_FILE, SampleRow)


def read_tokens(run_folder: Path, step: int) -> dict[tuple[int, int], list[TokenRow]]:
    """Return a step's rows by group and index of the sample; if the step was repeated, the rows of the last time."""
    found: dict[tuple[int, int], list[TokenRow]] = {}
    for row in read_lines(run_folder / TOKENS_FILE, TokenRow):
        if row.step == step:
            parts = found.setdefault((row.group_id, row.index), [])
            parts[:] = [*(part for part in parts if part.first < row.first), row]
    return found
