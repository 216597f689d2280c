"""Fingerprints that a device can compute, and the two buffers that buckets pass through. On the CPU; tests/gpu does it there."""

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.weights.buckets import device_fingerprint, gpu_for


def test_a_changed_byte_and_bytes_in_other_places_change_the_fingerprint_of_a_bucket_larger_than_what_is_mixed_at_once():
    large = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8 << 20) + 4096, dtype=np.uint8))
    found = device_fingerprint(large)
    for place in (0, (8 << 20) - 1, 8 << 20, len(large) - 1):
        changed = large.clone()
        changed[place] ^= 1
        assert device_fingerprint(changed) != found, place
    assert device_fingerprint(large.roll(8)) != found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_error_names_the_media_that_need_none():
    with pytest.raises(ConfigError, match=r"there is none here; use shared_memory, zeromq or gloo"):
        gpu_for("nccl")
    with pytest.raises(ConfigError, match="not on cpu: set generate"):
        gpu_for("cuda_ipc", torch.device("cpu"))
