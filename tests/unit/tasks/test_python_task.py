import pytest

from asyncrl.config.tasks import PythonTask
from asyncrl.errors import ConfigError
from asyncrl.tasks.registry import build_task

MODULE = """
from asyncrl.schema.samples import Prompt
from asyncrl.tasks.task import TaskData

def colours(seed):
    return TaskData(train=[Prompt(prompt_id=f"c{seed}", text="red", answer="rot")], held_out=[])

nothing, wrong, number = lambda seed: TaskData(train=[], held_out=[]), lambda seed: ["red"], 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_colours.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def test_a_function_of_the_working_directory_is_called_with_the_seed():
    assert build_task(PythonTask(path="my_colours:colours"), 7).train[0].prompt_id == "c7"


@pytest.mark.parametrize(("path", "message"), [
    ("my_colours:number", "no function 'number'"), ("my_colours:wrong", "must return .*TaskData, got list"),
    ("my_colours:nothing", "no prompts"),
])  # fmt: skip
def test_what_is_not_a_task_is_refused(path, message):
    with pytest.raises(ConfigError, match=message):
        build_task(PythonTask(path=path), 0)
