"""A stream of groups in several hands, over the route that answers it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.control.api import RunApi
from asyncrl.errors import RunError
from asyncrl.groups import GroupStream
from asyncrl.schema.status import GroupGiven, GroupsAsked, Released
from asyncrl.tasks.asked import AskedPrompts
from tests.builders import until


class DrivenRun:
    """A run of which groups are asked; each is its group id."""

    def __init__(self) -> None:
        self.asked = AskedPrompts()
        held = {number: SimpleNamespace(as_scored=int) for number in range(9)}
        run: Any = SimpleNamespace(
            dispatcher=SimpleNamespace(asked=self.asked, changed=lambda: None, release=lambda _: None),
            feeder=SimpleNamespace(release_outside=lambda _: None),
            buffer=SimpleNamespace(held=held),
            ending=asyncio.Event(),
            lifecycle=SimpleNamespace(over=False),
        )
        self._api = RunApi(run)

    async def generate(self, asked: GroupsAsked) -> list[GroupGiven]:
        return await self._api.generate(asked)

    async def release(self, released: Released) -> None:
        self._api.release(released)

    def give(self, group_id: int) -> None:
        """Generate the next prompt's group."""
        self.asked.issued(self.asked.queue.popleft(), group_id, 0)
        self.asked.ready(group_id, 0)


async def test_other_keys_of_a_prompt_are_its_columns():
    run = DrivenRun()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        reader = group.create_task(
            anext(GroupStream(run, [{"prompt": "1+1=", "unit": "m", "of": [1], "odd": object()}], 1, 0, 1, lambda: False))
        )
        await until(lambda: run.asked.num_waiting)
        assert run.asked.queue[0].prompt.columns == {"unit": "m", "of": [1]}
        reader.cancel()


async def test_readers_of_one_stream_get_each_group_once_and_are_told_when_it_is_closed():
    run = DrivenRun()
    stream = GroupStream(run, ["a", "b", "c"], 1, 0, 3, lambda: False)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        readers = [group.create_task(anext(stream)) for _ in range(2)]
        await until(lambda: run.asked.num_waiting)
        for group_id in (0, 1):
            run.give(group_id)
        assert [await reader for reader in readers] == [0, 1]

        async def reads_on() -> None:
            with pytest.raises(RunError, match="this stream is closed"):
                await anext(stream)

        group.create_task(reads_on())
        await until(lambda: run.asked.num_waiting)
        await stream.close()
