import queue
import shutil

import pytest
import torch

from asyncrl.config.broadcast import BroadcastConfig, FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.shm_segments import remove_leftover_segments
from tests.virtual_clock import VirtualClock


@pytest.mark.parametrize(("tensor", "error", "told"), [
    (torch.ones(6), BroadcastError, r"\(6,\)"),
    (torch.ones(5, device="meta"), NotImplementedError, "meta tensor"),  # its snapshot breaks off
])  # fmt: skip
def test_after_weights_that_are_refused_the_same_version_may_be_published(tmp_path, tensor, error, told):
    announced = []
    publisher = Publisher(BroadcastConfig(medium=FilesMedium()), tmp_path, announced.append, VirtualClock())
    publisher.publish(1, {"w": torch.ones(5)})
    with pytest.raises(error, match=told):
        publisher.publish(2, {"w": tensor})
    publisher.publish(2, {"w": torch.ones(5)})
    publisher.close()
    assert announced[-1].version == 2


def test_a_version_that_cannot_be_written_is_told_at_once_and_may_be_published_again(tmp_path, caplog):
    said, folder = queue.SimpleQueue(), tmp_path / "weights"
    publisher = Publisher(BroadcastConfig(medium=FilesMedium(str(folder))), tmp_path, said.put, VirtualClock(), said.put)
    publisher.publish(1, {"w": torch.ones(5)})
    assert said.get(timeout=30).version == 1
    shutil.move(folder, tmp_path / "aside")
    publisher.publish(2, {"w": torch.ones(5)})
    failure = said.get(timeout=30)
    assert isinstance(failure, BroadcastError)
    assert "version 2 was not published: version 2 could not be written" in str(failure)
    assert str(failure) in caplog.text
    shutil.move(tmp_path / "aside", folder)
    publisher.publish(2, {"w": torch.ones(5)})
    assert said.get(timeout=30).version == 2
    publisher.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_whose_thread_broke_says_so_from_then_on(tmp_path):
    def refuse(available):
        raise RuntimeError(f"nobody hears of version {available.version}")

    told = []
    publisher = Publisher(BroadcastConfig(), tmp_path, refuse, VirtualClock(), told.append)
    publisher.publish(1, {"w": torch.ones(5)})
    publisher._thread.join(30)
    assert "nobody hears of version 1" in str(told.pop())
    with pytest.raises(BroadcastError, match="nothing can be published any more"):
        publisher.publish(2, {"w": torch.ones(5)})
    with pytest.raises(BroadcastError, match="nobody hears of version 1"):
        publisher.close()
    assert remove_leftover_segments(tmp_path) == []
