"""From the ledger file back to the state machine and the payloads in memory, after a stop or a crash.

A group's state is worked out anew from its members, so that what was on its way when the run died is simply done again: members
without a sample are generated again, samples without a score are scored again. Called by buffer/buffer.py at open.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.buffer.events import GroupState
from asyncrl.buffer.group import Group
from asyncrl.buffer.ledger import connect_read_only
from asyncrl.buffer.ledger_schema import forgotten_before, sample_key, split_key
from asyncrl.buffer.payloads import HeldGroup
from asyncrl.buffer.records import StepParams
from asyncrl.buffer.state import BufferState, StepRecord
from asyncrl.buffer.validate import examine
from asyncrl.errors import LedgerError
from asyncrl.schema.samples import Prompt, Sample, ScoredSample

_sample_decoder = msgspec.msgpack.Decoder(Sample)
_prompt_decoder = msgspec.msgpack.Decoder(Prompt)
_parts_decoder = msgspec.json.Decoder(dict[str, float])


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


def restore(path: Path, state: BufferState) -> Restored:
    """Fill `state` from the ledger at `path`.

    Raises:
        LedgerError: The file contradicts itself.
    """
    with connect_read_only(path) as connection:
        connection.execute("BEGIN")
        next_group_id, cursor, newest = _extent(connection)
        groups, held = _live_groups(connection, newest)
        steps, params = _steps(connection)
        lacking = frozenset(record.step for record in steps if _lacks_reference(connection, record.group_ids))
        returned = connection.execute(
            "SELECT group_id, returns, prompt FROM groups WHERE returns >= 0 AND group_id NOT IN"
            " (SELECT replaces FROM groups WHERE replaces IS NOT NULL) ORDER BY group_id"
        ).fetchall()
        state.restore(
            groups,
            steps,
            next_group_id=next_group_id,
            dropped=_counts_by_reason(connection, "dropped"),
            failed=_counts_by_reason(connection, "failed"),
            returned={group_id: returns for group_id, returns, _ in returned},
            forgotten_steps=forgotten_before(connection),
        )
    try:
        state.check_invariants()
    except AssertionError as error:
        raise LedgerError(f"{path} does not balance: {error}") from error
    prompts = {group_id: _prompt_decoder.decode(prompt) for group_id, _, prompt in returned}
    return Restored(held, prompts, params, lacking, newest, cursor)


def _extent(connection: sqlite3.Connection) -> tuple[int, int, int]:
    row = connection.execute(
        "SELECT coalesce(max(group_id), -1) + 1, coalesce(max(cursor), 0), coalesce(max(version), 0) FROM groups"
    ).fetchone()
    newest = connection.execute("SELECT coalesce(max(newest), 0) FROM samples").fetchone()[0]
    return row[0], row[1], max(row[2], newest)


def _live_groups(connection: sqlite3.Connection, newest: int) -> tuple[list[Group], dict[int, HeldGroup]]:
    groups, held = [], {}
    rows = connection.execute(
        "SELECT group_id, prompt_id, prompt, generator, version, attempt, size, state, retries, external, issued_s, ready_s"
        " FROM groups WHERE state IN ('running', 'scoring', 'ready') ORDER BY group_id"
    ).fetchall()
    for group_id, prompt_id, prompt, generator, version, attempt, size, state, retries, external, issued_s, ready_s in rows:
        group = Group(
            group_id,
            prompt_id,
            size,
            version,
            issued_s,
            generator=generator,
            attempt=attempt,
            retries=retries,
            external=bool(external),
            ready_s=ready_s or 0.0,
        )
        held[group_id] = _fill_members(connection, group, _prompt_decoder.decode(prompt), newest)
        group.state = _state_of(group)
        if (group.state == "ready") != (state == "ready"):
            raise LedgerError(f"group {group_id} is {state} in the ledger, but its members make it {group.state}")
        groups.append(group)
    return groups, held


def _fill_members(connection: sqlite3.Connection, group: Group, prompt: Prompt, newest: int) -> HeldGroup:
    held = HeldGroup(prompt)
    rows = connection.execute(
        "SELECT s.key, s.state, s.reward, s.parts, s.failure, p.body, r.body FROM samples s"
        " LEFT JOIN payloads p ON p.key = s.key LEFT JOIN reference_logprobs r ON r.key = s.key WHERE s.key >= ? AND s.key < ?",
        (sample_key(group.group_id, 0), sample_key(group.group_id + 1, 0)),
    ).fetchall()
    for key, state, reward, parts, failure, body, reference in rows:
        _, index = split_key(key)
        group.members[index] = state
        if state == "failed":
            group.last_failure = failure
            continue
        sample = _sample_decoder.decode(body)
        if sample.finish_reason == "length":
            group.truncated.add(index)
        group.version_counts[index] = examine(sample, newest_version=newest, max_tokens=0)
        held.samples[index] = sample
        if state == "scored":
            group.rewards[index] = reward
            held.scored[index] = ScoredSample(sample, reward, _parts_decoder.decode(parts), reference or b"")
    group.refresh_age()
    return held


def _state_of(group: Group) -> GroupState:
    if group.pending:
        return "running"
    return "scoring" if group.unscored else "ready"


def _steps(connection: sqlite3.Connection) -> tuple[list[StepRecord], dict[int, StepParams]]:
    steps, params = [], {}
    rows = connection.execute(
        "SELECT step, group_ids, state, params, max_staleness, trained_before FROM steps WHERE step >= ? ORDER BY step",
        (forgotten_before(connection),),
    )
    for step, group_ids, state, text, max_staleness, trained_before in rows:
        params[step] = msgspec.json.decode(text, type=StepParams)
        ids = msgspec.json.decode(group_ids, type=tuple[int, ...])
        steps.append(
            StepRecord(
                step, ids, params[step].mask_below, max_staleness, trained=state == "trained", trained_before=bool(trained_before)
            )
        )
    return steps, params


def _lacks_reference(connection: sqlite3.Connection, group_ids: tuple[int, ...]) -> bool:
    lacking = (
        "SELECT 1 FROM samples s LEFT JOIN reference_logprobs r ON r.key = s.key"
        " WHERE s.key >= ? AND s.key < ? AND s.state = 'scored' AND r.key IS NULL LIMIT 1"
    )
    keys = [(sample_key(group_id, 0), sample_key(group_id + 1, 0)) for group_id in group_ids]
    return any(connection.execute(lacking, each).fetchone() for each in keys)


def without_reference(lacking: Collection[int], to_repeat: Iterable[int]) -> str:
    """Return why these steps cannot be repeated by a run whose reference is on inference workers, or nothing."""
    steps = [step for step in to_repeat if step in lacking]
    if not steps:
        return ""
    return (
        f"steps {steps[0]} to {steps[-1]} were taken and are to be trained (again), and their samples were scored without "
        "reference log-probabilities: algorithm.reference.where = 'worker' (or a reference that was not there before) can be set "
        "once they are trained and a checkpoint is written; resume with the settings as they were until then"
    )


def _counts_by_reason(connection: sqlite3.Connection, state: GroupState) -> dict[str, int]:
    return dict(connection.execute("SELECT reason, count(*) FROM groups WHERE state = ? GROUP BY reason", (state,)).fetchall())
