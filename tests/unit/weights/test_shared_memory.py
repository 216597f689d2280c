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
from asyncrl.weights.shm_segments import remove_leftover_segments, segment_path

MANIFEST = make_manifest({"w": torch.zeros(1_000_000)})


@pytest.fixture
def writer(tmp_path):
    with closing(SharedMemoryWriter(tmp_path)) as writer:
        yield writer


def announcement(version, location):
    return WeightsAvailable(version, "shared_memory", location, MANIFEST, "", 0.0)


def test_what_lies_in_shared_memory_is_private(writer, tmp_path):
    writer.open(MANIFEST)
    ours = segment_path(tmp_path, "")
    paths = list(ours.parent.glob(f"{ours.name}*"))
    assert len(paths) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


def test_no_room_is_an_error_that_says_what_to_do_and_leaves_nothing(writer, tmp_path):
    with pytest.raises(BroadcastError, match="shm-size"):
        writer.open(WeightsManifest((), 1 << 46))
    assert remove_leftover_segments(tmp_path) == []


def test_a_segment_whose_learner_lives_stays_though_a_reader_has_closed_it_and_another_process_sweeps(writer, tmp_path):
    writer.open(MANIFEST)
    writer.overwrite(0)
    location = Path(writer.commit(0, 1, ""))
    into = memoryview(bytearray(MANIFEST.total_bytes))
    num_mapped = [Path("/proc/self/maps").read_text().count(str(location))]
    with closing(SharedMemoryReader(tmp_path)) as reader:
        reader.fetch(announcement(1, str(location)), into, threading.Event())
        num_mapped.append(Path("/proc/self/maps").read_text().count(str(location)))
    num_mapped.append(Path("/proc/self/maps").read_text().count(str(location)))
    assert num_mapped[0] == num_mapped[2] < num_mapped[1], "a closed reader has nothing mapped"
    location.read_bytes()
    sweep = (
        "import sys, pathlib, asyncrl.weights.shm_segments as segments\n"
        "sys.exit(len(segments.remove_leftover_segments(pathlib.Path(sys.argv[1]))))"
    )
    assert subprocess.run([sys.executable, "-c", sweep, str(tmp_path)], check=False).returncode == 0
    assert location.exists()


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
        assert remove_leftover_segments(tmp_path) == [path]


def test_what_another_user_made_under_a_name_of_the_run_stays_and_stops_nobody(tmp_path, monkeypatch):
    foreign = [segment_path(tmp_path, name) for name in ("a", "b", "x.y")]
    own, unlink = segment_path(tmp_path, "c"), Path.unlink

    def refuse(path, missing_ok=False):
        if path in foreign:
            raise PermissionError(path)
        unlink(path, missing_ok)

    try:
        foreign[0].mkdir()
        for path in (*foreign[1:], own):
            path.touch()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refuse)
            assert remove_leftover_segments(tmp_path) == [own]
    finally:
        foreign[0].rmdir()
        for path in foreign[1:]:
            path.unlink()


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
