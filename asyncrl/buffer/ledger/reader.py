"""Queries of a ledger, for `asyncrl inspect` and the HTTP API. Read-only, and usable while the run writes.

Every answer is a consistent snapshot of the file. The reader never changes the file and takes no lock.
"""

from __future__ import annotations

import math
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffer.ledger.schema import rows_of, sample_key
from asyncrl.buffer.ledger.store import connect_read_only, read_samples, reading
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Sample

STEPS_BETWEEN_LOOKS = 100_000
"""Instructions of SQLite's virtual machine between two checks of the clock: a few milliseconds."""


class StateCount(msgspec.Struct, frozen=True):
    """Groups in one state."""

    state: str
    reason: str
    """The reason for `dropped` and `failed`; otherwise empty."""
    groups: int


class PromptCount(msgspec.Struct, frozen=True):
    """The groups of one prompt, counted by state."""

    prompt_id: str
    groups: int
    trained: int
    dropped: int
    failed: int
    mean_reward: float | None
    """Mean over scored samples; None without any."""
    mean_tokens: float | None
    """Mean number of response tokens of generated samples."""


class VersionCount(msgspec.Struct, frozen=True):
    """Samples by their oldest trained version."""

    version: int
    samples: int
    tokens: int
    mean_reward: float | None


class StepRow(msgspec.Struct, frozen=True):
    """One step."""

    step: int
    state: str
    group_ids: tuple[int, ...]
    max_staleness: int
    taken_s: float
    trained_s: float | None


class EventRow(msgspec.Struct, frozen=True):
    """One event of a group."""

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
    """Stage and reason, if it failed."""
    reward_worker: str
    started_s: float | None
    finished_s: float | None
    stored_s: float
    settled_s: float | None
    """Scored or failed."""
    parts: dict[str, float]


class GroupStory(msgspec.Struct, frozen=True):
    """The full history of one group."""

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
    """The earlier group whose prompt this group repeats."""
    replaced_by: int | None
    events: tuple[EventRow, ...]
    samples: tuple[SampleRow, ...]


class SampleStory(msgspec.Struct, frozen=True):
    """One sample with the history of its group."""

    group: GroupStory
    row: SampleRow
    sample: Sample | None
    """The payload; None if the sample failed, its group was dropped or failed, or it was trained before the oldest checkpoint."""


class LedgerReader:
    """Reads one ledger file; every question opens and closes it.

    Args:
        path: The file, or the folder of the run.
        limit_s: Seconds after the reader's creation at which an unfinished query is stopped.

    Raises:
        LedgerError: There is no ledger, or a query takes too long.

    Example:
        >>> reader = LedgerReader(Path("runs/quickstart"))  # doctest: +SKIP
        >>> reader.sample(17, 3).row.reward  # doctest: +SKIP
        1.0
    """

    def __init__(self, path: Path, limit_s: float = math.inf) -> None:
        self._limit_s, self._until_s = limit_s, time.monotonic() + limit_s
        self.path = path / "ledger.sqlite" if path.is_dir() else path
        with connect_read_only(self.path):
            pass

    def counts(self) -> list[StateCount]:
        """Return the number of groups per state and reason."""
        rows = self._rows("SELECT state, reason, count(*) FROM groups GROUP BY state, reason ORDER BY state, reason")
        return [StateCount(*row) for row in rows]

    def issued(self) -> int:
        """Return how many groups were ever issued, from the largest id."""
        return int(self._rows("SELECT coalesce(max(group_id) + 1, 0) FROM groups")[0][0])

    def prompts(self, limit: int = 50) -> list[PromptCount]:
        """Return the prompts, most often issued first, then by id."""
        rows = self._rows(
            "WITH told AS (SELECT prompt_id, 1 AS issued, state, 0 AS made, 0 AS tokens, NULL AS reward FROM groups"
            " UNION ALL SELECT prompt_id, 0, '', 1, json_extract(value, '$[3]'), NULL"
            " FROM samples CROSS JOIN json_each(members) CROSS JOIN groups ON group_id = samples.key >> 20"
            " UNION ALL SELECT prompt_id, 0, '', 0, 0, json_extract(value, '$[1]')"
            " FROM scores CROSS JOIN json_each(members) CROSS JOIN groups ON group_id = scores.key >> 20)"
            " SELECT prompt_id, sum(issued), sum(state = 'trained'), sum(state = 'dropped'), sum(state = 'failed'),"
            " avg(reward), 1.0 * sum(tokens) / nullif(sum(made), 0) FROM told GROUP BY prompt_id ORDER BY 2 DESC, 1 LIMIT ?",
            limit,
        )
        return [PromptCount(*row) for row in rows]

    def versions(self) -> list[VersionCount]:
        """Return samples, tokens and reward by oldest version."""
        rows = self._rows(
            "WITH made AS (SELECT (samples.key >> 20 << 20) + json_extract(value, '$[0]') AS member,"
            " json_extract(value, '$[1]') AS oldest, json_extract(value, '$[3]') AS tokens FROM samples, json_each(members)),"
            " judged AS (SELECT (scores.key >> 20 << 20) + json_extract(value, '$[0]') AS member,"
            " json_extract(value, '$[1]') AS reward FROM scores, json_each(members))"
            " SELECT oldest, count(*), sum(tokens), avg(reward) FROM made LEFT JOIN judged USING (member)"
            " GROUP BY oldest ORDER BY oldest"
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

    def trained_in_steps(self) -> int:
        """Return the number of groups in trained steps."""
        query = "SELECT coalesce(sum(json_array_length(group_ids)), 0) FROM steps WHERE state = 'trained'"
        return int(self._rows(query)[0][0])

    def groups(self, state: str, last: int = 50) -> list[GroupStory]:
        """Return the newest groups in a state, newest first."""
        with connect_read_only(self.path) as connection:
            found = connection.execute(
                "SELECT group_id FROM groups WHERE state = ? ORDER BY group_id DESC LIMIT ?", (state, last)
            ).fetchall()
            return [_group_story(connection, self.path, group_id) for (group_id,) in found]

    def group(self, group_id: int) -> GroupStory:
        """Return everything about one group.

        Raises:
            LedgerError: There is no such group.
        """
        with connect_read_only(self.path) as connection:
            return _group_story(connection, self.path, group_id)

    def sample(self, group_id: int, index: int) -> SampleStory:
        """Return the history of one sample.

        Raises:
            LedgerError: There is no such group, or this member has no sample and no failure yet.
        """
        with connect_read_only(self.path) as connection:
            group = _group_story(connection, self.path, group_id)
            row = next((row for row in group.samples if row.index == index), None)
            if row is None:
                raise LedgerError(f"g{group_id}.{index} has neither sample nor failure yet; the group is {group.state}")
            is_there = all(file is not None for (file,) in rows_of(connection, "samples", "file", group_id))
            made = [samples for _, samples in read_samples(self.path, connection, group_id)] if is_there else []
        held = {sample.index: sample for samples in made for sample in samples.members()}
        return SampleStory(group, row, None if row.failure else held.get(index))

    def _rows(self, query: str, *arguments: int) -> list[tuple[Any, ...]]:
        with connect_read_only(self.path) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > self._until_s, STEPS_BETWEEN_LOOKS)
            try:
                return connection.execute(query, arguments).fetchall()
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorname", "") != "SQLITE_INTERRUPT":  # an error about damaged text has no error name
                    raise
                raise LedgerError(
                    f"{self.path} takes over {self._limit_s:g} s to count; `asyncrl inspect {self.path.parent}` has no limit"
                ) from error


def _group_story(connection: sqlite3.Connection, path: Path, group_id: int) -> GroupStory:
    row = connection.execute(
        "SELECT prompt, g.state, reason, step, generator, version, attempt, size, replaces,"
        " (SELECT group_id FROM groups r WHERE r.replaces = g.group_id), issued_s, ready_s, taken_s, trained_s"
        " FROM groups g LEFT JOIN steps USING (step) WHERE group_id = ?",
        (group_id,),
    ).fetchone()
    if row is None:
        num_groups = connection.execute("SELECT count(*) FROM groups").fetchone()[0]
        raise LedgerError(f"{path} has no group {group_id}; {num_groups} were issued, numbered from 0")
    prompt, *content, issued_s, ready_s, taken_s, trained_s = row
    told = connection.execute("SELECT at_s, what, detail FROM events WHERE group_id = ?", (group_id,)).fetchall()
    told += [(issued_s, "issued", f"{content[3]} v{content[4]}"), (ready_s, "ready", "")]
    told += [(taken_s, "taken", f"step {content[2]}"), (trained_s, "trained", f"step {content[2]}")]
    with reading(path, "groups", group_id):
        events = sorted((EventRow(*event) for event in told if event[0] is not None), key=lambda event: event.at_s)
        story = [group_id, msgspec.msgpack.decode(prompt, type=Prompt), *content, tuple(events)]
        story.append(_sample_rows(connection, group_id))
        return GroupStory(*story)


def _sample_rows(connection: sqlite3.Connection, group_id: int) -> tuple[SampleRow, ...]:
    first, rows = sample_key(group_id, 0), dict[int, SampleRow]()
    columns = "attempt, generator, members, started_s, finished_s, stored_s"
    for attempt, generator, members, *times in rows_of(connection, "samples", columns, group_id):
        for index, *figures in msgspec.json.decode(members, type=list[tuple[int, int, int, int, str]]):
            content = [group_id, index, "generated", attempt, generator, *figures, None, "", "", *times, None, {}]
            rows[index] = SampleRow(*content)
    for worker, members, settled_s in rows_of(connection, "scores", "worker, members, settled_s", group_id):
        for index, reward, parts in msgspec.json.decode(members, type=list[tuple[int, float, dict[str, float]]]):
            told = {"state": "scored", "reward": reward, "reward_worker": worker, "settled_s": settled_s, "parts": parts}
            rows[index] = msgspec.structs.replace(rows[index], **told)
    columns = "key, attempt, stage, reason, settled_s"
    for key, attempt, stage, reason, settled_s in rows_of(connection, "failures", columns, group_id):
        content = [group_id, key - first, "", attempt, "", None, None, 0, "", None, "", "", None, None, settled_s, None, {}]
        made = rows.get(key - first) or SampleRow(*content)
        rows[key - first] = msgspec.structs.replace(made, state="failed", failure=f"{stage}: {reason}", settled_s=settled_s)
    return tuple(rows[index] for index in sorted(rows))
