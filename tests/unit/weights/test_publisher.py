import queue

import pytest
import torch

from asyncrl.config.broadcast import BroadcastConfig, FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.shm_segments import remove_leftover_segments
from tests.virtual_clock import VirtualClock


@pytest.fixture
def announced():
    return queue.SimpleQueue()


@pytest.fixture
def publisher(tmp_path, announced):
    publisher = Publisher(BroadcastConfig(medium=FilesMedium()), tmp_path, announced.put, VirtualClock(12.5))
    yield publisher
    publisher.close()


def test_announcements_come_in_order_and_the_last_is_never_left_out(publisher, announced):
    for version in range(50):
        publisher.publish(version, {"w": torch.full((1000,), float(version))})
    assert publisher.flush(30)
    versions = [announced.get(timeout=30).version for _ in range(announced.qsize())]
    assert versions == sorted(set(versions))
    assert versions[-1] == 49


def test_weights_that_do_not_fit_the_run_are_refused_and_the_next_are_taken(publisher, announced):
    publisher.publish(1, {"w": torch.ones(5)})
    with pytest.raises(BroadcastError, match=r"\(6,\)"):
        publisher.publish(2, {"w": torch.ones(6)})
    publisher.publish(2, {"w": torch.ones(5)})
    assert publisher.flush(30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_whose_thread_broke_says_so_from_then_on(tmp_path):
    def refuse(available):
        raise RuntimeError(f"nobody hears of version {available.version}")

    publisher = Publisher(BroadcastConfig(), tmp_path, refuse, VirtualClock())
    publisher.publish(1, {"w": torch.ones(5)})
    for _ in range(2):
        with pytest.raises(BroadcastError, match="nobody hears of version 1"):
            publisher.flush(30)
    with pytest.raises(BroadcastError, match="nothing can be published any more"):
        publisher.publish(2, {"w": torch.ones(5)})
    with pytest.raises(BroadcastError, match="nobody hears of version 1"):
        publisher.close()
    assert remove_leftover_segments(tmp_path) == []
