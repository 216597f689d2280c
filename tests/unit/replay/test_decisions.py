"""What entered the machines gives the same again; what was cut off, damaged or changed is named."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.buffer import events as be
from asyncrl.buffer.group import GroupsRestored
from asyncrl.config.load import parse_config
from asyncrl.control.autoscaler import Told, Window
from asyncrl.control.lifecycle import events as le
from asyncrl.control.lifecycle.state import IllegalTransitionError
from asyncrl.control.placement import state as ps
from asyncrl.errors import ConfigError
from asyncrl.observe.decisions import Beginning, Recorder
from asyncrl.observe.machine import Watch
from asyncrl.replay.decisions import machines_of, replay_decisions, replay_run

NUM_STEPS = 6
BEGINNING = Beginning(
    parse_config({
        "num_steps": NUM_STEPS,
        "algorithm": {"groups_per_step": 2, "group_size": 2},
        "buffer": {"max_staleness": 1, "policy": "drop"},
        "generate": {"num_workers": 2},
        "launch": {"kind": "local", "elastic": {"patience": 1}},
    }),
    True, False, "logs",
)  # fmt: skip


def live(recorder: Recorder, note: Watch | None = None) -> None:
    """Have every machine decide what a small run brings, all of it recorded."""
    machines, chance, now = machines_of(BEGINNING), random.Random(0), 0.0
    for machine in machines.values():
        machine.watchers = (note or recorder.note,)
    buffer, life, phases, scaling = (machines[name] for name in ("buffer", "lifecycle", "phases", "scaling"))
    buffer.handle(GroupsRestored((), (), 0, {}, {}, {}, 0), now)
    recorder.begin(BEGINNING)
    life.handle(le.Begin(), now)
    with pytest.raises(IllegalTransitionError):
        life.handle(le.Drained(), now)
    phases.handle(ps.Joined("learner", "learner"), now)
    scaling.handle(Told(3), now)
    for name in ("a", "b"):
        buffer.handle(be.GeneratorReady(name, 4, 0), now)
    for step in range(NUM_STEPS):
        while True:
            now += 1.0
            while (issue := buffer.next_issue()) is not None:
                issued = be.GroupIssued(buffer.next_group_id, "p", 2, issue.generator, issue.version)
                placed = be.GroupPlaced(getattr(issue, "group_id", 0), issue.generator, issue.version)
                buffer.handle(issued if isinstance(issue, be.IssueGroup) else placed, now)
            group_id, version = chance.choice(list(buffer.groups)), max(step - chance.choice((0, 1, 1, 2)), 0)
            buffer.handle(be.SamplesFinished(group_id, (0, 1), (((version, 3),), ((step, 2),))), now)
            buffer.handle(be.MembersFinished(buffer.groups[group_id].generator, 2), now)
            buffer.handle(be.SamplesScored(group_id, (0, 1), (1.0, 0.25)), now)
            life.handle(le.Heard("learner"), now)
            if isinstance(buffer.handle(be.TakeStep(step), now)[-1], be.TakeGroups):
                break
        buffer.handle(be.StepTrained(step), now)
        for name in ("a", "b"):
            buffer.handle(be.VersionIsLive(name, step + 1), now)
        if step == 2:
            buffer.handle(be.GeneratorGone("b"), now)
            buffer.handle(be.GeneratorReady("b", 4, step + 1), now)
        scaling.handle(Window(0.6, 0.9, 3), now)
        life.handle(le.Tick(), now)
        recorder.end_chunk(step)
    recorder.close()


@pytest.mark.parametrize("field", ["learner.lora.rank", "algorithm.critic.kind", "algorithm.group_size", "algorithm.nope"])
def test_a_field_that_no_gradient_reads_is_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"--with {field}: .* which reads learner\.minibatches, algorithm\.kind, algo"):
        replay_run(tmp_path, 1, ("algorithm.loss=gspo", f"{field}=4"), print)


def test_one_changed_event_is_the_first_that_differs(tmp_path: Path) -> None:
    recorder, noted = Recorder(tmp_path), list[str]()

    def note(machine: str, event: Any, now: float, instructions: Any) -> None:
        if isinstance(event, be.SamplesFinished) and noted.count("SamplesFinished") == 3:
            event = msgspec.structs.replace(event, indices=(0,), version_counts=event.version_counts[:1])
        noted.append(type(event).__name__)
        recorder.note(machine, event, now, instructions)

    live(recorder, note)
    number = [number for number, name in enumerate(noted) if name == "SamplesFinished"][3]
    (life,) = replay_decisions(tmp_path)
    assert life.num_events == number > 0
    assert f"event {number} is the first that differs: buffer" in life.difference
    assert "recorded: [['ScoreMembers'" in life.difference


def test_a_damaged_byte_ends_the_replay_in_front_of_it(tmp_path: Path) -> None:
    live(Recorder(tmp_path))
    path = tmp_path / "record" / "decisions-0000.bin"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    (life,) = replay_decisions(tmp_path)
    assert "was changed" in life.fault
    assert (life.difference, life.last_step < NUM_STEPS - 1) == ("", True)


def test_a_run_without_a_recording_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observe\.record=decisions"):
        replay_decisions(tmp_path)


def test_a_start_that_failed_leaves_no_life_and_what_is_of_another_version_is_refused(tmp_path):
    recorder = Recorder(tmp_path)
    live(recorder)
    recorder.close()
    Recorder(tmp_path).close()
    assert [life.path.name for life in replay_decisions(tmp_path)] == ["decisions-0000.bin"]
    other = Recorder(tmp_path)
    live(other, lambda _, event, now, instructions: other.note("oracle", event, now, instructions))
    other.close()
    said = list[str]()
    assert not replay_run(tmp_path, None, (), said.append)
    assert "event 0 is the first that differs: oracle at 0.000 cannot be read by this version" in said[-1]
    with pytest.raises(ConfigError, match=r"^--samples is for a run with"):
        replay_run(tmp_path, None, (), print, num_samples=1)
