"""Opens a run's buffer from its config and folder: a new one, or after a stop or crash one restored from the ledger.

A group's state is computed again from its members, so unfinished work is simply repeated: members without a sample are generated
again, samples without a score are scored again. Everything read is checked against its checksum and its allowed values; damage
raises a LedgerError with the table, the row and what to do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec

import asyncrl.buffer.ledger.records as rec
import asyncrl.buffer.ledger.store as st
from asyncrl.algorithms.screening import Screen
from asyncrl.buffer.buffer import Buffer, HeldGroup, Restored
from asyncrl.buffer.group import BufferLimits, Group, GroupsRestored, StepRecord
from asyncrl.buffer.ledger.schema import count_ended, ended, forgotten_before, keys_of, rows_of, sample_key
from asyncrl.buffer.state import BufferState
from asyncrl.buffer.validate import examine, tokens_together
from asyncrl.config.live import settings_of
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError, LedgerError
from asyncrl.observe.machine import Watch
from asyncrl.schema.samples import Prompt, ScoredSample

MOST_MEMBERS = 1 << 16
"""Maximum size of a group read from the ledger, so that a damaged number does not allocate gigabytes."""
MOST_COUNT = 1 << 40
"""Maximum value of versions, attempts, retries, steps and ids read from the ledger."""


def open_buffer(
    config: RunConfig,
    run_folder: Path,
    *,
    call_soon: st.CallSoon | None = None,
    on_failure: Callable[[LedgerError], None] | None = None,
    now: float = 0.0,
    watch: Watch | None = None,
) -> Buffer:
    """Open the buffer of a run, new or resumed; everything in its ledger is restored.

    Afterwards, in this order: call `learner_restarted` with the learner's version, hand out running groups again, and send
    `state.unscored` to the reward workers.

    Args:
        config: The run's config.
        run_folder: The folder of `ledger.sqlite`.
        call_soon: `loop.call_soon_threadsafe`, if callbacks must run on the event loop.
        on_failure: Called once, in the same way, when the ledger cannot be written any more.
        now: Clock seconds.
        watch: Called with every event of the state, beginning with the ledger's contents; if `observe.record` is "all", also
            with samples that no step trains.

    Raises:
        LedgerError: Another run has the ledger open, it belongs to another config, or it is damaged.
        ConfigError: The run's samples cannot be trained with the new `packing.tokens_per_row` or `algorithm.reference.where`.
    """
    algorithm = config.algorithm
    state = BufferState(limits_of(config))
    state.watchers = () if watch is None else (watch,)
    ledger: st.Ledger
    restored = Restored()
    if config.buffer.ledger == "memory":
        ledger = st.MemoryLedger()
    else:
        identity = {"groups_per_step": str(algorithm.groups_per_step), "group_size": str(algorithm.members_per_group)}
        ledger = st.SqliteLedger(run_folder / "ledger.sqlite", identity=identity, call_soon=call_soon, on_failure=on_failure)
        try:
            if config.has_reference_worker:
                reference = f"{algorithm.reference.path} at temperature {config.generate.sampling.temperature:g}"
                ledger.write((rec.RescoreRecord(reference, now),))
                ledger.sync()
            restored = _restore(ledger.path, state, now)
            _check_resume(config, state, restored)
        except BaseException:
            ledger.close()
            raise
    params = rec.StepParams(
        mask_below=0,
        tokens_per_row=config.packing.tokens_per_row,
        temperature=config.generate.sampling.temperature,
        screen=state.limits.screen,
        minibatches=config.learner.minibatches,
        settings=settings_of(config),
    )
    keep = watch if config.observe.record == "all" else None
    return Buffer(state, ledger, params, needs_reference=config.has_reference_worker, restored=restored, watch=keep)


def limits_of(config: RunConfig) -> BufferLimits:
    """Return the settings of a run's state machine."""
    algorithm = config.algorithm
    is_beside = config.learner.kind == "builtin" and config.placement.kind in {"disaggregated", "async_hybrid"}
    return BufferLimits(
        groups_per_step=algorithm.groups_per_step,
        max_staleness=config.buffer.max_staleness,
        policy=config.buffer.policy,
        min_group_members=config.buffer.min_group_members,
        max_group_retries=config.buffer.max_group_retries,
        # The caller of a driven run is told, and asks again or not.
        reissue_dropped=config.buffer.reissue_dropped and config.learner.kind != "driven",
        screen=Screen.of(algorithm),
        max_resamples=algorithm.max_resamples,
        max_running_groups=config.buffer.max_running_groups,
        max_groups=config.num_steps * algorithm.groups_per_step,
        as_needed=config.buffer.ahead == "as_needed" and is_beside,
    )


def _check_resume(config: RunConfig, state: BufferState, restored: Restored) -> None:
    """Raise ConfigError for a config change with which steps could not be packed or trained."""
    screen, row = state.limits.screen, config.packing.tokens_per_row
    longest = max((tokens_together(held.samples.values(), screen) for held in restored.held.values()), default=0)
    if longest > row:
        raise ConfigError(
            f"packing.tokens_per_row ({row}) must be at least {longest} here: that many tokens of a group made before this "
            "resume must share a row"
        )
    if config.has_reference_worker and (reason := restored.why_not_repeated(state.steps_to_repeat())):
        raise ConfigError(reason)


def _restore(path: Path, state: BufferState, now: float) -> Restored:
    """Fill `state` from the ledger at `path`."""
    with st.connect_read_only(path) as connection:
        with st.reading(path, "meta", "forgotten_before and ended"):
            forgotten_steps, first = forgotten_before(connection), ended(connection).before
            _check_counts(ended=first)
        next_group_id, cursor, version = connection.execute(
            "SELECT coalesce(max(group_id), -1) + 1, coalesce(max(cursor), 0), coalesce(max(version), 0) FROM groups"
            " WHERE group_id >= ?",
            (first,),
        ).fetchone()
        newest_of = "SELECT coalesce(max(newest), 0) FROM samples WHERE key >= ?"
        (of_samples,) = connection.execute(newest_of, (sample_key(first, 0),)).fetchone()
        with st.reading(path, "groups and samples", "the largest"):
            _check_counts(group_id=next_group_id, cursor=cursor, version=version, newest=of_samples)
        newest = max(version, of_samples)
        groups, held = _live_groups(path, connection, newest, first)
        steps, params = _steps(path, connection)
        without = "SELECT 1 FROM scores WHERE key >= ? AND key < ? AND reference = x'' LIMIT 1"
        lacking = frozenset(
            record.step
            for record in steps
            if any(connection.execute(without, keys_of(group_id)).fetchone() for group_id in record.group_ids)
        )
        to_repeat, prompts = dict[int, int](), dict[int, Prompt]()
        for group_id, returns, *content in connection.execute(
            "SELECT group_id, returns, prompt_id, prompt, size, checksum FROM groups WHERE returns >= 0 AND group_id >= ?1"
            " AND group_id NOT IN (SELECT replaces FROM groups WHERE replaces IS NOT NULL AND group_id >= ?1) ORDER BY group_id",
            (first,),
        ).fetchall():
            with st.reading(path, "groups", group_id):
                _check_counts(returns=returns)
            to_repeat[group_id], prompts[group_id] = returns, st.read_prompt(path, group_id, *content)
        over = count_ended(connection, next_group_id)
    try:
        with st.reading(path, "groups and steps", "together"):
            told = GroupsRestored(
                tuple(groups), tuple(steps), next_group_id, over.dropped, over.failed, returned=to_repeat,
                forgotten_steps=forgotten_steps,
            )  # fmt: skip
            state.handle(told, now)
        state.check_invariants()
    except AssertionError as error:
        raise LedgerError(f"{path}: the tables groups, samples and steps do not balance: {error}; {st.REMEDY}") from error
    return Restored(held, prompts, params, lacking, newest, cursor)


def _check_counts(**counts: object) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or not 0 <= count <= MOST_COUNT:
            raise ValueError(f"{name} is {count!r}, which no run writes")


def _live_groups(path: Path, connection: sqlite3.Connection, newest: int, first: int) -> tuple[list[Group], dict[int, HeldGroup]]:
    groups, held = [], {}
    rows = connection.execute(
        "SELECT group_id, prompt_id, prompt, size, checksum, generator, version, attempt, state, retries, external, ready_s"
        " FROM groups WHERE state NOT IN ('taken', 'trained', 'dropped', 'failed') AND group_id >= ? ORDER BY group_id",
        (first,),
    ).fetchall()
    for group_id, prompt_id, prompt, size, stored, generator, version, attempt, state, retries, external, ready_s in rows:
        read = st.read_prompt(path, group_id, prompt_id, prompt, size, stored)
        with st.reading(path, "groups", group_id):
            _check_counts(version=version, attempt=attempt, retries=retries, size=size)
            if not 1 <= size <= MOST_MEMBERS or state not in {"running", "scoring", "ready"}:
                raise ValueError(f"a {state} group of {size} members")
            group = Group(
                group_id, prompt_id, size, version, generator=generator, attempt=attempt, retries=retries,
                external=bool(external), ready_s=float(ready_s or 0.0),
            )  # fmt: skip
            held[group_id] = _fill_members(path, connection, group, read, newest)
            if (group.state == "ready") != (state == "ready"):
                raise ValueError(f"it is {state}, but its members make it {group.state}")
        groups.append(group)
    return groups, held


def _fill_members(path: Path, connection: sqlite3.Connection, group: Group, prompt: Prompt, newest: int) -> HeldGroup:
    held, scores = HeldGroup(prompt), st.read_scores(path, connection, group.group_id)
    for key, made in st.read_samples(path, connection, group.group_id):
        checked = examine(made, newest_version=newest)
        with st.reading(path, "samples", key):
            for sample, counts in zip(made.members(), checked, strict=True):
                index = sample.index
                if isinstance(counts, str) or not 0 <= index < group.size:
                    raise ValueError(f"member {index}: {counts}")
                group.members[index], group.version_counts[index], held.samples[index] = "generated", counts, sample
                if sample.finish_reason == "length":
                    group.truncated.add(index)
    with st.reading(path, "scores", group.group_id):
        for index, scored in scores.items():
            held.scored[index] = ScoredSample(held.samples[index], *scored)
            group.members[index], group.rewards[index] = "scored", held.scored[index].reward
    for key, reason in rows_of(connection, "failures", "key, reason", group.group_id):
        with st.reading(path, "failures", key):
            index = key - sample_key(group.group_id, 0)
            held.samples.pop(index, None)
            group.members[index], group.last_failure = "failed", str(reason)
    group.refresh_age()
    group.state = "running" if group.pending else "scoring" if group.unscored else "ready"
    return held


def _steps(path: Path, connection: sqlite3.Connection) -> tuple[list[StepRecord], dict[int, rec.StepParams]]:
    steps, params = [], {}
    rows = connection.execute(
        "SELECT step, group_ids, params, checksum, state, max_staleness, trained_before FROM steps WHERE step >= ? ORDER BY step",
        (forgotten_before(connection),),
    )
    for step, group_ids, text, stored, state, max_staleness, trained_before in rows:
        with st.reading(path, "steps", step):
            st.check_sum(stored, group_ids, text)
            _check_counts(step=step, max_staleness=max_staleness)
            params[step] = msgspec.json.decode(text, type=rec.StepParams)
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
