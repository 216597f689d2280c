import threading

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.config.broadcast import FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, copy_out, make_manifest, view_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.buckets import fingerprints_of, version_fingerprint
from asyncrl.weights.media.files import FilesReader, FilesWriter

TENSORS = {
    "embed": torch.arange(700, dtype=torch.float32).view(7, 100),
    "nothing": torch.zeros(0, 3),
    "norm": torch.full((3,), 0.5, dtype=torch.bfloat16),
    "up": torch.arange(900, dtype=torch.float32) * -1,
    "count": torch.arange(5),
}
SHARDED = FilesMedium(shard_bytes=2820, num_threads=3)


class Learner:
    """A writer, and what it would announce."""

    def __init__(self, config, run_folder, tensors=TENSORS, bucket_bytes=1024):
        self.manifest = make_manifest(tensors, bucket_bytes=bucket_bytes)
        self.writer = FilesWriter(config, run_folder)
        self.slots = self.writer.open(self.manifest)
        copy_out(tensors, view_tensors(self.slots[0], self.manifest))

    def commit(self, version):
        buckets = fingerprints_of(self.slots[0].numpy().data, bucket_ends(self.manifest))
        fingerprint = version_fingerprint(buckets)
        location = self.writer.commit(0, version, fingerprint)
        return WeightsAvailable(version, "files", location, self.manifest, fingerprint, 0.0, bucket_fingerprints=buckets)


def fetch(config, run_folder, available):
    """Return the flat bytes, having seen that the fingerprints are theirs."""
    flat = torch.full((available.manifest.total_bytes,), 255, dtype=torch.uint8)
    found = FilesReader(config, run_folder).fetch(available, flat.numpy().data, threading.Event())
    assert found == available.bucket_fingerprints
    return flat


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 1 << 20])
@pytest.mark.parametrize("shard_bytes", [1, 3000, 1 << 20])
def test_bytes_arrive_whatever_shards_and_buckets_are(tmp_path, shard_bytes, bucket_bytes):
    config = FilesMedium(shard_bytes=shard_bytes, num_threads=2)
    learner = Learner(config, tmp_path, bucket_bytes=bucket_bytes)
    assert torch.equal(fetch(config, tmp_path, learner.commit(1)), learner.slots[0])


def test_transformers_opens_the_shards_as_they_are(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    tensors = dict(model.named_parameters())
    folder = tmp_path / "weights" / "version-00000003"
    Learner(FilesMedium(shard_bytes=4000), tmp_path, tensors).commit(3)
    model.config.save_pretrained(folder)
    opened = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert len(names_in(folder)) > 3
    assert opened.keys() == tensors.keys()
    assert all(torch.equal(opened[name], tensor) for name, tensor in tensors.items())


def test_versions_of_a_line_that_was_left_go_with_the_first_of_the_new_one(tmp_path):
    learner = Learner(FilesMedium(keep_last=2), tmp_path)
    for version in (5, 6):
        learner.commit(version)
    again = Learner(FilesMedium(keep_last=2), tmp_path)
    available = again.commit(5)
    assert names_in(tmp_path / "weights") == ["version-00000005"]
    assert torch.equal(fetch(FilesMedium(), tmp_path, available), again.slots[0])


def test_runs_of_one_name_that_share_a_folder_leave_each_other_alone(tmp_path):
    config = FilesMedium(folder=str(tmp_path / "shared"), keep_last=2)
    first = Learner(config, tmp_path / "a" / "run")
    available = [first.commit(version) for version in (7, 8)]
    first.writer.put_blob("delta-7-8", b"blob")
    second = Learner(config, tmp_path / "b" / "run")
    newest = second.commit(1)
    assert len(names_in(tmp_path / "shared")) == 2
    elsewhere = tmp_path / "where the run's folder is on a generator's machine"
    for version in (*available, newest):
        assert torch.equal(fetch(config, elsewhere, version), first.slots[0])
    assert FilesReader(config, elsewhere).fetch_blob(available[1], "delta-7-8", 4, threading.Event()) == b"blob"
    outside = replace(newest, location=f"{tmp_path}/../version-00000001")
    with pytest.raises(BroadcastError, match="in no folder of a run"):
        fetch(config, elsewhere, outside)


def test_shards_of_another_learner_are_refused(tmp_path):
    available = Learner(SHARDED, tmp_path).commit(1)
    Learner(SHARDED, tmp_path, {name: tensor for name, tensor in TENSORS.items() if name != "norm"}).commit(1)
    with pytest.raises(BroadcastError, match=r"is missing 1 tensors, the first is norm"):
        fetch(SHARDED, tmp_path, available)
