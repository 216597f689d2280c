"""What weights cost in memory, measured in a process that holds a learner's model and a generator's, over every medium that runs
here.

A learner: two slots, and one version more where it makes deltas. A generator: one version in its staging buffer, two buckets, and
parts on their way; over shared memory nothing of its own, but the learner's two slots mapped.
"""

import contextlib
from collections.abc import Iterator

import msgspec
import pytest

from asyncrl.config.broadcast import BroadcastConfig, DeltaConfig, FilesMedium, GlooMedium, SharedMemoryMedium, ZeroMQMedium
from tests.contract.line_process import LineProcess
from tests.contract.media.peers import MODEL_BYTES, TENSOR_BYTES, Case, Peak

ON_THE_WAY_BYTES = 2 * TENSOR_BYTES + (4 << 20)
"""Two buckets, and parts of a megabyte or less, compressed deltas, threads."""
ZEROMQ = ZeroMQMedium(chunk_bytes=256 << 10)
CASES = {
    "shared_memory": (BroadcastConfig(medium=SharedMemoryMedium()), 2 + 2),
    "files": (BroadcastConfig(medium=FilesMedium(shard_bytes=MODEL_BYTES // 4)), 2 + 1),
    "gloo": (BroadcastConfig(medium=GlooMedium(gather_s=0.05)), 2 + 1),
    "deltas": (BroadcastConfig(medium=ZEROMQ, delta=DeltaConfig()), 3 + 1),
}
"""The config; versions that learner and generator hold together."""


@pytest.fixture(scope="module")
def peer() -> Iterator[LineProcess]:
    """Takes one case after the other."""
    with contextlib.closing(LineProcess("tests.contract.media.peers", "measured")) as peer:
        yield peer


@pytest.mark.parametrize("case", CASES)
def test_weights_take_the_memory_they_are_said_to_and_no_more(case, tmp_path, peer):
    config, num_versions = CASES[case]
    peer.tell(Case(msgspec.structs.replace(config, bucket_bytes=TENSOR_BYTES), str(tmp_path)))
    peak = peer.hear(Peak)
    assert peak.is_right
    assert abs(peak.num_bytes - num_versions * MODEL_BYTES) <= ON_THE_WAY_BYTES
