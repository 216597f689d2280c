import pytest

from asyncrl.config.tasks import AdditionTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.registry import build_addition


@pytest.mark.parametrize(("digits", "total"), [(1, 100), (2, 8100)])
def test_the_splits_are_disjoint_and_together_are_all_pairs_and_no_held_out_pair_is_a_worked_example(digits, total):
    task = build_addition(AdditionTask(digits=digits, held_out=20), seed=4)
    train, held_out = {p.text for p in task.train}, {p.text for p in task.held_out}
    assert not train & held_out
    assert (len(train), len(held_out)) == (total - 20, 20)
    assert list(task.worked_examples) == [(prompt.text, prompt.answer) for prompt in task.train]


def test_holding_everything_out_is_refused_with_the_limit():
    with pytest.raises(ConfigError, match=r"under 100.*got 512"):
        build_addition(AdditionTask(digits=1), seed=0)
