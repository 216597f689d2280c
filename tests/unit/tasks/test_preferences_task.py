import msgspec
import pytest

from asyncrl.config.tasks import PreferencesTask
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import PreferenceAnswers
from asyncrl.tasks.registry import build_task
from tests.builders import write_jsonl


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
