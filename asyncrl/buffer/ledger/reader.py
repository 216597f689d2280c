"""Questions to a ledger, for people: `asyncrl inspect` and the HTTP API. Read-only, and usable while the run writes.

Every answer is one consistent moment of the file. It never changes the file and takes no lock.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Self

import msgspec

from asyncrl.buffer.ledger.schema import sample_key
from asyncrl.buffer.ledger.store import connect_read_only, read_sample, reading
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Sample


class StateCount(msgspec.Struct, frozen=True):
    """Groups in one state."""

    state: str
    reason: str
    """Of `dropped` and `failed`; else empty."""
    groups: int


class PromptCount(msgspec.Struct, frozen=True):
    """What became of one prompt's groups."""

    prompt_id: str
    groups: int
    trained: int
    dropped: int
    failed: int
    mean_reward: float | None
    """Over scored samples; None where there is none."""
    mean_tokens: float | None
    """Response tokens of generated samples."""


class VersionCount(msgspec.Struct, frozen=True):
    """Samples by their oldest trained version."""

    version: int
    samples: int
    tokens: int
    mean_reward: float | None


class StepRow(msgspec.Struct, frozen=True):
    """One step taken."""

    step: int
    state: str
    group_ids: tuple[int, ...]
    max_staleness: int
    taken_s: float
    trained_s: float | None


class EventRow(msgspec.Struct, frozen=True):
    """Something that happened to a group."""

    at_s: float
    what: str
    detail: str


class SampleRow(msgspec.Struct, frozen=True):
    """One member, without its payload."""

    group_id: int
    index: int
    state: str
    attempt: int
    generator: str
    oldest_version: int | None
    newest_version: int | None
    num_tokens: int
    finish_reason: str
    reward: float | None
    failure: str
    """Stage and reason, where it failed."""
    reward_worker: str
    started_s: float | None
    finished_s: float | None
    stored_s: float
    settled_s: float | None
    """Scored or failed."""
    parts: dict[str, float]


class GroupStory(msgspec.Struct, frozen=True):
    """One group, whole."""

    group_id: int
    prompt: Prompt
    state: str
    reason: str
    step: int | None
    generator: str
    version: int
    attempt: int
    size: int
    replaces: int | None
    """The group whose prompt this is again."""
    replaced_by: int | None
    events: tuple[EventRow, ...]
    samples: tuple[SampleRow, ...]


class SampleStory(msgspec.Struct, frozen=True):
    """One sample with its group's life around it."""

    group: GroupStory
    row: SampleRow
    sample: Sample | None
    """The payload; None where it failed, its group was dropped or failed, or it was trained long enough ago."""


class LedgerReader:
    """Reads one ledger file.

    Args:
        path: The file, or the folder of the run.

    Raises:
        LedgerError: There is none.

    Example:
        >>> reader = LedgerReader(Path("runs/quickstart"))  # doctest: +SKIP
        >>> reader.sample(17, 3).row.reward  # doctest: +SKIP
        1.0
    """

    def __init__(self, path: Path) -> None:
        self.path = path / "ledger.sqlite" if path.is_dir() else path
        with connect_read_only(self.path):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Release nothing: every question opens and closes the file itself."""

    def meta(self) -> dict[str, str]:
        """Return what the ledger was made with."""
        return dict(self._rows("SELECT name, value FROM meta"))

    def counts(self) -> list[StateCount]:
        """Return groups per state and reason."""
        rows = self._rows("SELECT state, reason, count(*) FROM groups GROUP BY state, reason ORDER BY state, reason")
        return [StateCount(*row) for row in rows]

    def prompts(self, limit: int = 50) -> list[PromptCount]:
        """Return the prompts issued most often first, then by id."""
        rows = self._rows(
            "SELECT g.prompt_id, count(DISTINCT g.group_id), count(DISTINCT CASE g.state WHEN 'trained' THEN g.group_id END),"
            " count(DISTINCT CASE g.state WHEN 'dropped' THEN g.group_id END),"
            " count(DISTINCT CASE g.state WHEN 'failed' THEN g.group_id END), avg(s.reward), avg(nullif(s.num_tokens, 0))"
            " FROM groups g LEFT JOIN samples s ON s.key >= (g.group_id << 20) AND s.key < ((g.group_id + 1) << 20)"
            " GROUP BY g.prompt_id ORDER BY 2 DESC, 1 LIMIT ?",
            limit,
        )
        return [PromptCount(*row) for row in rows]

    def versions(self) -> list[VersionCount]:
        """Return samples, tokens and reward by oldest version."""
        rows = self._rows(
            "SELECT oldest, count(*), sum(num_tokens), avg(reward) FROM samples"
            " WHERE oldest IS NOT NULL GROUP BY oldest ORDER BY oldest"
        )
        return [VersionCount(*row) for row in rows]

    def steps(self, last: int = 50) -> list[StepRow]:
        """Return the newest steps, in order."""
        rows = self._rows(
            "SELECT step, state, group_ids, max_staleness, taken_s, trained_s FROM steps ORDER BY step DESC LIMIT ?", last
        )
        with reading(self.path, "steps", "among the newest"):
            return [
                StepRow(step, state, msgspec.json.decode(ids, type=tuple[int, ...]), staleness, taken_s, trained_s)
                for step, state, ids, staleness, taken_s, trained_s in reversed(rows)
            ]

    def group(self, group_id: int) -> GroupStory:
        """Return everything about one group.

        Raises:
            LedgerError: There is no such group.
        """
        with connect_read_only(self.path) as connection:
            connection.execute("BEGIN")
            return _group_story(connection, self.path, group_id)

    def sample(self, group_id: int, index: int) -> SampleStory:
        """Return one sample's whole story.

        Raises:
            LedgerError: There is no such group, or this member has nothing to tell yet.
        """
        with connect_read_only(self.path) as connection:
            connection.execute("BEGIN")
            group = _group_story(connection, self.path, group_id)
            row = next((row for row in group.samples if row.index == index), None)
            if row is None:
                raise LedgerError(f"g{group_id}.{index} has neither sample nor failure yet; the group is {group.state}")
            key = sample_key(group_id, index)
            stored = connection.execute("SELECT checksum, file, start, size FROM payloads WHERE key = ?", (key,)).fetchone()
        return SampleStory(group, row, read_sample(self.path, key, stored[0], stored[1:]) if stored else None)

    def _rows(self, query: str, *arguments: int) -> list[tuple[Any, ...]]:
        with connect_read_only(self.path) as connection:
            return connection.execute(query, arguments).fetchall()


def _group_story(connection: sqlite3.Connection, path: Path, group_id: int) -> GroupStory:
    row = connection.execute(
        "SELECT prompt, state, reason, step, generator, version, attempt, size, replaces,"
        " (SELECT group_id FROM groups r WHERE r.replaces = g.group_id) FROM groups g WHERE group_id = ?",
        (group_id,),
    ).fetchone()
    if row is None:
        num_groups = connection.execute("SELECT count(*) FROM groups").fetchone()[0]
        raise LedgerError(f"{path} has no group {group_id}; {num_groups} were issued, numbered from 0")
    events = connection.execute(
        "SELECT at_s, what, detail FROM events WHERE group_id = ? ORDER BY at_s, id", (group_id,)
    ).fetchall()
    first = sample_key(group_id, 0)
    samples = connection.execute(
        "SELECT coalesce(parts, '{}'), key - ?, state, attempt, generator, oldest, newest, num_tokens, finish_reason, reward,"
        " CASE WHEN failure <> '' THEN stage || ': ' || failure ELSE '' END, coalesce(worker, ''), started_s, finished_s,"
        " stored_s, settled_s FROM samples WHERE key >= ? AND key < ? ORDER BY key",
        (first, first, sample_key(group_id + 1, 0)),
    ).fetchall()
    with reading(path, "groups", group_id):
        told = tuple(EventRow(*event) for event in events)
        members = [[group_id, *row, msgspec.json.decode(parts, type=dict[str, float])] for parts, *row in samples]
        content = [group_id, msgspec.msgpack.decode(row[0], type=Prompt), *row[1:], told, tuple(SampleRow(*m) for m in members)]
        return GroupStory(*content)
