from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.updates import updates_of_groups


@given(groups=st.lists(st.integers(0, 50), max_size=60), minibatches=st.integers(1, 20))
def test_updates_are_runs_of_about_equal_size_none_without_a_group(groups, minibatches):
    distinct = list(dict.fromkeys(groups))
    updates = updates_of_groups(groups, minibatches)
    assert list(updates) == distinct
    numbers = list(updates.values())
    assert numbers == sorted(numbers)
    sizes = [numbers.count(number) for number in range(min(minibatches, len(distinct)))]
    assert sum(sizes) == len(distinct)
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_five_groups_in_two_updates():
    assert updates_of_groups([7, 7, 3, 9, 1, 4, 4], 2) == {7: 0, 3: 0, 9: 1, 1: 1, 4: 1}
