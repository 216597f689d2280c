import pytest

from asyncrl.config.tasks import AdditionTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.addition import build_addition


@pytest.mark.parametrize(("digits", "total"), [(1, 100), (2, 8100)])
def test_the_splits_are_disjoint_and_together_are_all_pairs(digits, total):
    task = build_addition(AdditionTask(digits=digits, held_out=20), seed=4)
    train, held_out = {p.text for p in task.train}, {p.text for p in task.held_out}
    assert not train & held_out
    assert (len(train), len(held_out)) == (total - 20, 20)


def test_worked_examples_never_show_a_held_out_pair():
    task = build_addition(AdditionTask(held_out=4000), seed=0)
    held_out = {p.text for p in task.held_out}
    assert len(task.worked_examples) == 4100
    assert not held_out & {question for question, _ in task.worked_examples}
    assert all(answer == prompt.answer for (_, answer), prompt in zip(task.worked_examples, task.train, strict=True))


def test_holding_everything_out_is_refused_with_the_limit():
    with pytest.raises(ConfigError, match=r"under 100.*got 512"):
        build_addition(AdditionTask(digits=1), seed=0)
