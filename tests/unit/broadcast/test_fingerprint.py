import threading

import numpy as np
import pytest
import xxhash

from asyncrl.broadcast.fingerprint import CHUNK_BYTES, CopyProgress, copy_and_fingerprint, fingerprint_behind
from asyncrl.errors import BroadcastError

CONTENT = np.arange(CHUNK_BYTES // 2 + 13, dtype=np.uint32).view(np.uint8)


def test_hashing_behind_a_copy_equals_hashing_the_whole():
    progress, found = CopyProgress(), []
    follower = threading.Thread(target=lambda: found.append(fingerprint_behind(CONTENT.data, progress)))
    follower.start()
    for end in (1, 1000, CHUNK_BYTES, CHUNK_BYTES + 1, len(CONTENT)):
        progress.advance(end)
    follower.join(timeout=10)
    assert found == [xxhash.xxh3_128(CONTENT).hexdigest()]


def test_an_abandoned_copy_has_no_fingerprint():
    progress = CopyProgress()
    progress.advance(100)
    progress.abandon()
    with pytest.raises(BroadcastError, match="100 bytes"):
        fingerprint_behind(CONTENT.data, progress)


def test_copying_while_hashing_copies_and_hashes_everything():
    target = np.zeros_like(CONTENT)
    checks = []
    found = copy_and_fingerprint(CONTENT.data, target.data, lambda: checks.append(1))
    assert np.array_equal(target, CONTENT)
    assert found == xxhash.xxh3_128(CONTENT).hexdigest()
    assert len(checks) == -(-len(CONTENT) // CHUNK_BYTES)


def test_a_failing_check_stops_the_copy():
    target = np.zeros_like(CONTENT)

    def check():
        raise BroadcastError("overtaken")

    with pytest.raises(BroadcastError):
        copy_and_fingerprint(CONTENT.data, target.data, check)
    assert not target[CHUNK_BYTES:].any()
