"""The tasks that are made, and a user's own."""

import pytest

from asyncrl.config.run import AdditionTask, PythonTask, ReasoningGymTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.registry import build_task


@pytest.mark.parametrize(("digits", "total"), [(1, 100), (2, 8100)])
def test_the_splits_are_disjoint_and_together_are_all_pairs_and_no_held_out_pair_is_a_worked_example(digits, total):
    task = build_task(AdditionTask(digits=digits, held_out=20), 4)
    train, held_out = {p.text for p in task.train}, {p.text for p in task.held_out}
    assert not train & held_out
    assert (len(train), len(held_out)) == (total - 20, 20)
    assert list(task.worked_examples) == [(prompt.text, prompt.answer) for prompt in task.train]


MODULE = """
from asyncrl.schema.samples import Prompt
from asyncrl.tasks.task import TaskData

def colours(seed):
    return TaskData(train=[Prompt(prompt_id=f"c{seed}", text="red", answer="rot")], held_out=[])

nothing, wrong, number = lambda seed: TaskData(train=[], held_out=[]), lambda seed: ["red"], 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_colours.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def test_a_function_of_the_working_directory_is_called_with_the_seed(module):
    assert build_task(PythonTask(path="my_colours:colours"), 7).train[0].prompt_id == "c7"


@pytest.mark.parametrize(("task", "message"), [
    (AdditionTask(digits=1), "under 100.*got 512"), (PythonTask(path="my_colours:number"), "no function 'number'"),
    (PythonTask(path="my_colours:wrong"), "must return .*TaskData, got list"),
    (PythonTask(path="my_colours:nothing"), "no prompts"),
])  # fmt: skip
def test_what_is_not_a_task_or_holds_everything_out_is_refused(module, task, message):
    with pytest.raises(ConfigError, match=message):
        build_task(task, 0)


ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def one_digit_sums(**fields):
    return ReasoningGymTask(**{"family_options": ONE_DIGIT, "size": 2000, "held_out": 60, **fields})


def question(prompt):
    return prompt.messages[-1].content


def test_questions_are_distinct_and_in_one_place_only():
    pytest.importorskip("reasoning_gym")
    task = build_task(one_digit_sums(), 0)
    train, held_out = [question(p) for p in task.train], [question(p) for p in task.held_out]
    shots = [message.content for message in task.train[0].messages[:-1] if message.role == "user"]
    everything = [*train, *held_out, *shots]
    assert len(everything) == len(set(everything)) <= 200
    assert len(held_out) == 60
    assert len(shots) == 3


@pytest.mark.parametrize(("fields", "message"), [
    ({"family": "no_such"}, "no_such.*chain_sum"), ({"family_options": {"colour": 3}}, "colour"),
    ({"family_options": {"min_terms": 5, "max_terms": 2}}, "max_terms"),
    ({"held_out": 200}, "distinct problems of 2000.*lower task.held_out"),
    ({"family": "rubiks_cube", "family_options": {}, "size": 70}, "no single reference answer"),
])  # fmt: skip
def test_a_family_that_cannot_serve_is_refused_with_what_to_do(fields, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        build_task(one_digit_sums(**fields), 0)
