"""What a worker counts as idle; orders, heartbeats and the end are seen at each worker (test_reward_pool.py, test_worker.py)."""

import asyncio
import traceback

import pytest

from asyncrl.errors import LearnerError
from asyncrl.transport.stage import IdleMeter, Stage
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
