"""Fingerprints that a device can compute, and the two buffers that buckets pass through. On the CPU; tests/gpu does it there."""

import numpy as np
import pytest
import torch

from asyncrl.config.broadcast import BroadcastConfig, CUDAIPCMedium, DeltaConfig, GlooMedium, NCCLMedium, SharedMemoryMedium
from asyncrl.errors import ConfigError
from asyncrl.weights.buckets import device_fingerprint, gpu_for
from asyncrl.weights.media.registry import fingerprints_made
from asyncrl.weights.media.shared_memory import proves_whole_versions

CONTENT = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 64 * 1000, dtype=np.uint8))


def splitmix_sum(content: bytes) -> int:
    """The definition, in Python's integers."""
    mask = (1 << 64) - 1
    total = 0
    for number, word in enumerate(np.frombuffer(content, np.uint64).tolist(), start=1):
        mixed = (number * 0x9E3779B97F4A7C15 & mask) ^ word
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        total += mixed ^ mixed >> 31
    return total & mask


def test_a_bucket_larger_than_what_is_mixed_at_once_has_the_same_fingerprint_as_by_definition():
    large = CONTENT.repeat(140)[: (8 << 20) + 4096].contiguous()
    assert int.from_bytes(device_fingerprint(large), "little") == splitmix_sum(large.numpy().tobytes())


def test_each_medium_has_its_fingerprints_and_shared_memory_none_where_it_proves_a_version_without():
    media = [NCCLMedium(), CUDAIPCMedium(), GlooMedium()]
    assert [fingerprints_made(BroadcastConfig(medium=medium)) for medium in media] == ["device", "device", "host"]
    assert fingerprints_made(BroadcastConfig(medium=SharedMemoryMedium())) == ("none" if proves_whole_versions() else "host")
    assert fingerprints_made(BroadcastConfig(medium=SharedMemoryMedium(), verify=True)) == "host"
    assert fingerprints_made(BroadcastConfig(medium=SharedMemoryMedium(), delta=DeltaConfig())) == "host"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_error_names_the_media_that_need_none():
    with pytest.raises(ConfigError, match=r"there is none here; use shared_memory, zeromq or gloo"):
        gpu_for("nccl")
    with pytest.raises(ConfigError, match="not on cpu: set generate"):
        gpu_for("cuda_ipc", torch.device("cpu"))
