"""From a run's config and folder to its buffer: new, or with everything in it that the ledger holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import asyncrl.buffer.ledger.records as rec
from asyncrl.algorithms.screening import Screen
from asyncrl.buffer.buffer import Buffer
from asyncrl.buffer.group import BufferLimits
from asyncrl.buffer.ledger.records import Ledger, MemoryLedger
from asyncrl.buffer.ledger.restore import Restored, restore
from asyncrl.buffer.ledger.store import CallSoon, SqliteLedger
from asyncrl.buffer.payloads import without_reference
from asyncrl.buffer.state import BufferState
from asyncrl.buffer.validate import tokens_together
from asyncrl.config.live import settings_of
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError, LedgerError
from asyncrl.observe.decisions.machine import Watch


def open_buffer(
    config: RunConfig,
    run_folder: Path,
    *,
    call_soon: CallSoon | None = None,
    on_failure: Callable[[LedgerError], None] | None = None,
    now: float = 0.0,
    watch: Watch | None = None,
) -> Buffer:
    """Open the buffer of a run, new or resumed: whatever its ledger holds is there again.

    After that, in this order: `learner_restarted` with the learner's version, `unplaced` to admission, `state.unscored` to
    the reward workers.

    Args:
        config: The run's config.
        run_folder: Where `ledger.sqlite` lies or will lie.
        call_soon: `loop.call_soon_threadsafe`, where callbacks are to run on the event loop.
        on_failure: Called once, the same way, when the ledger cannot be written any more.
        now: Clock seconds.
        watch: Told of every event of the state, from what the ledger held on.

    Raises:
        LedgerError: Another run has the ledger open, it belongs to another config, or it is damaged.
        ConfigError: The run is resumed with a row budget or a place of the reference that what it holds cannot be trained with.
    """
    algorithm = config.algorithm
    state = BufferState(limits_of(config))
    state.watchers = () if watch is None else (watch,)
    ledger: Ledger
    restored = None
    if config.buffer.ledger == "memory":
        ledger = MemoryLedger()
    else:
        identity = {"groups_per_step": str(algorithm.groups_per_step), "group_size": str(algorithm.members_per_group)}
        ledger = SqliteLedger(run_folder / "ledger.sqlite", identity=identity, call_soon=call_soon, on_failure=on_failure)
        try:
            if config.has_reference_worker:
                ledger.write((rec.RescoreRecord(now),))
                ledger.sync()
            restored = restore(ledger.path, state, now)
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
    return Buffer(state, ledger, params, needs_reference=config.has_reference_worker, restored=restored)


def limits_of(config: RunConfig) -> BufferLimits:
    """Return what a run's state machine is made with."""
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
        group_size=algorithm.members_per_group,
        max_running_groups=config.buffer.max_running_groups,
        max_groups=config.num_steps * algorithm.groups_per_step,
        as_needed=config.buffer.ahead == "as_needed" and is_beside,
    )


def _check_resume(config: RunConfig, state: BufferState, restored: Restored) -> None:
    """Raise ConfigError for a change that would end the run each time a step is packed or trained."""
    screen, row = state.limits.screen, config.packing.tokens_per_row
    longest = max((tokens_together(held.samples.values(), screen) for held in restored.held.values()), default=0)
    if longest > row:
        raise ConfigError(
            f"packing.tokens_per_row ({row}) must be at least {longest} here: that many tokens of a group made before this "
            "resume must share a row"
        )
    if config.has_reference_worker and (reason := without_reference(restored.steps_without_reference, state.steps_to_repeat())):
        raise ConfigError(reason)
