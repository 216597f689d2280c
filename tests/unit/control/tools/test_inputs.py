"""A user's functions are looked at before a run is started, by a process that ends with that."""

import re

import pytest

from asyncrl import Run
from asyncrl.config.load import parse_config
from asyncrl.control.tools.choices import describe
from asyncrl.control.tools.inputs import function_faults
from asyncrl.errors import ConfigError
from tests.builders import write_jsonl

GOOD = """
print("imported")
def task(seed): ...
def score(prompt, text): return 0.0
def maths(inputs, config): ...
"""


def config_of(path, **changes):
    own = {name: f"{path}:{name}" for name in ("task", "score", "maths")}
    rewards = [{"kind": "python", "path": own["score"]}, {"kind": "answer_match"}]
    algorithm = dict.fromkeys(("advantage", "loss"), own["maths"]) | {"corrections": [{"kind": "python", "path": own["maths"]}]}
    task = {"kind": "python", "path": own["task"]}
    return parse_config({"task": task, "reward": {"functions": rewards}, "algorithm": algorithm, **changes})


def written(folder, text):
    path = folder / "mine.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("wrong", "message"), [
    (("def task(seed)", "def task()"), r"task.path '.*mine.py:task' is called with \(seed\) and takes \(\)"),
    (("def score(prompt, text)", "def score(text)"), r"reward.functions .* is called with \(prompt, text\) and takes \(text\)"),
    (("def maths(inputs, config)", "def maths(inputs)"), r"algorithm.advantage .* takes \(inputs\)"),
    (("print(", "import no_such_package; ("), "cannot be imported: No module named 'no_such_package'"),
    (("print(", "raise ValueError("), "cannot be imported: ValueError: imported"),
    (("print(", "import os; os._exit(0) or ("), "ended the process with exit code 0 and no answer: it said nothing"),
])  # fmt: skip
def test_a_fault_shows_before_anything_is_started(tmp_path, wrong, message):
    config = config_of(written(tmp_path, GOOD.replace(*wrong)))
    assert re.search(message, "\n".join(describe(config)[1]))


async def test_a_task_s_file_that_is_not_there_blocks_no_name_and_the_dry_run_names_it(tmp_path):
    task = {"kind": "jsonl", "path": str(tmp_path / "train.jsonl"), "held_out_path": str(tmp_path / "test.jsonl")}
    config = parse_config({"task": task, "folder": str(tmp_path), "name": "early"})
    with pytest.raises(ConfigError, match=r"task.path: there is no file .*train.jsonl\ntask.held_out_path: .*test.jsonl"):
        async with Run(config):
            pass
    assert not (tmp_path / "early").exists()
    assert [fault.partition(":")[0] for fault in describe(config)[1]] == ["task.path", "task.held_out_path"]
    (tmp_path / "train.jsonl").write_text("")
    assert [fault.partition(":")[0] for fault in describe(config)[1]] == ["task.held_out_path"]


def test_functions_in_an_environment_of_the_run_are_not_looked_for_here():
    launch = {"kind": "ray", "environment": {"working_dir": "elsewhere"}}
    assert function_faults(config_of("not_here.py", launch=launch)) == []
    fields = ("task.path", "reward.functions", "algorithm.advantage", "algorithm.loss", "algorithm.corrections")
    expected = [f"{field} 'not_here.py:{{}}': there is no file not_here.py" for field in fields]
    names = ("task", "score", "maths", "maths", "maths")
    found = function_faults(config_of("not_here.py", launch={"kind": "ray"}))
    assert found == [said.format(name) for said, name in zip(expected, names, strict=True)]


def faults_of(**raw):
    return describe(parse_config(raw))[1]


def lines(path, count, prompt="1+1="):
    records = [{"question": f"{prompt}{number}", "answer": "2"} for number in range(count)]
    return {"kind": "jsonl", "path": write_jsonl(path, records), "chat": False}


def test_a_dry_run_counts_prompts_and_names_those_that_are_too_long(tmp_path):
    task = lines(tmp_path / "d.jsonl", 30, prompt="x" * 20) | {"held_out": 10}
    generate = {"engine": {"kind": "transformers", "max_sequence_tokens": 32}, "sampling": {"max_new_tokens": 16}}
    (fault,) = faults_of(task=task, generate=generate)
    assert fault.startswith("20 of the first 20 prompts are over 16 tokens (the longest has 22)")


@pytest.mark.parametrize(("files", "said"), [
    (None, "model.path: there is no folder"), (["config.json"], "has no tokenizer"), (["tokenizer.json"], "has no config.json"),
])  # fmt: skip
def test_a_dry_run_looks_into_the_model_s_folder(tmp_path, files, said):
    folder = tmp_path / "m"
    for name in files or []:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    fault, *others = faults_of(model={"kind": "pretrained", "path": str(folder)})
    assert said in fault
    assert ["config.json has no 'hidden_size'" in other for other in others] == [True] * (files == ["config.json"])


def test_a_dry_run_finds_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (fault,) = faults_of(folder=str(tmp_path / "file" / "runs"))
    assert fault == f"folder: {tmp_path / 'file'} is no folder that can be written"


def test_a_dry_run_names_devices_that_are_not_here_and_says_where_held_out_prompts_are_few(tmp_path):
    task = lines(tmp_path / "d.jsonl", 30) | {"held_out": 10}
    text, faults = describe(parse_config({"task": task, "learner": {"device": "cuda:99"}, "eval": {"num_prompts": 11}}))
    assert [fault.partition(" cannot be used here: ")[0] for fault in faults] == ["learner.device 'cuda:99'"]
    assert "10  (eval.num_prompts asks for 11: all of them are taken)" in text
