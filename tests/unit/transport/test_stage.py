"""What a worker counts as idle; orders, heartbeats and the end are seen at each worker (test_reward_pool.py, test_worker.py)."""

from asyncrl.transport.stage import IdleMeter
from tests.virtual_clock import VirtualClock


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
