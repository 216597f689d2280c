"""Fingerprints that a device can compute, and the two buffers that buckets pass through. On the CPU; tests/gpu does it there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.config.broadcast import BroadcastConfig, CUDAIPCMedium, DeltaConfig, GlooMedium, NCCLMedium, SharedMemoryMedium
from asyncrl.errors import ConfigError
from asyncrl.weights.fingerprint import damaged_buckets
from asyncrl.weights.media.device import (
    BucketBuffers,
    current_gpu,
    device_fingerprint,
    device_fingerprints,
)
from asyncrl.weights.media.registry import fingerprints_made
from asyncrl.weights.media.shared_memory import proves_whole_versions

CPU = torch.device("cpu")
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


def test_the_fingerprint_is_what_its_definition_says_in_plain_integers():
    assert int.from_bytes(device_fingerprint(CONTENT), "little") == splitmix_sum(CONTENT.numpy().tobytes())


def test_a_bucket_larger_than_what_is_mixed_at_once_has_the_same_fingerprint_as_by_definition():
    large = CONTENT.repeat(140)[: (8 << 20) + 4096].contiguous()
    assert int.from_bytes(device_fingerprint(large), "little") == splitmix_sum(large.numpy().tobytes())


@pytest.mark.parametrize("position", [0, 7, 8, 31_999, 63_999])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_changes_the_fingerprint(position, bit):
    changed = CONTENT.clone()
    changed[position] ^= 1 << bit
    assert device_fingerprint(changed) != device_fingerprint(CONTENT)


def test_swapped_words_and_shifted_content_change_the_fingerprint():
    words = CONTENT.view(torch.int64)
    swapped = words.clone()
    swapped[3], swapped[4] = words[4], words[3]
    assert device_fingerprint(swapped.view(torch.uint8)) != device_fingerprint(CONTENT)
    assert device_fingerprint(words.roll(1).view(torch.uint8)) != device_fingerprint(CONTENT)


def test_the_top_bits_of_two_words_do_not_cancel_out():
    """What a sum of words with odd weights would not see."""
    words = CONTENT.view(torch.int64).clone()
    words[:2] ^= -(1 << 63)
    assert device_fingerprint(words.view(torch.uint8)) != device_fingerprint(CONTENT)


def test_zeros_of_different_lengths_differ():
    assert device_fingerprint(torch.zeros(64, dtype=torch.uint8)) != device_fingerprint(torch.zeros(128, dtype=torch.uint8))


def test_every_bucket_has_a_fingerprint_of_its_own():
    ends = (6400, 12_800, 64_000)
    fingerprints = device_fingerprints(CONTENT, ends, CPU)
    changed = CONTENT.clone()
    changed[7000] ^= 1
    assert damaged_buckets(device_fingerprints(changed, ends, CPU), fingerprints) == [1]


def test_buffers_take_turns_and_are_as_large_as_the_largest_bucket():
    buffers = BucketBuffers((64, 256, 320, 448), CPU)
    assert [len(buffers[index]) for index in range(4)] == [64, 192, 64, 128]
    assert buffers[0].data_ptr() == buffers[2].data_ptr() != buffers[1].data_ptr()


def test_each_medium_has_its_fingerprints_and_shared_memory_none_where_it_proves_a_version_without():
    media = [NCCLMedium(), CUDAIPCMedium(), GlooMedium()]
    assert [fingerprints_made(BroadcastConfig(medium=medium)) for medium in media] == ["device", "device", "host"]
    assert fingerprints_made(BroadcastConfig(medium=SharedMemoryMedium())) == ("none" if proves_whole_versions() else "host")
    assert fingerprints_made(BroadcastConfig(medium=SharedMemoryMedium(), verify=True)) == "host"
    assert fingerprints_made(BroadcastConfig(medium=SharedMemoryMedium(), delta=DeltaConfig())) == "host"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_error_names_the_media_that_need_none():
    with pytest.raises(ConfigError, match="shared_memory, zeromq or gloo"):
        current_gpu()
