import queue
import threading

import pytest
import torch

from asyncrl.clock import VirtualClock
from asyncrl.config.broadcast import BroadcastConfig, DeltaConfig, FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import view_tensors
from asyncrl.weights.media.files import FilesReader
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.subscriber import Staging

NUM_VALUES = 20_000
CONFIG = BroadcastConfig(medium=FilesMedium(), bucket_bytes=4096, delta=DeltaConfig(full_every=5))
NOT_CANCELLED = threading.Event()


class Learner:
    def __init__(self, folder):
        self.folder = folder / "weights"
        self.tensors = {name: torch.zeros(NUM_VALUES, dtype=torch.bfloat16) for name in "ab"}
        self._announced = queue.SimpleQueue()
        self.publisher = Publisher(CONFIG, folder, self._announced.put, VirtualClock())

    def publish(self, version):
        self.tensors["a"][version] = float(version)
        self.publisher.publish(version, self.tensors)
        return self._announced.get(timeout=30)

    def remove(self, *patterns):
        for pattern in patterns:
            for path in self.folder.glob(pattern):
                path.unlink()


@pytest.fixture
def learner(tmp_path):
    learner = Learner(tmp_path)
    yield learner
    learner.publisher.close()


@pytest.fixture
def staging(tmp_path):
    staging = Staging(FilesReader(CONFIG.medium, tmp_path))
    yield staging
    staging.close()


def received(staging, available):
    return view_tensors(staging.receive(available, NOT_CANCELLED), available.manifest)


def test_after_a_damaged_delta_only_that_is_fetched_again(learner, staging):
    """On `files` the whole version may lie before the damage: it would lead there again."""
    received(staging, learner.publish(1))
    first, second = learner.publish(2).deltas[-1], learner.publish(3)
    blob = learner.folder / f"{second.deltas[-1].name}.delta"
    kept = blob.read_bytes()
    blob.write_bytes(bytes(len(kept)))
    with pytest.raises(BroadcastError, match="delta to version 3 arrived damaged"):
        staging.receive(second, NOT_CANCELLED)
    blob.write_bytes(kept)
    learner.remove("version-*/*", f"{first.name}.delta")
    assert torch.equal(received(staging, second)["a"], learner.tensors["a"])
