import json

import pytest

from asyncrl.config.tasks import JsonlTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.json_lines import build_jsonl
from tests.builders import write_jsonl


def problems(count, start=0):
    numbers = range(start, start + count)
    return [{"question": f"What is {n} + {n}?", "answer": f"{n} and {n} make {2 * n}.\n#### {2 * n}"} for n in numbers]


def test_answer_regex_takes_the_reference_out_of_the_solution(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", problems(20))
    task = build_jsonl(JsonlTask(path=path, answer_regex=r"#### (.+)", held_out=5), 0)
    assert (len(task.train), len(task.held_out)) == (15, 5)
    for prompt in task.train:
        number = int(prompt.messages[-1].content.split()[2])
        assert prompt.answer == str(2 * number)
        assert json.loads(prompt.reference_json)["question"] == prompt.messages[-1].content


def test_repeated_problems_are_one_and_splits_are_disjoint(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", problems(10) * 3)
    task = build_jsonl(JsonlTask(path=path, held_out=4, shots=2), 0)
    train, held_out = ({p.messages[-1].content for p in split} for split in (task.train, task.held_out))
    shots = {m.content for m in task.train[0].messages[:-1] if m.role == "user"}
    assert (len(train), len(held_out), len(shots)) == (4, 4, 2)
    assert not train & held_out
    assert not shots & (train | held_out)


def test_a_held_out_file_is_taken_whole_and_its_problems_leave_the_train_split(tmp_path):
    path, held_out_path = (tmp_path / f"{name}.jsonl" for name in "ab")
    parts = {"path": write_jsonl(path, problems(10)), "held_out_path": write_jsonl(held_out_path, problems(4, start=8))}
    task = build_jsonl(JsonlTask(**parts), 0)
    assert (len(task.train), len(task.held_out)) == (8, 4)


@pytest.mark.parametrize(("text", "fields", "message"), [
    ('{"question": "a", "answer": "b"}\n\n{oops', {}, r"a.jsonl:3: not JSON"),
    ("[1]", {}, r"a.jsonl:1: a line must be a JSON object, got list"),
    ('{"q": "a", "answer": "b"}', {}, r"a.jsonl:1: no field 'question' \(task.prompt_field\); this line has answer, q"),
    ('{"question": "a", "answer": ["b"]}', {}, r"a.jsonl:1: field 'answer'.* got list"),
    ('{"question": "a", "answer": "b"}', {"answer_regex": "#### (.+)"}, r"a.jsonl:1: task.answer_regex .* in 'b'"),
    ('{"question": "a", "answer": "b"}', {"answer_regex": "####"}, "needs a group"),
    ('{"question": "a", "answer": "b"}', {"answer_regex": "("}, "not a regular expression"),
    ('{"question": "a", "answer": "b"}', {"held_out": 1}, "lower task.held_out"), ("\n \n", {}, "holds no problems"),
    ('{"question": "caf\xe9", "answer": "b"}', {}, r"task file .*a.jsonl is not UTF-8: .* position 17"),
    ("[" * 100_000, {}, r"a.jsonl:1: not JSON"), ('{"question": ' + "9" * 5_000 + "}", {}, r"a.jsonl:1: not JSON"),
    ('{"question": "\\ud800", "answer": "b"}', {}, r"a.jsonl:1: not JSON: .*surrogates not allowed"),
])  # fmt: skip
def test_complaints_name_the_line_and_the_field(tmp_path, text, fields, message):
    (tmp_path / "a.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        build_jsonl(JsonlTask(path=str(tmp_path / "a.jsonl"), **fields), 0)
