import numpy as np
import pytest
import xxhash

from asyncrl.errors import BroadcastError
from asyncrl.weights.fingerprint import (
    damaged_buckets,
    fingerprints_of,
)

CONTENT = np.arange(300_013, dtype=np.uint32).view(np.uint8)
ENDS = (1000, len(CONTENT) - 64, len(CONTENT))
EXPECTED = b"".join(
    xxhash.xxh3_64(CONTENT[start:end]).intdigest().to_bytes(8, "little") for start, end in zip((0, *ENDS), ENDS, strict=False)
)


def test_hashing_in_place_side_by_side_gives_the_same():
    assert fingerprints_of(CONTENT.data, ENDS) == EXPECTED
    assert fingerprints_of(CONTENT.data, ENDS, buckets=[2, 0]) == EXPECTED[16:] + EXPECTED[:8]


def test_the_damaged_bucket_is_named():
    damaged = CONTENT.copy()
    damaged[-1] ^= 1
    assert damaged_buckets(fingerprints_of(damaged.data, ENDS), EXPECTED) == [2]
    with pytest.raises(BroadcastError, match="2 buckets arrived, 3 were announced"):
        damaged_buckets(EXPECTED[:16], EXPECTED)
