import threading

import numpy as np
import pytest
import xxhash

from asyncrl.broadcast.fingerprint import (
    CHUNK_BYTES,
    BucketHasher,
    CopyProgress,
    damaged_buckets,
    fingerprints_behind,
    fingerprints_of,
)
from asyncrl.errors import BroadcastError

CONTENT = np.arange(CHUNK_BYTES // 2 + 13, dtype=np.uint32).view(np.uint8)
ENDS = (1000, len(CONTENT) - 64, len(CONTENT))
EXPECTED = b"".join(
    xxhash.xxh3_64(CONTENT[start:end]).intdigest().to_bytes(8, "little") for start, end in zip((0, *ENDS), ENDS, strict=False)
)


def test_hashing_behind_a_copy_equals_hashing_the_whole():
    progress, found = CopyProgress(), []
    follower = threading.Thread(target=lambda: found.append(fingerprints_behind(CONTENT.data, ENDS, progress)))
    follower.start()
    for end in (1, 1000, CHUNK_BYTES, CHUNK_BYTES + 1, len(CONTENT)):
        progress.advance(end)
    follower.join(timeout=30)
    assert found == [EXPECTED]


def test_an_abandoned_copy_has_no_fingerprint():
    progress = CopyProgress()
    progress.advance(100)
    progress.abandon()
    with pytest.raises(BroadcastError, match="100 bytes"):
        fingerprints_behind(CONTENT.data, ENDS, progress)


def test_hashing_in_place_side_by_side_gives_the_same():
    assert fingerprints_of(CONTENT.data, ENDS, lambda: None, num_threads=3) == EXPECTED


def test_chunks_of_any_size_give_the_same():
    hasher = BucketHasher(ENDS)
    for start in range(0, len(CONTENT), 777):
        hasher.update(CONTENT[start : start + 777].data)
    assert hasher.digests() == EXPECTED


def test_the_damaged_bucket_is_named():
    damaged = CONTENT.copy()
    damaged[-1] ^= 1
    assert damaged_buckets(fingerprints_of(damaged.data, ENDS, lambda: None), EXPECTED) == [2]
    with pytest.raises(BroadcastError, match="2 buckets arrived, 3 were announced"):
        damaged_buckets(EXPECTED[:16], EXPECTED)
