"""The supervisor over the fake launcher and a virtual clock: what it starts, kills, restarts and reports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.launch.local import ProcessSpec
from asyncrl.control.lifecycle import events as ev
from asyncrl.control.lifecycle.events import ProcessPlan, StopRequested
from asyncrl.control.lifecycle.state import Lifecycle
from asyncrl.control.lifecycle.supervisor import Supervisor, SupervisorCallbacks
from asyncrl.schema.control import ProcessKind
from asyncrl.schema.status import Phase
from tests.fake_launcher import FakeLauncher
from tests.virtual_clock import VirtualClock

PLAN = [ProcessPlan("learner", "learner"), ProcessPlan("generator-0", "generator")]
CONFIG = SupervisionConfig(backoff_s=2.0, max_deaths=2, heartbeat_s=1.0, heartbeat_timeout_s=10.0, start_timeout_s=30.0)


@dataclass
class World:
    folder: Path
    launcher: FakeLauncher = field(default_factory=FakeLauncher)
    clock: VirtualClock = field(default_factory=VirtualClock)
    dead: list[str] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    ends: list[tuple[bool, str]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle(PLAN, CONFIG)
        callbacks = SupervisorCallbacks(lambda name, _: self.dead.append(name), self.phases.append, self._on_end)
        self.supervisor = Supervisor(self.lifecycle, self.launcher, self._spec, CONFIG, callbacks, self.clock, self.folder)

    def _spec(self, name: str, kind: ProcessKind, incarnation: int) -> ProcessSpec:
        return ProcessSpec(name, kind, incarnation, ("true",), self.folder / f"{name}.log")

    def _on_end(self, ok: bool, reason: str) -> None:
        self.ends.append((ok, reason))
        self.ended.set()

    async def settle(self) -> None:
        """Let everything that can run without time passing run."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def advance(self, seconds: float, tick_s: float = 1.0) -> None:
        passed = 0.0
        while passed < seconds:
            self.clock.advance(min(tick_s, seconds - passed))
            passed += tick_s
            await self.settle()


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(world.supervisor.run())
        await world.settle()
        yield world
        if not running.done() and not world.ended.is_set():
            world.supervisor.post(StopRequested())
        stopping = group.create_task(world.supervisor.shutdown(5.0))
        while not stopping.done():
            await world.advance(1.0)


async def test_silent_process_is_terminated_then_killed(tmp_path: Path) -> None:
    world = World(tmp_path, launcher=FakeLauncher(ignores_terminate=True))
    async with running(world):
        generator = await world.launcher.started("generator-0")
        for name in ("generator-0", "learner"):
            world.lifecycle.handle(ev.Heard(name), world.clock.now())
        for _ in range(12):
            await world.advance(1.0)
            world.lifecycle.handle(ev.Heard("learner"), world.clock.now())
        assert generator.terminated == 1
        assert generator.alive
        for _ in range(4):
            await world.advance(1.0)
            world.lifecycle.handle(ev.Heard("learner"), world.clock.now())
        assert not generator.alive
        assert world.dead == ["generator-0"]


async def test_cancelling_run_kills_every_process(tmp_path: Path) -> None:
    world = World(tmp_path, launcher=FakeLauncher(ignores_terminate=True))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(world.supervisor.run())
        await world.settle()
        task.cancel()
    assert not world.launcher.alive
    assert len(world.launcher.history) == 2


async def test_error_in_a_callback_kills_every_process_and_is_raised(tmp_path: Path) -> None:
    world = World(tmp_path)

    def broken(phase: Phase) -> None:
        if phase == "warming":
            raise RuntimeError("bug in the controller")

    callbacks = SupervisorCallbacks(lambda *_: None, broken, lambda *_: None)
    supervisor = Supervisor(world.lifecycle, world.launcher, world._spec, CONFIG, callbacks, world.clock, tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        await supervisor.run()
    assert caught.group_contains(RuntimeError, match="bug in the controller")
    assert not world.launcher.alive
