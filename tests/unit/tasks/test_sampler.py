from hypothesis import given
from hypothesis import strategies as st

from asyncrl.schema.samples import Prompt
from asyncrl.tasks.sampler import PromptSequence, permuted


def prompts(count):
    return [Prompt(prompt_id=str(number)) for number in range(count)]


def ids(order, start, stop):
    return [order[index].prompt_id for index in range(start, stop)]


@given(size=st.integers(1, 400), seed=st.integers(0, 2**63 - 1))
def test_permuted_visits_every_position_once(size, seed):
    assert sorted(permuted(position, size, seed) for position in range(size)) == list(range(size))


def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    order = PromptSequence(prompts(50), seed=3)
    first, second = ids(order, 0, 50), ids(order, 50, 100)
    assert sorted(first) == sorted(second) == sorted(str(n) for n in range(50))
    assert first != second
    assert first != [str(n) for n in range(50)]


def test_a_hundred_million_prompts_are_ordered_without_memory():
    places = {permuted(position, 81_000_000, seed=5) for position in range(2000)}
    assert len(places) == 2000
    assert 38_000_000 < sum(places) / len(places) < 43_000_000
