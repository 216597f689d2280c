import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from asyncrl.errors import BroadcastError
from asyncrl.models.layout import make_manifest
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.weights.media.shared_memory import LEASE_LIMIT_S, SharedMemoryReader, SharedMemoryWriter
from asyncrl.weights.shm_segments import folders_of_run, remove_leftover_segments

MANIFEST = make_manifest({"w": torch.zeros(1_000_000)})


@pytest.fixture
def writer(tmp_path):
    with closing(SharedMemoryWriter(tmp_path)) as writer:
        yield writer


def announcement(version, location):
    return WeightsAvailable(version, "shared_memory", location, MANIFEST, "", 0.0)


def test_what_lies_in_shared_memory_is_private(writer, tmp_path):
    writer.open(MANIFEST)
    ours = folders_of_run(tmp_path)
    (folder,) = ours.parent.glob(f"{ours.name}*")
    assert folder.stat().st_mode & 0o077 == 0


def test_no_room_is_an_error_that_says_what_to_do_and_leaves_nothing(writer, tmp_path):
    with pytest.raises(BroadcastError, match="shm-size"):
        writer.open(WeightsManifest((), 1 << 46))
    assert remove_leftover_segments(tmp_path) == []


def test_a_closed_reader_has_nothing_mapped(writer, tmp_path):
    writer.open(MANIFEST)
    writer.overwrite(0)
    location, maps = writer.commit(0, 1, ""), Path("/proc/self/maps")
    num_mapped = [maps.read_text().count(location)]
    with closing(SharedMemoryReader(tmp_path)) as reader:
        reader.fetch(announcement(1, location), memoryview(bytearray(MANIFEST.total_bytes)), threading.Event())
        num_mapped.append(maps.read_text().count(location))
    num_mapped.append(maps.read_text().count(location))
    assert num_mapped[0] == num_mapped[2] < num_mapped[1]


def test_a_forked_child_keeps_no_segment_of_a_learner_that_was_killed(tmp_path):
    """As workers of a data loader outlive their learner; while that lives its segment is its own."""
    learner = (
        "import os, pathlib, sys, signal, asyncrl.weights.shm_segments as segments\n"
        "path, mapping = segments.make_segment(pathlib.Path(sys.argv[1]), 4096)\n"
        "if os.fork():\n"
        "    signal.pause()\n"
        "print(path, flush=True)\n"
        "os.read(0, 1)"
    )
    command = [sys.executable, "-c", learner, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        path = Path(process.stdout.readline().strip())
        assert remove_leftover_segments(tmp_path) == []
        process.kill()
        process.wait()
        assert remove_leftover_segments(tmp_path) == [path.parent]


def test_what_another_user_made_under_a_name_of_the_run_stays_and_stops_nobody(writer, tmp_path, monkeypatch):
    ours = folders_of_run(tmp_path)
    folder, file = (ours.with_name(f"{ours.name}{name}") for name in ("a", "b"))
    folder.mkdir()
    file.touch()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
            writer.open(MANIFEST)
            assert folder.is_dir()
        assert len(remove_leftover_segments(tmp_path)) == 2
    finally:
        file.unlink()


def test_a_reader_that_stands_still_spares_its_slot_for_a_while_only(tmp_path):
    now_s = [100.0]
    writer = SharedMemoryWriter(tmp_path, lambda: now_s[0])
    writer.open(MANIFEST)
    writer.overwrite(0)
    lease = SharedMemoryReader(tmp_path).lease(announcement(1, writer.commit(0, 1, "")))
    assert writer.busy_slots() == {0}
    now_s[0] += LEASE_LIMIT_S
    assert writer.busy_slots() == frozenset()
    lease.release()
    assert writer.busy_slots() == frozenset()
    another = SharedMemoryReader(tmp_path).lease(announcement(1, lease.path))
    assert writer.busy_slots() == {0}
    another.release()
    writer.close()
