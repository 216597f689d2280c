"""What a worker counts as idle; orders, heartbeats and the end are seen at each worker (test_reward_pool.py, test_worker.py)."""

import asyncio
import traceback

import pytest

from asyncrl.errors import LearnerError
from asyncrl.schema.control import Shutdown
from asyncrl.schema.samples import GroupWork
from asyncrl.transport.protocol import Lane
from asyncrl.transport.stage import IdleMeter, Stage
from tests.builders import channel_of
from tests.virtual_clock import VirtualClock


class Silent:
    """A connection on which nothing arrives."""

    async def receive(self, lane):
        await asyncio.Event().wait()

    def try_send(self, message, lane):
        pass


async def test_the_cause_of_an_error_in_a_loop_stays_and_the_groups_around_it_go():
    async def loop():
        try:
            int("my bug")
        except ValueError as error:
            raise LearnerError("a step failed") from error

    stage = Stage(Silent(), VirtualClock(), "learner", 1.0, lambda: ("", {}))
    with pytest.raises(LearnerError) as failed:
        await stage.run(lambda _: None, loop())
    said = "".join(traceback.format_exception(failed.value))
    assert 'int("my bug")' in said
    assert "Group" not in said


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_connection_that_closes_without_shutdown_is_a_loss_whose_reason_is_logged(is_told, caplog):
    async def obey(_):
        pass

    async def serve():
        async for _ in stage.requests(GroupWork):
            pass

    async with channel_of("generator", "generator-7") as (near, far), asyncio.TaskGroup() as group:
        stage = Stage(near, VirtualClock(), "generator-7", 1.0, lambda: ("", {}))
        group.create_task(stage.run(obey, serve()))
        if is_told:
            await far.send(Shutdown(), Lane.CONTROL)
        await asyncio.sleep(0)
        await far.close("its samples failed")
    assert stage.was_told_to_end == is_told
    lines = [record.message for record in caplog.records if "is closed" in record.message]
    assert lines == ([] if is_told else ["the connection to the controller is closed: its samples failed"])


def test_time_is_idle_while_nothing_runs_or_all_stands_still():
    clock = VirtualClock()
    idle = IdleMeter(clock)
    clock.advance(1)
    with idle.running(), idle.running():
        clock.advance(2)
        idle.stand_still(True)
        clock.advance(4)
        idle.stand_still(False)
        clock.advance(8)
    clock.advance(16)
    assert idle.totals_s() == (1 + 4 + 16, 2 + 8)
