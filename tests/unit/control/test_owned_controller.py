"""The controller of a run on Ray, as its owner holds it; tests/integration/test_ray_cluster.py has the real ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.config.launch import RayLaunch
from asyncrl.config.run import SupervisionConfig
from asyncrl.control.owned_controller import RayController

launch_ray = pytest.importorskip("asyncrl.control.launch_ray", exc_type=ImportError)

LOST = 137
TOLD = 0


class Process:
    """A controller that lives until it is told."""

    def __init__(self) -> None:
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    def terminate(self) -> None:
        if not self.code.done():
            self.code.set_result(TOLD)


async def test_one_that_is_started_again_as_the_run_is_told_to_end_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes: list[Process] = []
    second_is_asked_for, second_may_start = asyncio.Event(), asyncio.Event()

    async def start(*_: object) -> Process:
        if processes:
            second_is_asked_for.set()
            await second_may_start.wait()
        processes.append(Process())
        return processes[-1]

    monkeypatch.setattr(launch_ray, "start_beside", start)
    controller = RayController(RayLaunch(), SupervisionConfig(), tmp_path)
    await controller.start()
    processes[0].code.set_result(LOST)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        await second_is_asked_for.wait()
        ending = group.create_task(controller.end())
        await asyncio.sleep(0)
        second_may_start.set()
        await ending
    assert processes[1].code.result() == TOLD
    assert controller.code == TOLD
