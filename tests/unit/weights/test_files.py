import errno
import os
import threading

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.config.broadcast import FilesMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import make_manifest
from asyncrl.weights.media.files import FilesReader, FilesWriter
from tests.contract.media.learners import SlotLearner

TENSORS = {
    "embed": torch.arange(700, dtype=torch.float32).view(7, 100),
    "nothing": torch.zeros(0, 3),
    "norm": torch.full((3,), 0.5, dtype=torch.bfloat16),
    "up": torch.arange(900, dtype=torch.float32) * -1,
    "count": torch.arange(5),
}
SHARDED = FilesMedium(shard_bytes=2820, num_threads=3)


def learner_of(config, run_folder, tensors=TENSORS):
    return SlotLearner(FilesWriter(config, run_folder), make_manifest(tensors, bucket_bytes=1024))


def fetch(config, run_folder, available):
    """See that what is fetched has the fingerprints that were announced."""
    flat = torch.full((available.manifest.total_bytes,), 255, dtype=torch.uint8)
    found = FilesReader(config, run_folder).fetch(available, flat.numpy().data, threading.Event())
    assert found == available.bucket_fingerprints


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_transformers_opens_the_shards_as_they_are(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    tensors = dict(model.named_parameters())
    folder = tmp_path / "weights" / "version-00000003"
    learner_of(FilesMedium(shard_bytes=4000), tmp_path, tensors).publish(3, tensors)
    model.config.save_pretrained(folder)
    opened = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert len(names_in(folder)) > 3
    assert opened.keys() == tensors.keys()
    assert all(torch.equal(opened[name], tensor) for name, tensor in tensors.items())


def test_versions_of_a_line_that_was_left_go_with_the_first_of_the_new_one(tmp_path):
    learner = learner_of(FilesMedium(keep_last=2), tmp_path)
    for version in (5, 6):
        learner.publish(version)
    available = learner_of(FilesMedium(keep_last=2), tmp_path).publish(5)
    assert names_in(tmp_path / "weights") == ["version-00000005"]
    fetch(FilesMedium(), tmp_path, available)


def test_a_folder_that_a_reader_holds_open_does_not_stop_the_next_learner(tmp_path, monkeypatch):
    """NFS keeps files that are open under another name, so their folder cannot be removed yet."""

    def rmdir(path, *_, **__):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    (tmp_path / "weights" / ".removing-4-ab").mkdir(parents=True)
    monkeypatch.setattr(os, "rmdir", rmdir)
    available = learner_of(FilesMedium(), tmp_path).publish(1)
    assert names_in(tmp_path / "weights") == [".removing-4-ab", "version-00000001"]
    fetch(FilesMedium(), tmp_path, available)


def test_runs_of_one_name_that_share_a_folder_leave_each_other_alone(tmp_path):
    config = FilesMedium(folder=str(tmp_path / "shared"), keep_last=2)
    first = learner_of(config, tmp_path / "a" / "run")
    available = [first.publish(version) for version in (7, 8)]
    first.writer.put_blob("delta-7-8", b"blob")
    newest = learner_of(config, tmp_path / "b" / "run").publish(1)
    assert len(names_in(tmp_path / "shared")) == 2
    elsewhere = tmp_path / "where the run's folder is on a generator's machine"
    for version in (*available, newest):
        fetch(config, elsewhere, version)
    assert FilesReader(config, elsewhere).fetch_blob(available[1], "delta-7-8", 4, threading.Event()) == b"blob"
    outside = replace(newest, location=f"{tmp_path}/../version-00000001")
    with pytest.raises(BroadcastError, match="in no folder of a run"):
        fetch(config, elsewhere, outside)


def test_shards_of_another_learner_are_refused(tmp_path):
    available = learner_of(SHARDED, tmp_path).publish(1)
    learner_of(SHARDED, tmp_path, {name: tensor for name, tensor in TENSORS.items() if name != "norm"}).publish(1)
    with pytest.raises(BroadcastError, match=r"is missing 1 tensors, the first is norm"):
        fetch(SHARDED, tmp_path, available)
