"""How a worker's loops end and what it counts as idle; orders and heartbeats are seen at each worker (test_reward_pool.py)."""

import asyncio

import pytest

from asyncrl.clock import SystemClock
from asyncrl.errors import GenerationError
from asyncrl.transport.stage import IdleMeter, Stage
from tests.builders import channel_of
from tests.virtual_clock import VirtualClock


async def test_an_error_of_a_loop_ends_the_others_and_comes_out_by_itself():
    async def forever(*_):
        await asyncio.Event().wait()

    async def fails():
        raise GenerationError("broken")

    async with channel_of("reward", "reward-0") as (worker, _):
        with pytest.raises(GenerationError, match="broken"):
            await Stage(worker, SystemClock(), "reward-0", 0.01, lambda: ("", {})).run(forever, forever(), fails())


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
