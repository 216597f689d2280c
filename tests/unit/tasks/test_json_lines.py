import json

import msgspec
import pytest

from asyncrl.config.run import JsonlTask, PreferencesTask
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import PreferenceAnswers
from asyncrl.tasks.registry import build_task
from tests.builders import write_jsonl


def problems(count, start=0):
    numbers = range(start, start + count)
    return [{"question": f"What is {n} + {n}?", "answer": f"{n} and {n} make {2 * n}.\n#### {2 * n}"} for n in numbers]


def test_answer_regex_takes_the_reference_out_of_the_solution(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", problems(20))
    task = build_task(JsonlTask(path=path, answer_regex=r"#### (.+)", held_out=5), 0)
    assert (len(task.train), len(task.held_out)) == (15, 5)
    for prompt in task.train:
        number = int(prompt.messages[-1].content.split()[2])
        assert prompt.answer == str(2 * number)
        assert json.loads(prompt.reference_json)["question"] == prompt.messages[-1].content


def test_the_alphabet_of_plain_prompts_has_the_solutions_that_a_warm_start_is_shown(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", problems(20))
    task = build_task(JsonlTask(path=path, answer_regex=r"#### (.+)", held_out=5, chat=False), 0)
    assert set(task.alphabet) >= {*"".join(text for example in task.worked_examples for text in example)}
    assert "#" in task.alphabet


def test_repeated_problems_are_one_and_splits_are_disjoint(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", problems(10) * 3)
    task = build_task(JsonlTask(path=path, held_out=4, shots=2), 0)
    train, held_out = ({p.messages[-1].content for p in split} for split in (task.train, task.held_out))
    shots = {m.content for m in task.train[0].messages[:-1] if m.role == "user"}
    assert (len(train), len(held_out), len(shots)) == (4, 4, 2)
    assert not train & held_out
    assert not shots & (train | held_out)


def test_a_prompt_that_is_repeated_with_another_answer_keeps_the_first_and_is_logged(tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", [*problems(3), problems(1)[0] | {"answer": "1"}, problems(1)[0]])
    task = build_task(JsonlTask(path=path, held_out=1), 0)
    assert "a.jsonl: 1 lines repeat a prompt with another answer and are left out (lines 1 and 4)" in caplog.text
    assert "1" not in [prompt.answer for prompt in (*task.train, *task.held_out)]


def test_a_held_out_file_is_taken_whole_and_its_problems_leave_the_train_split(tmp_path):
    path, held_out_path = (tmp_path / f"{name}.jsonl" for name in "ab")
    parts = {"path": write_jsonl(path, problems(10)), "held_out_path": write_jsonl(held_out_path, problems(4, start=8))}
    task = build_task(JsonlTask(**parts), 0)
    assert (len(task.train), len(task.held_out)) == (8, 4)
    orders = {tuple(prompt.answer for prompt in build_task(JsonlTask(**parts), seed).held_out) for seed in (0, 0, 1, 2, 3)}
    assert 1 < len(orders) < 5  # evaluation takes the first ones
    with pytest.raises(ConfigError, match=r"take problems out of task\.held_out_path or lower task.shots"):
        build_task(JsonlTask(**parts | {"held_out_path": parts["path"]}), 0)


@pytest.mark.parametrize(("text", "fields", "message"), [
    ('{"question": "a", "answer": "b"}\n\n{oops', {}, r"a.jsonl:3: not JSON.*; a task file has one JSON object a line"),
    ("[1]", {}, r"a.jsonl:1: a line must be a JSON object, got list"),
    ('{"question": " ", "answer": "b"}', {}, r"a.jsonl:1: field 'question' \(task.prompt_field\) is empty"),
    ('{"q": "a", "answer": "b"}', {}, r"a.jsonl:1: no field 'question' \(task.prompt_field\); this line has answer, q"),
    ('{"question": "a", "answer": ["b"]}', {}, r"a.jsonl:1: field 'answer'.* got list"),
    ('{"question": "a", "answer": "b"}', {"answer_regex": "#### (.+)"}, r"a.jsonl:1: task.answer_regex .* in 'b'"),
    ('{"question": "a", "answer": "b"}', {"answer_regex": "####"}, "needs a group"),
    ('{"question": "a", "answer": "b"}', {"answer_regex": "("}, "not a regular expression"),
    ('{"question": "a", "answer": "b"}', {"held_out": 1}, "lower task.held_out"), ("\n \n", {}, "holds no problems"),
    ('{"question": "caf\xe9", "answer": "b"}', {}, r"task file .*a.jsonl is not UTF-8: .* position 17"),
    ("[" * 100_000, {}, r"a.jsonl:1: not JSON"), ('{"question": ' + "9" * 5_000 + "}", {}, r"a.jsonl:1: not JSON"),
    *((f'{{"question": {odd}, "answer": "b"}}', {}, "a.jsonl:1: not JSON") for odd in ("NaN", "-Infinity", "1e400", '"\\ud800"')),
])  # fmt: skip
def test_complaints_name_the_line_and_the_field(tmp_path, text, fields, message):
    (tmp_path / "a.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        build_task(JsonlTask(path=str(tmp_path / "a.jsonl"), **fields), 0)


def sums(count):
    return [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": f"x{n}"} for n in range(count)]


def said(role, text):
    return {"role": role, "content": text}


def answers_of(prompt):
    return msgspec.json.decode(prompt.reference_json, type=PreferenceAnswers)


def test_plain_prompts_are_the_field_itself_and_the_chosen_answer_is_the_worked_one(tmp_path):
    task = build_task(PreferencesTask(path=write_jsonl(tmp_path / "p.jsonl", sums(9)), chat=False), 0)
    assert [prompt.text for prompt in task.train] == [f"{n}+1=" for n in range(9)]
    assert answers_of(task.train[3]) == PreferenceAnswers("4", "x3")
    assert task.train[3].answer == "4"
    assert task.train[3].prompt_id == "p/train/4"
    assert list(task.worked_examples)[3] == ("3+1=", "4")
    assert task.alphabet == "+0123456789=x"


THREE_TURNS = [said("user", "a"), said("assistant", "b"), said("user", "c")]


@pytest.mark.parametrize("record", [
    {"prompt": THREE_TURNS, "chosen": [said("assistant", "yes")], "rejected": [said("assistant", "no")]},
    {"prompt": THREE_TURNS, "chosen": "yes", "rejected": "no"},
    {"chosen": [*THREE_TURNS, said("assistant", "yes")], "rejected": [*THREE_TURNS, said("assistant", "no")]},
    {"prompt": THREE_TURNS, "chosen": [*THREE_TURNS, said("assistant", "yes")], "rejected": [said("assistant", "no")]},
])  # fmt: skip
def test_conversations_are_read_in_the_forms_they_come_in(tmp_path, record):
    (prompt,) = build_task(PreferencesTask(path=write_jsonl(tmp_path / "p.jsonl", [record])), 0).train
    assert [(m.role, m.content) for m in prompt.messages] == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert answers_of(prompt) == PreferenceAnswers("yes", "no")


def test_held_out_prompts_take_all_their_pairs_with_them_whatever_the_seed(tmp_path):
    records = [{**record, "rejected": f"r{i}"} for i in range(3) for record in sums(6)]
    for seed in range(5):
        task = build_task(PreferencesTask(path=write_jsonl(tmp_path / "p.jsonl", records), chat=False, held_out=2), seed)
        train, held_out = ({prompt.text for prompt in split} for split in (task.train, task.held_out))
        assert (len(task.train), len(task.held_out)) == (12, 6)
        assert not train & held_out
        assert len({prompt.prompt_id for prompt in [*task.train, *task.held_out]}) == 18


AB = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(("record", "chat", "reason"), [
    ({"prompt": "a", "chosen": "b"}, False, r"no field 'rejected' \(task.rejected_field\); this line has chosen, prompt"),
    (AB | {"chosen": ["b"]}, False, "field 'chosen' .* must be text or a number"),
    (AB | {"rejected": "b"}, False, "the chosen and the rejected answer are the same"),
    (AB | {"prompt": ""}, False, "the prompt is empty"), (AB | {"prompt": []}, True, "the prompt is empty"),
    ({"chosen": "b", "rejected": "c"}, True, "no field 'prompt'"),
    (AB | {"chosen": [said("user", "b")]}, True, "the last message of field 'chosen' .* assistant"),
    (AB | {"chosen": [{"role": "bot", "content": "b"}]}, True, "field 'chosen' .* is not a list of chat messages"),
    (AB | {"chosen": [said("user", "z"), said("assistant", "b")]}, True, "'chosen' before its answer are not those"),
])  # fmt: skip
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, record, chat, reason):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ok", "chosen": "1", "rejected": "2"}, record])
    with pytest.raises(ConfigError, match=rf"p\.jsonl:2: .*{reason}"):
        build_task(PreferencesTask(path=path, chat=chat), 0)


def test_a_file_with_too_few_prompts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="3 distinct prompts leave none to train on after 3 held out"):
        build_task(PreferencesTask(path=write_jsonl(tmp_path / "p.jsonl", sums(3)), chat=False, held_out=3), 0)
    write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(ConfigError, match=r"empty\.jsonl: there are no preferences in it"):
        build_task(PreferencesTask(path=str(tmp_path / "empty.jsonl")), 0)
    with pytest.raises(ConfigError, match="cannot read task file"):
        build_task(PreferencesTask(path=str(tmp_path / "none.jsonl")), 0)
