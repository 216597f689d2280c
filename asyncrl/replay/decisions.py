"""`asyncrl replay`: repeats a recorded run. This file is the command and level 1, the decisions, without torch, sockets or clock.

All recorded events are given to the state machines again, in one process. The machines are made from the start of the recording.
After every event the instructions are compared, byte for byte, with those of the run; before a group is issued, admission must
give the same decision as in the run. The first event that differs is reported.
"""

from __future__ import annotations

import functools
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffer.events import BufferEvent, GroupIssued, GroupPlaced, IssueGroup, ReissueGroup
from asyncrl.buffer.open import limits_of
from asyncrl.buffer.state import BufferState
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.load import pairs_of
from asyncrl.control.autoscaler import ScalingRule, Told, Window
from asyncrl.control.launch.processes import plan_processes
from asyncrl.control.lifecycle.events import Event
from asyncrl.control.lifecycle.state import Lifecycle
from asyncrl.control.placement.state import PhaseEvent, Phases
from asyncrl.errors import ConfigError
from asyncrl.observe.decisions import (
    RECORD_FOLDER,
    STEPS_FOLDER,
    UNTRAINED,
    Beginning,
    Entry,
    Journal,
    read_journal,
    recordings,
)
from asyncrl.observe.machine import Machine
from asyncrl.replay.untrained import decoded

SHOWN_CHARACTERS = 400
"""Maximum characters of an event or its instructions in a report."""
_UNREAD = (
    "groups_per_step", "group_size", "dynamic_sampling", "max_resamples", "mask_truncated", "reference", "critic", "preference",
)  # fmt: skip
_OF_TABLES = (
    "kl.coefficient", "kl.estimator", "kl.where", "kl.gradient", "kl.cap", "critic.coefficient", "critic.value_clip",
    "preference.loss", "preference.beta", "preference.label_smoothing", "preference.average",
)  # fmt: skip
READ_BY_GRADIENT = (
    "learner.minibatches",
    *(f"algorithm.{name}" for name in (*AlgorithmConfig.__struct_fields__, *_OF_TABLES) if name not in _UNREAD),
)
"""Fields that the gradient of a recorded batch depends on. Others decide the samples, their packing, or the learner's state."""


@dataclass(frozen=True, slots=True)
class LifeReplayed:
    """Result of replaying the recording of one life of the controller."""

    path: Path
    num_events: int
    """Number of events that gave the same instructions."""
    last_step: int
    """The last optimizer step that is completely in the recording; -1: none."""
    lived_s: float
    """Time between the first and the last event, in the run."""
    took_s: float
    difference: str
    """The first event that differs; empty if none does."""
    fault: str
    """Where and why the recording ends early, as `Journal.fault`."""
    lost: Counter[str]
    """Samples that no step trained, by reason; with `observe.record = "all"`."""

    @property
    def text(self) -> str:
        """Return the result in words."""
        until = f"up to step {self.last_step}" if self.last_step >= 0 else "before the first step was done"
        same = f"{self.num_events} events {until} ({self.lived_s:.1f} s of the run in {self.took_s:.2f} s): the same instructions"
        lines = [f"{self.path.name}: {same}"]
        lost = ", ".join(f"{count} {reason}" for reason, count in self.lost.most_common())
        lines += [f"  samples that no step trained: {lost}"] if lost else []
        lines += [f"  it ends here: {self.fault}"] if self.fault else []
        return "\n".join([*lines, *([self.difference] if self.difference else [])])


def replay_run(
    run_folder: Path, until: int | None, instead: Sequence[str], say: Callable[[str], None], num_samples: int = 0
) -> bool:
    """Replay what a run recorded; return whether everything was as in the run.

    Args:
        run_folder: Folder of the run.
        until: The last optimizer step to replay; None: all.
        instead: Fields of the config, as `algorithm.loss=gspo`, to try on the batch of step `until`, which is then not trained.
        say: Called with each line of the report.
        num_samples: Number of samples to draw and generate again.

    Raises:
        ConfigError: There is no recording, it lacks the requested part, or it is damaged.
    """
    values = {field: value for field, value, _ in pairs_of(instead)}
    if unread := [field for field in values if field not in READ_BY_GRADIENT]:
        known = ", ".join(READ_BY_GRADIENT)
        raise ConfigError(f"--with {', '.join(unread)}: not read by the gradient of a recorded batch, which reads {known}")
    steps = sorted((run_folder / RECORD_FOLDER / STEPS_FOLDER).glob("step-*.bin"))
    if instead and (until is None or not steps):
        raise ConfigError(
            "--with needs one recorded batch: give --until STEP, for a run with observe.record = 'batches' or 'all'"
        )
    if num_samples and (instead or not steps):
        raise ConfigError(
            "--samples is for a run with observe.record = 'batches' or 'all' and its own learner; do not combine it with --with"
        )
    lives = replay_decisions(run_folder, until)
    for life in lives:
        say(life.text)
    same = not any(life.difference for life in lives)
    if not steps:
        return same
    learner = import_module("asyncrl.replay.learner")  # loads torch
    replay = learner.LearnerReplay(run_folder)
    samples = learner.SampleReplay(replay, num_samples, until) if num_samples else None
    last = until - 1 if instead and until is not None else until
    num_equal, fault = replay.run(last, samples.keep if samples is not None else lambda _: None)
    say(f"learner: {num_equal} versions from their batches: the same weights as in the run")
    if fault:
        say(f"  it ends here: {fault}")
        return False
    if samples is not None:
        again = samples.run()
        say(
            f"samples: {again.num_equal} with {again.num_tokens} tokens, {again.num_swapped} of them over a change of weights: "
            "the same tokens and log-probabilities as in the run"
        )
        if again.difference:
            say(f"  the first that differs: {again.difference}")
            return False
    if instead:
        if replay.version != until:
            raise ConfigError(f"step {until} was not trained; the last that was is {replay.version - 1}")
        found = replay.whatif(values)
        ess = " -> ".join("none" if value is None else f"{value:.3f}" for value in found.ess)
        say(
            f"step {found.step} with {', '.join(instead)}: cosine of the gradients {found.cosine:.4f}, "
            f"norm {found.norms[0]:.4g} -> {found.norms[1]:.4g}, ESS {ess}\n"
            "  This is one batch of the run as it was, under its weights then. It is not another run."
        )
    return same


def replay_decisions(run_folder: Path, until: int | None = None) -> list[LifeReplayed]:
    """Replay every life of a run's controller.

    Args:
        run_folder: Folder of the run; nothing in it is changed.
        until: Stop before the chunk that ends with a later step than this; None: go to the end.

    Raises:
        ConfigError: There is no recording.
    """
    paths = recordings(run_folder / RECORD_FOLDER).values()
    journals = [journal for path in paths if (journal := read_journal(path)) is not None]
    if not journals:
        raise ConfigError(f"{run_folder} has no recording: run it with --set observe.record=decisions")
    return [_replay(journal, until) for journal in journals]


def machines_of(beginning: Beginning) -> dict[str, Machine[Any, Any]]:
    """Return the machines of a run as its controller made them, by name."""
    config = beginning.config
    machines: list[Machine[Any, Any]] = [
        BufferState(limits_of(config)),
        Lifecycle(
            plan_processes(config), config.supervision, evaluate_first=beginning.evaluate_first,
            evaluate_last=beginning.evaluate_last, logs_folder=beginning.logs_folder,
        ),
        Phases(),
    ]  # fmt: skip
    if config.launch.elastic is not None:
        machines.append(ScalingRule(config.launch.elastic, config.generate.num_workers))
    return {machine.name: machine for machine in machines}


_DECODE: dict[str, Callable[[msgspec.Raw], Any]] = {
    name: msgspec.msgpack.Decoder(kind).decode
    for name, kind in {
        "buffer": functools.reduce(operator.or_, BufferEvent.__subclasses__()),
        "lifecycle": Event, "phases": PhaseEvent, "scaling": Window | Told,
    }.items()
}  # fmt: skip


def _replay(journal: Journal, until: int | None) -> LifeReplayed:
    machines, encoder = machines_of(journal.beginning), msgspec.msgpack.Encoder()
    num_events, last_step, times_s, difference, started_s = 0, -1, list[float](), "", time.perf_counter()
    lost, lost_since = Counter[str](), Counter[str]()
    for chunk in journal.chunks:
        if until is not None and chunk.step > until:
            break
        for entry in journal.entries(chunk):
            if entry[0] == UNTRAINED:
                one = decoded(journal, entry)
                lost_since[one.reason] += len(one.samples)
                continue
            if difference := _difference(machines, entry, encoder):
                difference = f"  event {num_events} is the first that differs: {difference}"
                break
            num_events += 1
            times_s.append(entry[1])
        if difference:
            break
        last_step = max(last_step, chunk.step)
        if chunk.step >= 0 or until is None:
            lost += lost_since
            lost_since.clear()
    lived_s = times_s[-1] - times_s[0] if times_s else 0.0
    took_s = time.perf_counter() - started_s
    return LifeReplayed(journal.path, num_events, last_step, lived_s, took_s, difference, journal.fault, lost)


def _difference(machines: dict[str, Machine[Any, Any]], entry: Entry, encoder: msgspec.msgpack.Encoder) -> str:
    """Give one event to its machine; return how the result differs from the run, or an empty string."""
    name, now, raw, recorded = entry
    try:
        event, machine = _DECODE[name](raw), machines[name]
    except (KeyError, msgspec.MsgspecError) as error:
        return f"{name} at {now:.3f} cannot be read by this version of asyncrl: {type(error).__name__}: {error}"
    is_handed_out = isinstance(event, GroupPlaced) or (isinstance(event, GroupIssued) and not event.external)
    if isinstance(machine, BufferState) and is_handed_out:
        to = (event.generator, event.version)
        if (allowed := machine.next_issue()) != (
            IssueGroup(*to) if isinstance(event, GroupIssued) else ReissueGroup(event.group_id, *to)
        ):
            return f"{name} at {now:.3f}: {event}\n    admission now says: {allowed}"
    try:
        instructions: list[Any] | str = machine.handle(event, now)
    except AssertionError as error:
        instructions = str(error)
    except Exception as error:  # noqa: BLE001 - any exception is a difference: the run's machine did not raise it
        instructions = f"{type(error).__name__}: {error}"
    if (encoded := encoder.encode(instructions)) == bytes(recorded):
        return ""
    was, became = msgspec.msgpack.decode(recorded), msgspec.msgpack.decode(encoded)
    return (
        f"{name} at {now:.3f}: {str(event)[:SHOWN_CHARACTERS]}\n"
        f"    recorded: {str(was)[:SHOWN_CHARACTERS]}\n    replayed: {str(became)[:SHOWN_CHARACTERS]}"
    )
