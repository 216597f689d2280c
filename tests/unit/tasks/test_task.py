import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.tasks.task import ComputedSequence, TaskData, permuted, warm_start_examples


@given(size=st.integers(1, 400), seed=st.integers(0, 2**63 - 1))
def test_permuted_visits_every_position_once(size, seed):
    assert sorted(permuted(position, size, seed) for position in range(size)) == list(range(size))


def test_a_hundred_million_prompts_are_ordered_without_memory():
    places = {permuted(position, 81_000_000, seed=5) for position in range(2000)}
    assert len(places) == 2000
    assert 38_000_000 < sum(places) / len(places) < 43_000_000


def test_a_computed_sequence_has_no_item_outside_of_it_and_says_so():
    squares = ComputedSequence(10, lambda index: index * index)
    assert (squares[9], squares[-10], squares[8:20]) == (81, 0, [64, 81])
    for index in (12, 10, -11):
        with pytest.raises(IndexError, match=f"^index {index} is outside a sequence of 10$"):
            squares[index]


def test_a_warm_start_gets_all_worked_examples_or_of_very_many_some_that_the_seed_draws():
    def task(size):
        return TaskData([], [], worked_examples=ComputedSequence(size, lambda index: (str(index), "")))

    assert warm_start_examples(task(200_000), 3) == list(task(200_000).worked_examples)
    drawn = warm_start_examples(task(81_000_000), 3)
    assert len(set(drawn)) == 200_000
    assert drawn == warm_start_examples(task(81_000_000), 3) != warm_start_examples(task(81_000_000), 4)
