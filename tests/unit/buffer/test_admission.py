from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.admission import Generator, GeneratorPool
from asyncrl.buffer.group import BufferLimits

NAMES = ["a", "b", "c", "d"]
CHANGES = st.tuples(
    st.sampled_from(NAMES), st.sampled_from(["put", "remove", "add_members", "num_slots", "version"]), st.integers(1, 4)
)


LIMITS = BufferLimits(groups_per_step=1, max_staleness=0, group_size=2, queue_ahead_groups=1)


def has_room(generator):
    return generator.members == 0 or generator.members + 2 <= generator.num_slots + 2


def scan(generators, min_version):
    """Look at all of them."""
    free = [item for item in generators if item.version >= min_version and has_room(item)]
    return min(free, key=lambda item: (item.load, -item.version, item.name), default=None)


@given(st.lists(CHANGES, max_size=120))
def test_the_best_is_the_one_that_a_scan_finds(changes):
    generators = GeneratorPool(LIMITS)
    for name, what, value in changes:
        known = generators.get(name)
        if what == "put":
            generators.put(Generator(name, value, value - 1))
        elif what == "remove":
            generators.remove(name)
        elif known is not None:
            generators.change(name, **{what: value})
        for min_version in range(5):
            assert generators.best(min_version) is scan(generators, min_version)
        assert generators.newest_version == max((item.version for item in generators), default=-1)
        assert len(generators) == len(list(generators))


def test_stale_entries_do_not_pile_up():
    generators = GeneratorPool(LIMITS)
    for name in NAMES:
        generators.put(Generator(name, 8, 0))
    for turn in range(10_000):
        generators.change(NAMES[1 + turn % 3], add_members=1 - 2 * (turn % 2))
    assert sum(map(len, generators._heaps.values())) < 100
