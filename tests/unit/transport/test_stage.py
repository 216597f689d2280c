"""What every worker does at its end of the connection; the test is the controller."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.clock import SystemClock
from asyncrl.errors import GenerationError
from asyncrl.schema.control import PROTOCOL, Heartbeat, Hello, Pause, Resume, Shutdown
from asyncrl.transport.protocol import Lane
from asyncrl.transport.stage import IdleMeter, Stage
from tests.in_process import InProcessListener
from tests.virtual_clock import VirtualClock


@pytest.fixture
async def ends():
    listener = InProcessListener(Hello(PROTOCOL, "controller", "controller", "a", 1))
    worker = await listener.connect(Hello(PROTOCOL, "reward", "reward-0", "b", 2))
    yield await listener.accept(), worker
    await listener.close()


def stage_of(worker, waiting_for="a sample"):
    return Stage(worker, SystemClock(), "reward-0", 0.01, lambda: (waiting_for, {"process/samples_scored": 3.0}))


async def forever():
    await asyncio.Event().wait()


async def test_orders_are_obeyed_and_acknowledged_until_shutdown(ends):
    controller, worker = ends
    obeyed = []

    async def obey(order):
        obeyed.append(type(order))

    for order in (Pause(), Resume(), Shutdown("enough"), Pause()):
        await controller.send(order, Lane.CONTROL)
    assert await stage_of(worker).run(obey, forever())
    await asyncio.sleep(0)
    assert obeyed == [Pause, Resume, Shutdown]
    assert controller.unacknowledged(Lane.CONTROL) == 1


async def test_a_heartbeat_says_what_it_waits_for_and_its_gauges(ends):
    controller, worker = ends

    async def work():
        delivery = await controller.receive(Lane.CONTROL)
        beat = delivery.message
        assert isinstance(beat, Heartbeat)
        assert (beat.name, beat.waiting_for) == ("reward-0", "a sample")
        assert beat.gauges["process/samples_scored"] == 3.0
        assert {"process/idle_s", "process/busy_s", "process/resident_bytes"} < set(beat.gauges)

    assert await stage_of(worker).run(forever, work=work())


async def test_an_error_of_a_loop_ends_the_others_and_comes_out_by_itself(ends):
    async def fails():
        raise GenerationError("broken")

    with pytest.raises(GenerationError, match="broken"):
        await stage_of(ends[1]).run(forever, forever(), fails())


def test_time_is_idle_while_nothing_runs_or_all_stands_still():
    clock = VirtualClock()
    idle = IdleMeter(clock)
    clock.advance(1)
    with idle.running(), idle.running():
        clock.advance(2)
        idle.stand_still()
        clock.advance(4)
        idle.go_on()
        clock.advance(8)
    clock.advance(16)
    assert idle.totals_s() == (1 + 4 + 16, 2 + 8)
