"""The supervisor over the fake launcher and a virtual clock: what it kills; and the file of who has which pid."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.launch.processes import ProcessSpec
from asyncrl.control.lifecycle import events as ev
from asyncrl.control.lifecycle.state import Lifecycle
from asyncrl.control.lifecycle.supervisor import PidRecord, Supervisor, begin_pids, note_pid, read_pids
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import Phase
from tests.fake_launcher import FakeLauncher
from tests.virtual_clock import VirtualClock

PLAN = [ev.ProcessPlan("learner", "learner"), ev.ProcessPlan("generator-0", "generator")]
CONFIG = SupervisionConfig(backoff_s=2.0, max_deaths=2, heartbeat_s=1.0, heartbeat_timeout_s=10.0, start_timeout_s=30.0)
LEARNER = PidRecord("learner", "learner", 42, 1, 1.5)
AGAIN = PidRecord("learner", "learner", 43, 2, 3.5)
GENERATOR = PidRecord("generator-0", "generator", 44, 1, 1.5)


class World:
    """A supervised run whose processes end only when they are killed."""

    def __init__(self, folder: Path, on_phase: Callable[[Phase], None] = lambda _: None) -> None:
        def spec(name: str, kind: ProcessKind, incarnation: int) -> ProcessSpec:
            return ProcessSpec(name, kind, incarnation, ("true",), folder / f"{name}.log")

        self.launcher, self.clock, self.dead = FakeLauncher(ignores_terminate=True), VirtualClock(), list[str]()
        self.lifecycle = Lifecycle(PLAN, CONFIG)
        self.supervisor = Supervisor(
            self.lifecycle, self.launcher, spec, CONFIG, self.clock, folder,
            on_dead=lambda dead: self.dead.append(dead.name), on_phase=on_phase, on_end=lambda *_: None,
        )  # fmt: skip

    async def pass_seconds(self, seconds: int, *beating: str) -> None:
        """Let time pass and all run that can; who beats is heard each second."""
        for _ in range(seconds):
            self.clock.advance(1.0)
            for _ in range(20):
                await asyncio.sleep(0)
            for name in beating:
                self.lifecycle.handle(ev.Heard(name), self.clock.now())


async def test_a_silent_process_is_terminated_then_killed_and_all_are_where_the_run_is_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(world.supervisor.run())
        generator = await world.launcher.started("generator-0")
        await world.pass_seconds(1, "generator-0", "learner")
        await world.pass_seconds(12, "learner")
        assert (generator.terminated, generator.alive) == (1, True)
        await world.pass_seconds(4, "learner")
        assert (generator.alive, world.dead) == (False, ["generator-0"])
        assert "learner" in world.launcher.alive
        running.cancel()
    assert not world.launcher.alive


async def test_error_in_a_callback_kills_every_process_and_is_raised(tmp_path: Path) -> None:
    def broken(phase: Phase) -> None:
        if phase == "warming":
            raise RuntimeError("bug in the controller")

    world = World(tmp_path, broken)
    with pytest.raises(ExceptionGroup) as caught:
        await world.supervisor.run()
    assert caught.group_contains(RuntimeError, match="bug in the controller")
    assert not world.launcher.alive


def test_starts_and_ends_add_up_to_who_lives_and_a_controller_begins_anew(tmp_path):
    begin_pids(tmp_path, 1.0)
    ended = [msgspec.structs.replace(record, ended_s=9.0) for record in (LEARNER, GENERATOR)]
    for record in (LEARNER, GENERATOR, ended[0], AGAIN, ended[1]):
        note_pid(tmp_path, record)
    assert read_pids(tmp_path) == {"learner": AGAIN}
    with (tmp_path / "pids.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(GENERATOR)[:-3])  # cut short by a crash
    assert read_pids(tmp_path) == {"learner": AGAIN}
    begin_pids(tmp_path, 2.0)
    assert read_pids(tmp_path) == {}
