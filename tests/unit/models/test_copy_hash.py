"""The C loop and the Python one against the xxhash package: same numbers, same bytes, however the input is cut."""

import shutil
import sys
import threading
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.models import copy_hash
from asyncrl.models.copy_hash import IS_NATIVE, InTurns, copy_hasher, digest_of

BLOCK = 1024
SHORTEST_NATIVE = 241
EDGES = sorted({n + k for n in (512, BLOCK, 2 * BLOCK, 8 * BLOCK) for k in (-64, -1, 0, 1, 63, 64, 65)} | {SHORTEST_NATIVE})


def native(num_bytes):
    if not IS_NATIVE:
        pytest.skip("not run: no C compiler when asyncrl was installed")
    hasher = copy_hasher(num_bytes)
    assert not isinstance(hasher, InTurns)
    return hasher


KINDS = [native, lambda _: InTurns()]


def content(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


@pytest.mark.skipif(shutil.which("cc") is None, reason="not run: no C compiler here")
def test_the_loop_is_built_where_there_is_a_compiler():
    assert IS_NATIVE, "reinstall: pip install -e ."


@pytest.mark.parametrize("kind", KINDS, ids=["native", "in_turns"])
@pytest.mark.parametrize("num_bytes", EDGES)
def test_one_update_equals_xxhash_at_the_edges_of_stripes_and_blocks(kind, num_bytes):
    source, target = content(num_bytes), np.zeros(num_bytes, np.uint8)
    hasher = kind(num_bytes)
    hasher.update(source, target)
    assert hasher.intdigest() == xxhash.xxh3_64_intdigest(source)
    assert (target == source).all()


@pytest.mark.parametrize("kind", KINDS, ids=["native", "in_turns"])
@given(cuts=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 5000)), min_size=1, max_size=12), shift=st.integers(0, 63),
       copied=st.integers(0, 2**12 - 1))  # fmt: skip
def test_any_cuts_with_and_without_targets_at_any_alignment_equal_xxhash(kind, cuts, shift, copied):
    num_bytes = sum(cuts) + SHORTEST_NATIVE
    source, memory = content(num_bytes, shift), np.zeros(num_bytes + 64, np.uint8)
    target = memory[shift : shift + num_bytes]
    hasher, start = kind(num_bytes), 0
    for number, count in enumerate([*cuts, SHORTEST_NATIVE]):
        is_copied = copied >> number & 1
        hasher.update(source[start : start + count].data, target[start : start + count].data if is_copied else None)
        if not is_copied:
            target[start : start + count] = source[start : start + count]
        start += count
    assert hasher.intdigest() == xxhash.xxh3_64_intdigest(source)
    assert (target == source).all()
    assert not memory[:shift].any()
    assert not memory[shift + num_bytes :].any()


@pytest.mark.parametrize("num_bytes", [0, 1, 240])
def test_short_inputs_are_hashed_too(num_bytes):
    hasher = copy_hasher(num_bytes)
    hasher.update(content(num_bytes))
    assert digest_of(hasher) == xxhash.xxh3_64_intdigest(content(num_bytes)).to_bytes(8, "little")


def test_the_c_loop_refuses_the_digest_of_a_short_input():
    hasher = native(1000)
    hasher.update(content(240))
    with pytest.raises(ValueError, match="only inputs of 241 bytes and more are hashed here, this one has 240"):
        hasher.intdigest()


@pytest.mark.parametrize("kind", KINDS, ids=["native", "in_turns"])
def test_a_target_of_another_size_is_refused_and_nothing_is_taken_in(kind):
    hasher, target = kind(1000), np.zeros(999, np.uint8)
    with pytest.raises(ValueError, match="the target has 999 bytes, the source 1000: they must be equal"):
        hasher.update(content(1000), target)
    assert not target.any()
    hasher.update(content(1000))
    assert hasher.intdigest() == xxhash.xxh3_64_intdigest(content(1000))


@pytest.mark.parametrize("wrong", [b"read only" * 100, np.zeros(1800, np.uint8)[::2]])
def test_a_target_that_cannot_be_written_in_one_go_is_refused(wrong):
    with pytest.raises((BufferError, ValueError)):
        native(900).update(content(900), wrong)


def test_other_threads_run_while_bytes_move():
    """The interpreter makes nobody let others run meanwhile, so that it is this that does."""
    source, hasher, stop, ticks = content(64 << 20), native(64 << 20), threading.Event(), []

    def tick():
        while not stop.wait(0.0001):
            ticks.append(len(ticks))

    ticking, interval_s = threading.Thread(target=tick), sys.getswitchinterval()
    ticking.start()
    sys.setswitchinterval(1000.0)
    try:
        before, until_s = len(ticks), time.monotonic() + 20
        while len(ticks) == before and time.monotonic() < until_s:
            hasher.update(source)
        during = len(ticks) - before
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        ticking.join()
    assert during > 0


def test_a_second_thread_in_the_same_hasher_is_refused():
    source, hasher, refused = content(64 << 20), native(64 << 20), []

    def update(part):
        try:
            hasher.update(part)
        except RuntimeError as error:
            refused.append(str(error))

    until_s = time.monotonic() + 20
    while not refused and time.monotonic() < until_s:  # the one may be done before the other begins
        hashing = threading.Thread(target=update, args=(source,))
        hashing.start()
        while hashing.is_alive() and not refused:
            update(source[:1])
        hashing.join()
    assert set(refused) == {"another thread is in this Hasher's update: it is for one thread at a time"}


def test_without_the_c_loop_python_takes_over(monkeypatch):
    monkeypatch.setattr(copy_hash, "_copyhash", None)
    assert isinstance(copy_hasher(1 << 20), InTurns)
