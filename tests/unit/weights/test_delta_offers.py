import pytest
import torch

from asyncrl.config.broadcast import DeltaConfig, FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import make_manifest
from asyncrl.weights.delta_chain import DeltaOffers
from asyncrl.weights.media.files import FilesWriter, blob_file_name

NUM_VALUES = 20_000
MANIFEST = make_manifest({"w": torch.zeros(NUM_VALUES, dtype=torch.bfloat16)})


class Learner:
    """Offers over real files, in a folder whose room the tests take away."""

    def __init__(self, folder, **delta):
        self.folder = folder / "weights"
        self._writer = FilesWriter(FilesMedium(), folder)
        self._slots = self._writer.open(MANIFEST)
        self._offers = DeltaOffers(DeltaConfig(**delta), self._writer, MANIFEST)
        self.weights = self._slots[0].view(torch.bfloat16)

    def offer(self, version):
        flat = self._slots[0].numpy().data
        return self._offers.offer(0, version, flat, f"fingerprint {version}", b"")

    def blobs(self):
        return {path.name for path in self.folder.glob("*.delta")}


@pytest.fixture
def learner(tmp_path):
    return Learner(tmp_path, full_every=4)


def test_the_first_version_goes_whole_and_the_next_as_a_delta_alone(learner):
    first = learner.offer(1)
    learner.weights[7] = 3.0
    second = learner.offer(2)
    assert (first.whole.version, first.deltas) == (1, ())
    assert (second.whole, [change.version for change in second.deltas]) == (first.whole, [2])
    assert learner.blobs() == {blob_file_name(second.deltas[0].name)}
    assert second.deltas[0].num_bytes < 200


def test_a_delta_larger_than_its_share_is_not_offered_and_the_version_goes_whole(tmp_path, caplog):
    learner = Learner(tmp_path, max_share=0.001)
    learner.offer(1)
    learner.weights.copy_(torch.randn(NUM_VALUES))
    offer = learner.offer(2)
    assert (offer.whole.version, offer.deltas, learner.blobs()) == (2, (), set())
    assert "broadcast.dtype" in caplog.text


def test_a_version_that_failed_leaves_the_chain_as_it_was(learner, tmp_path):
    for version in range(1, 5):
        learner.weights[version] = 1.0
        before = learner.offer(version)
    moved = tmp_path / "moved"
    learner.folder.rename(moved)
    learner.weights[5] = 1.0
    with pytest.raises(BroadcastError, match="could not be written"):
        learner.offer(5)
    moved.rename(learner.folder)
    learner.weights[6] = 1.0
    offer = learner.offer(6)
    assert offer.whole.version == 6
    assert [change.base_version for change in offer.deltas] == [*(change.base_version for change in before.deltas), 4]


def test_where_a_delta_cannot_be_written_the_version_goes_whole_and_the_chain_begins_anew(learner):
    learner.offer(1)
    learner.weights[1] = 1.0
    name = blob_file_name(learner.offer(2).deltas[0].name)
    assert learner.blobs() == {name}
    learner.weights[1] = 0.0
    learner.weights[2] = 1.0
    in_the_way = _what_it_would_be_named(learner, 3)
    in_the_way.mkdir()
    offer = learner.offer(3)
    assert (offer.whole.version, offer.deltas) == (3, ())


def _what_it_would_be_named(learner, version):
    """Name the blob of the next version by making it once in another run."""
    twin = Learner(learner.folder.parent / "twin")
    twin.weights[1] = 1.0
    twin.offer(version - 1)
    twin.weights[1] = 0.0
    twin.weights[2] = 1.0
    return learner.folder / blob_file_name(twin.offer(version).deltas[0].name)
