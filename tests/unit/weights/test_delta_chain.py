import msgspec
import pytest

from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import Delta, WeightsAvailable, WeightsManifest
from asyncrl.weights.delta_chain import DeltaChain, HeldVersion, WholeVersion, deltas_from, plan_fetch

MANIFEST = WeightsManifest((), 1000)


def delta(base, version, num_bytes=10):
    return Delta(version, base, f"f{base}", f"delta-{version}", num_bytes, "")


def announced(version, full_version, *deltas):
    return WeightsAvailable(
        version,
        "files",
        "there",
        MANIFEST,
        f"f{version}",
        0.0,
        bucket_fingerprints=b"new",
        full_version=full_version,
        full_bucket_fingerprints=b"old",
        deltas=deltas,
    )


def held(version, fingerprint=None):
    return HeldVersion(version, fingerprint or f"f{version}", b"", 1000)


def whole(version):
    return WholeVersion(version, f"at {version}", b"")


def chain_of(full_every, *sizes):
    """A chain that begins whole at version 0 and goes on by deltas, whole where that is due."""
    chain = DeltaChain(1000, full_every)
    chain.advance("f0", whole(0), None)
    for version, size in enumerate(sizes, 1):
        chain.advance(f"f{version}", whole(version) if chain.is_whole_due(size) else None, delta(version - 1, version, size))
        chain.check_invariants()
    return chain


def test_who_has_the_base_fetches_the_deltas_from_there():
    plan = plan_fetch(announced(4, 1, delta(1, 2), delta(2, 3), delta(3, 4)), held(2))
    assert (plan.whole, [change.version for change in plan.deltas]) == (None, [3, 4])


def test_who_has_nothing_fetches_the_whole_version_and_the_deltas_after_it():
    plan = plan_fetch(announced(4, 2, delta(1, 2), delta(2, 3), delta(3, 4)), None)
    assert (plan.whole.version, plan.whole.fingerprint, plan.whole.bucket_fingerprints) == (2, "f2", b"old")
    assert [change.version for change in plan.deltas] == [3, 4]


def test_deltas_of_more_bytes_than_the_whole_are_left():
    plan = plan_fetch(announced(4, 4, delta(2, 3, 600), delta(3, 4, 600)), held(2))
    assert (plan.whole.version, plan.deltas) == (4, ())


def test_another_learners_version_of_the_same_number_is_no_base():
    assert plan_fetch(announced(3, -1, delta(2, 3)), held(2, "other")).whole.version == 3


def test_bytes_that_are_here_already_are_not_fetched_again():
    plan = plan_fetch(announced(9, -1), held(3, "f9"))
    assert (plan.whole, plan.deltas) == (None, ())


def test_a_buffer_of_another_size_is_no_base():
    other = msgspec.structs.replace(announced(3, -1, delta(2, 3)), manifest=WeightsManifest((), 2000))
    assert plan_fetch(other, held(2)).whole.version == 3


@pytest.mark.parametrize("deltas", [(), (delta(1, 2),), (delta(1, 2), delta(3, 4)), (delta(2, 3), delta(3, 4))])
def test_a_whole_version_from_which_nothing_leads_on_is_a_clear_error(deltas):
    with pytest.raises(BroadcastError, match="on top of version 1, and no deltas lead from there"):
        plan_fetch(announced(4, 1, *deltas), None)


def test_a_broken_run_of_deltas_leads_nowhere():
    assert deltas_from((delta(1, 2), delta(3, 4)), 1) == ()


def test_every_nth_version_is_due_whole():
    chain = chain_of(3, *[10] * 7)
    assert chain.whole.version == 6
    assert [chain.is_whole_due(10), chain.is_whole_due(None)] == [False, True]


def test_a_version_is_due_whole_once_the_deltas_would_be_more_bytes_than_it():
    chain = chain_of(20, 400, 500)
    assert (chain.whole.version, chain.is_whole_due(100), chain.is_whole_due(101)) == (0, False, True)


def test_the_oldest_deltas_go_and_never_one_after_the_whole_version():
    chain = DeltaChain(1000, 2)
    assert chain.advance("f0", whole(0), None) == ()
    assert chain.advance("f1", None, delta(0, 1)) == ()
    assert chain.advance("f2", whole(2), delta(1, 2)) == ()
    assert chain.advance("f3", None, delta(2, 3)) == (delta(0, 1),)
    assert [change.version for change in chain.deltas] == [2, 3]


def test_a_version_without_a_delta_ends_the_chain():
    chain = chain_of(20, 10, 10)
    assert chain.advance("f3", whole(3), None) == (delta(0, 1), delta(1, 2))
    assert (chain.deltas, chain.head) == ((), (3, "f3"))
