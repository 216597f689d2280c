"""What weights cost in memory, measured in the processes that hold the model, over every medium that runs here.

A learner: two slots, and one version more where it makes deltas. A generator: one version in its staging buffer, two buckets, and
parts on their way; over shared memory nothing of its own, but the learner's two slots mapped.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.broadcast import BroadcastConfig, DeltaConfig, FilesMedium, GlooMedium, SharedMemoryMedium, ZeroMQMedium
from asyncrl.schema.weights import WeightsAvailable
from tests.contract.line_process import LineProcess
from tests.contract.media.memory_peer import MODEL_BYTES, TENSOR_BYTES, Peak, Publish

ON_THE_WAY_BYTES = 2 * TENSOR_BYTES + (4 << 20)
"""Two buckets, and parts of a megabyte or less, compressed deltas, threads."""
ZEROMQ = ZeroMQMedium(chunk_bytes=256 << 10)
CASES = {
    "shared_memory": (BroadcastConfig(medium=SharedMemoryMedium()), 2, 2),
    "files": (BroadcastConfig(medium=FilesMedium(shard_bytes=MODEL_BYTES // 4)), 2, 1),
    "gloo": (BroadcastConfig(medium=GlooMedium(gather_s=0.05)), 2, 1),
    "deltas": (BroadcastConfig(medium=ZEROMQ, delta=DeltaConfig()), 3, 1),
}


@contextlib.contextmanager
def processes(config: BroadcastConfig, run_folder: Path) -> Iterator[tuple[LineProcess, LineProcess]]:
    told = msgspec.json.encode(config).decode(), str(run_folder)
    learner, generator = (LineProcess("tests.contract.media.memory_peer", role, *told) for role in ("publish", "subscribe"))
    try:
        yield learner, generator
    finally:
        generator.close()
        learner.close()


@pytest.mark.parametrize("case", CASES)
def test_weights_take_the_memory_they_are_said_to_and_no_more(case, tmp_path):
    config, learner_versions, generator_versions = CASES[case]
    config = msgspec.structs.replace(config, bucket_bytes=TENSOR_BYTES)
    with processes(config, tmp_path) as (learner, generator):
        for version in range(1, 5):
            learner.tell(Publish(version))
            generator.tell(learner.hear(WeightsAvailable))
            loaded = generator.hear(Peak)
            assert loaded.is_right
        learner.tell(Publish(-1))
        peak = learner.hear(Peak).num_bytes
    for num_bytes, versions in ((peak, learner_versions), (loaded.num_bytes, generator_versions)):
        assert versions * MODEL_BYTES <= num_bytes + (1 << 20)
        assert num_bytes <= versions * MODEL_BYTES + ON_THE_WAY_BYTES
