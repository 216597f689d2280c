"""From the ledger file back to the state machine and the payloads in memory, after a stop or a crash.

A group's state is worked out anew from its members, so that what was on its way when the run died is simply done again: members
without a sample are generated again, samples without a score are scored again. Everything that is read is checked against its
checksum and against what it can be; what is damaged is a LedgerError with table, row and what to do.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.buffer.group import Group, GroupsRestored, StepRecord
from asyncrl.buffer.ledger.records import StepParams
from asyncrl.buffer.ledger.schema import forgotten_before, keys_of, rows_of, sample_key
from asyncrl.buffer.ledger.store import REMEDY, check_sum, connect_read_only, read_prompt, read_samples, read_scores, reading
from asyncrl.buffer.payloads import HeldGroup
from asyncrl.buffer.state import BufferState
from asyncrl.buffer.validate import examine
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, ScoredSample

MOST_MEMBERS = 1 << 16
"""Of a group that is read: a damaged number must not become gigabytes."""
MOST_COUNT = 1 << 40
"""Of versions, attempts, retries, steps and ids that are read."""


@dataclass(slots=True)
class Restored:
    """What a ledger holds besides the state."""

    held: dict[int, HeldGroup] = field(default_factory=dict)
    returned: dict[int, Prompt] = field(default_factory=dict)
    """Prompts to be issued again, by the group that was dropped or failed."""
    step_params: dict[int, StepParams] = field(default_factory=dict)
    steps_without_reference: frozenset[int] = frozenset()
    """Steps taken with scores that brought no reference log-probabilities."""
    newest_version: int = 0
    cursor: int = 0


def restore(path: Path, state: BufferState, now: float = 0.0) -> Restored:
    """Fill `state` from the ledger at `path`.

    Raises:
        LedgerError: The file is damaged or contradicts itself.
    """
    with connect_read_only(path) as connection:
        next_group_id, cursor, newest = connection.execute(
            "SELECT coalesce(max(group_id), -1) + 1, coalesce(max(cursor), 0), coalesce(max(version), 0) FROM groups"
        ).fetchone()
        (of_samples,) = connection.execute("SELECT coalesce(max(newest), 0) FROM samples").fetchone()
        _check_counts(path, "groups", "the largest", group_id=next_group_id, cursor=cursor, version=newest)
        _check_counts(path, "samples", "the largest", newest=of_samples)
        newest = max(newest, of_samples)
        groups, held = _live_groups(path, connection, newest)
        steps, params = _steps(path, connection)
        without = "SELECT 1 FROM scores WHERE key >= ? AND key < ? AND reference = x'' LIMIT 1"
        lacking = frozenset(
            record.step
            for record in steps
            if any(connection.execute(without, keys_of(group_id)).fetchone() for group_id in record.group_ids)
        )
        returned = connection.execute(
            "SELECT group_id, returns, prompt_id, prompt, size, checksum FROM groups WHERE returns >= 0 AND group_id NOT IN"
            " (SELECT replaces FROM groups WHERE replaces IS NOT NULL) ORDER BY group_id"
        ).fetchall()
        for group_id, returns, *_ in returned:
            _check_counts(path, "groups", group_id, returns=returns)
        prompts = {group_id: read_prompt(path, group_id, *row) for group_id, _, *row in returned}
        by_reason = {
            ended: dict(
                connection.execute("SELECT reason, count(*) FROM groups WHERE state = ? GROUP BY reason", (ended,)).fetchall()
            )
            for ended in ("dropped", "failed")
        }
        with reading(path, "meta", "forgotten_before"):
            forgotten_steps = forgotten_before(connection)
    try:
        with reading(path, "groups and steps", "together"):
            to_repeat = {group_id: returns for group_id, returns, *_ in returned}
            held_groups = GroupsRestored(
                tuple(groups), tuple(steps), next_group_id, **by_reason, returned=to_repeat, forgotten_steps=forgotten_steps
            )
            state.handle(held_groups, now)
        state.check_invariants()
    except AssertionError as error:
        raise LedgerError(f"{path}: the tables groups, samples and steps do not balance: {error}; {REMEDY}") from error
    return Restored(held, prompts, params, lacking, newest, cursor)


def _check_counts(path: Path, table: str, row: object, **counts: object) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or not 0 <= count <= MOST_COUNT:
            raise LedgerError(f"{path}: table {table}, row {row}: {name} is {count!r}, which no run writes; {REMEDY}")


def _live_groups(path: Path, connection: sqlite3.Connection, newest: int) -> tuple[list[Group], dict[int, HeldGroup]]:
    groups, held = [], {}
    rows = connection.execute(
        "SELECT group_id, prompt_id, prompt, size, checksum, generator, version, attempt, state, retries, external, ready_s"
        " FROM groups WHERE state NOT IN ('taken', 'trained', 'dropped', 'failed') ORDER BY group_id"
    ).fetchall()
    for group_id, prompt_id, prompt, size, stored, generator, version, attempt, state, retries, external, ready_s in rows:
        read = read_prompt(path, group_id, prompt_id, prompt, size, stored)
        _check_counts(path, "groups", group_id, version=version, attempt=attempt, retries=retries, size=size)
        if not 1 <= size <= MOST_MEMBERS or state not in {"running", "scoring", "ready"}:
            raise LedgerError(f"{path}: table groups, row {group_id}: a {state} group of {size} members; {REMEDY}")
        with reading(path, "groups", group_id):
            group = Group(
                group_id, prompt_id, size, version, generator=generator, attempt=attempt, retries=retries,
                external=bool(external), ready_s=float(ready_s or 0.0),
            )  # fmt: skip
            held[group_id] = _fill_members(path, connection, group, read, newest)
        if (group.state == "ready") != (state == "ready"):
            raise LedgerError(
                f"{path}: table groups, row {group_id}: it is {state}, but its members make it {group.state}; {REMEDY}"
            )
        groups.append(group)
    return groups, held


def _fill_members(path: Path, connection: sqlite3.Connection, group: Group, prompt: Prompt, newest: int) -> HeldGroup:
    held, scores = HeldGroup(prompt), read_scores(path, connection, group.group_id)
    for key, made in read_samples(path, connection, group.group_id):
        checked = examine(made, newest_version=newest)
        with reading(path, "samples", key):
            for sample, counts in zip(made.members(), checked, strict=True):
                index = sample.index
                if isinstance(counts, str) or not 0 <= index < group.size:
                    raise ValueError(f"member {index}: {counts}")
                group.members[index], group.version_counts[index], held.samples[index] = "generated", counts, sample
                if sample.finish_reason == "length":
                    group.truncated.add(index)
    with reading(path, "scores", group.group_id):
        for index, scored in scores.items():
            held.scored[index] = ScoredSample(held.samples[index], *scored)
            group.members[index], group.rewards[index] = "scored", held.scored[index].reward
    for key, reason in rows_of(connection, "failures", "key, reason", group.group_id):
        with reading(path, "failures", key):
            index = key - sample_key(group.group_id, 0)
            held.samples.pop(index, None)
            group.members[index], group.last_failure = "failed", str(reason)
    group.refresh_age()
    group.state = "running" if group.pending else "scoring" if group.unscored else "ready"
    return held


def _steps(path: Path, connection: sqlite3.Connection) -> tuple[list[StepRecord], dict[int, StepParams]]:
    steps, params = [], {}
    rows = connection.execute(
        "SELECT step, group_ids, params, checksum, state, max_staleness, trained_before FROM steps WHERE step >= ? ORDER BY step",
        (forgotten_before(connection),),
    )
    for step, group_ids, text, stored, state, max_staleness, trained_before in rows:
        check_sum(path, "steps", step, stored, group_ids, text)
        _check_counts(path, "steps", step, step=step, max_staleness=max_staleness)
        with reading(path, "steps", step):
            params[step] = msgspec.json.decode(text, type=StepParams)
            ids = msgspec.json.decode(group_ids, type=tuple[int, ...])
            if state not in {"taken", "trained"}:
                raise ValueError(f"its state is {state}")
            steps.append(
                StepRecord(
                    step, ids, params[step].mask_below, max_staleness, trained=state == "trained",
                    trained_before=bool(trained_before),
                )
            )  # fmt: skip
    return steps, params
