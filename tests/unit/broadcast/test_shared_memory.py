import threading

import msgspec
import pytest
import torch

from asyncrl.broadcast.layout import make_manifest
from asyncrl.broadcast.medium import VersionUnavailableError
from asyncrl.broadcast.segments import note_path, remove_leftover_segments, segment_folder, segment_prefix
from asyncrl.broadcast.shared_memory import SegmentNote, SharedMemoryReader, SharedMemoryWriter
from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

MANIFEST = make_manifest({"w": torch.zeros(1_000_000)})


@pytest.fixture
def writer(tmp_path):
    writer = SharedMemoryWriter(tmp_path)
    yield writer
    writer.close()


def announcement(version, location):
    return WeightsAvailable(version, "shared_memory", location, MANIFEST, "", 0.0)


def fetch(tmp_path, version, location):
    reader = SharedMemoryReader(tmp_path)
    return reader.fetch(announcement(version, location), memoryview(bytearray(MANIFEST.total_bytes)), threading.Event())


def test_the_segment_is_noted_in_the_run_folder_and_private(writer, tmp_path):
    writer.open(MANIFEST)
    (path,) = segment_folder(tmp_path).glob(f"{segment_prefix(tmp_path)}*")
    assert msgspec.json.decode(note_path(tmp_path).read_bytes(), type=SegmentNote).path == str(path)
    assert path.stat().st_mode & 0o077 == 0


def test_a_version_that_is_being_written_cannot_be_read(writer, tmp_path):
    writer.open(MANIFEST)
    writer.overwrite(0, 1)
    location = writer.commit(0, 1, "")
    assert fetch(tmp_path, 1, location)
    writer.overwrite(1, 2)
    with pytest.raises(VersionUnavailableError, match="version 2"):
        fetch(tmp_path, 2, location)
    writer.overwrite(0, 3)
    with pytest.raises(VersionUnavailableError, match="version 1"):
        fetch(tmp_path, 1, location)


class OvertakingEvent(threading.Event):
    """Looked at after every chunk: the moment to give the slot away."""

    def __init__(self, overtake):
        super().__init__()
        self._overtake = overtake

    def is_set(self):
        self._overtake()
        return super().is_set()


def test_a_reader_that_is_overtaken_raises(writer, tmp_path):
    writer.open(MANIFEST)
    writer.overwrite(0, 1)
    location = writer.commit(0, 1, "")
    overtaken = OvertakingEvent(lambda: writer.overwrite(0, 2))
    reader = SharedMemoryReader(tmp_path)
    with pytest.raises(VersionUnavailableError, match="overwritten while it was read"):
        reader.fetch(announcement(1, location), memoryview(bytearray(MANIFEST.total_bytes)), overtaken)


def test_no_room_is_an_error_that_says_what_to_do_and_leaves_nothing(writer, tmp_path):
    with pytest.raises(BroadcastError, match="shm-size"):
        writer.open(WeightsManifest((), 1 << 46))
    assert remove_leftover_segments(tmp_path) == []


def test_a_reader_keeps_what_it_mapped_when_the_segment_is_unlinked(writer, tmp_path):
    writer.open(MANIFEST)
    writer.overwrite(0, 1)
    location = writer.commit(0, 1, "")
    reader = SharedMemoryReader(tmp_path)
    into = memoryview(bytearray(MANIFEST.total_bytes))
    first = reader.fetch(announcement(1, location), into, threading.Event())
    assert [str(path) for path in remove_leftover_segments(tmp_path)] == [location]
    assert reader.fetch(announcement(1, location), into, threading.Event()) == first
    with pytest.raises(VersionUnavailableError, match="is gone"):
        fetch(tmp_path, 1, location)
