import subprocess
import sys
from pathlib import Path

from asyncrl.weights.shm_segments import segment_folder, segment_prefix
from benchmarks.transports import remove_leftovers, scratch_folder

HOLDER = """
import sys, torch
from benchmarks.transports import end_tidily, scratch_folder
from asyncrl.weights.media.shared_memory import SharedMemoryWriter
from asyncrl.models.layout import make_manifest
end_tidily()
with scratch_folder() as folder:
    (folder / "run").mkdir()
    SharedMemoryWriter(folder / "run").open(make_manifest({"w": torch.zeros(5)}))
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder():
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = Path(process.stdout.readline().strip())
    assert segments_of(folder)
    return process, folder


def segments_of(folder):
    return list(segment_folder(folder / "run").glob(f"{segment_prefix(folder / 'run')}*"))


def ended(process):
    process.wait(timeout=30)
    process.stdin.close()
    process.stdout.close()


def test_a_benchmark_that_is_told_to_end_leaves_nothing():
    process, folder = holder()
    process.terminate()
    ended(process)
    assert not folder.exists()
    assert segments_of(folder) == []


def test_what_a_killed_benchmark_left_is_removed_by_the_next_and_nobody_elses():
    process, folder = holder()
    process.kill()
    ended(process)
    with scratch_folder() as own:
        assert folder in remove_leftovers()
        assert own.exists()
    assert not folder.exists()
    assert segments_of(folder) == []
