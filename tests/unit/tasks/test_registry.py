"""The tasks that are made, and a user's own; their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.run import AdditionTask, PythonTask, ReasoningGymTask
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import ChatMessage
from asyncrl.tasks.registry import build_task
from asyncrl.tasks.task import ComputedSequence, TaskData, permuted, warm_start_examples


@pytest.mark.parametrize(("digits", "total"), [(1, 100), (2, 8100)])
def test_the_splits_are_disjoint_and_together_are_all_pairs_and_no_held_out_pair_is_a_worked_example(digits, total):
    task = build_task(AdditionTask(digits=digits, held_out=20), 4)
    train, held_out = {p.text for p in task.train}, {p.text for p in task.held_out}
    assert not train & held_out
    assert (len(train), len(held_out)) == (total - 20, 20)
    assert list(task.worked_examples) == [(prompt.text, prompt.answer) for prompt in task.train]


MODULE = """
from asyncrl.schema.samples import ChatMessage, Prompt
from asyncrl.tasks.task import ComputedSequence, TaskData

def colours(seed):
    return TaskData(train=[Prompt(prompt_id=f"c{seed}", text="red", answer="rot")], held_out=[])

def of(*prompts):
    return lambda seed: TaskData(train=[Prompt("c0"), *prompts], held_out=[])

endless = lambda seed: TaskData(train=(Prompt(f"c{number}") for number in range(9)), held_out=[])
nothing, wrong, number = lambda seed: TaskData(train=[], held_out=[]), lambda seed: ["red"], 3
answer, columns, text = of(Prompt("c1", answer=46)), of(Prompt("c1", reference_json={"tests": []})), of("red")
role, ids = of(Prompt("c1", messages=[ChatMessage("bot", "a")])), of(Prompt("c1", token_ids={1: object()}))
held_out = lambda seed: TaskData(train=[Prompt("c0")], held_out=(Prompt("c1", text="\\ud800"),))
both = lambda seed: TaskData(train=[Prompt("c0", text="red"), Prompt("c1", text="blue")], held_out=[Prompt("c2", text="blue")])
turns = of(Prompt("c1", messages=[{"role": "user", "content": "red"}]))

def lazy(seed):
    return TaskData(train=ComputedSequence(10**9, lambda index: Prompt(f"c{index}", answer=4 if index == 7 else "")), held_out=[])

def raising(seed):
    return {}["colour"]

def ends(seed):
    raise SystemExit("bye")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_colours.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def test_a_function_of_the_working_directory_is_called_with_the_seed(module):
    assert build_task(PythonTask(path="my_colours:colours"), 7).train[0].prompt_id == "c7"


def test_the_alphabet_has_the_characters_of_listed_prompts(module):
    assert build_task(PythonTask(path="my_colours:colours"), 7).alphabet == "deort"
    assert build_task(PythonTask(path="my_colours:lazy"), 0).alphabet == ""


def test_prompts_of_a_users_function_are_as_other_processes_read_them(module):
    assert build_task(PythonTask(path="my_colours:turns"), 0).train[1].messages == (ChatMessage("user", "red"),)
    train = build_task(PythonTask(path="my_colours:lazy"), 0).train
    assert (len(train), train[-1].prompt_id) == (10**9, "c999999999")
    with pytest.raises(ConfigError, match=r"lazy.*'c7'.*Expected `str`, got `int` - at `\$\.answer`"):
        train[7]


@pytest.mark.parametrize(("task", "message"), [
    (AdditionTask(digits=1), "under 100.*got 512"), (PythonTask(path="my_colours:number"), "no function 'number'"),
    (PythonTask(path="my_colours:wrong"), "must return .*TaskData, got list"),
    (PythonTask(path="my_colours:nothing"), "no prompts"),
    (PythonTask(path="my_colours:endless"), r"train must be a list or another sequence, got generator: write list\(...\)"),
    (PythonTask(path="my_colours:raising"), r"raised KeyError at my_colours.py:\d+: 'colour'"),
    (PythonTask(path="my_colours:ends"), r"my_colours:ends' raised SystemExit at my_colours.py:\d+: bye"),
    (PythonTask(path="my_colours:answer"), r"my_colours:answer.*'c1'.*got `int` - at `\$.answer`"),
    (PythonTask(path="my_colours:columns"), r"'c1'.*at `\$.reference_json`"),
    (PythonTask(path="my_colours:role"), r"'c1'.*at `\$.messages\[0\].role`"),
    (PythonTask(path="my_colours:ids"), "'c1' cannot be used"), (PythonTask(path="my_colours:held_out"), "'c1' cannot be used"),
    (PythonTask(path="my_colours:text"), "Prompt, got str"),
    (PythonTask(path="my_colours:both"), r"1 prompts of train are in held_out too \(c1\)"),
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
