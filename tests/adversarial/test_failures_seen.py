"""What goes wrong is on the screen, and a run that cannot succeed ends: the real command line, with short runs."""

import json
import os
import re
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.load import parse_config
from asyncrl.learner.model.policy import character_tokenizer
from asyncrl.tasks.registry import build_task
from tests.integration import conftest as kit
from tests.integration.conftest import no_process_left  # noqa: F401 - a fixture

SHORT = kit.NO_EVALUATION | kit.NO_MODELS


def asyncrl(*arguments: object, file_bytes: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder whose modules only its children could find, with this most that a file may hold."""

    def limit() -> None:
        if file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    # Python would leave compiled modules that end at the limit.
    environment = os.environ | options.pop("env", {}) | ({"PYTHONDONTWRITEBYTECODE": "1"} if file_bytes else {})
    return kit.command_line(*arguments, preexec_fn=limit, env=environment, **options)


def shadow(folder: Path) -> None:
    """Give a folder a module with the name of one of Python's own, whose import nobody survives."""
    (folder / "grp.py").write_text("import os\nos._exit(99)\n")


def test_under_a_limit_on_file_sizes_and_in_a_read_only_folder_the_last_words_are_what_to_do(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    folder, trains = disk / "tiny", SHORT | {"learner__fake_step_s": None}
    with_model = kit.written(parse_config(kit.tiny_settings(disk, name="again", num_steps=2, **trains)), tmp_path / "model.toml")
    try:
        finished = run(disk, "def score(prompt, text):\n    return 1.0\n", num_steps=2)
        limited = [asyncrl("report", folder, file_bytes=1000), asyncrl("run", with_model, "--plain", file_bytes=200_000)]
        while subprocess.run(
            ["mount", "-o", "remount,ro", disk], check=False
        ).returncode:  # a process on its way out may hold a log
            time.sleep(0.5)
        report, inspect = asyncrl("report", folder), asyncrl("inspect", folder)
        begun = asyncrl("run", disk / "c.toml", "--plain", "--set", "name=third")
        resumed = asyncrl("resume", folder, "--plain", "--set", "num_steps=4")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for ended in limited:
        assert ended.returncode in (1, 2), ended.stdout + ended.stderr
        assert "ulimit -f" in ended.stderr.splitlines()[-1], ended.stderr
        assert ended.stdout.count("learner died") <= 1, "it was not started again and again"
    assert inspect.returncode == 0, inspect.stderr
    assert report.returncode == 1
    assert report.stderr.splitlines()[-1].endswith("Read-only file system; copy the folder to a place that can be written")
    for ended, said in ((begun, "is no folder that can be written"), (resumed, "Read-only file system")):
        assert ended.returncode == 2
        assert said in ended.stderr.splitlines()[-1]
    assert not any("Traceback" in ended.stderr for ended in (*limited, report, resumed, begun))


def test_tests_that_code_exec_cannot_judge_are_told_by_a_dry_run(tmp_path):
    references = [json.dumps({"tests": [test]}) for test in ("assert f(1) == 2", "\nclass A: pass\nassert f(A())")]
    (tmp_path / "task.py").write_text(
        f"import asyncrl\nREFERENCES = {references!r}\ndef task(seed):\n"
        "    prompts = [asyncrl.Prompt(f'p{i}', text='x', reference_json=each) for i, each in enumerate(REFERENCES)]\n"
        "    return asyncrl.TaskData(prompts, [], alphabet='x1')\n"
    )
    settings = {"task": {"kind": "python", "path": f"{tmp_path / 'task.py'}:task"}, "model__warm_start": None}
    settings |= {"reward": {"functions": [{"kind": "code_exec"}]}} | SHORT
    told = asyncrl("run", kit.written(parse_config(kit.tiny_settings(tmp_path, **settings)), tmp_path / "c.toml"), "--dry-run")
    assert told.returncode == 2, told.stdout + told.stderr
    assert "code_exec cannot judge 1 prompts" in told.stderr
    assert "test 0, line 2: defines class A" in told.stderr


def run(folder: Path, reward: str, **overrides) -> subprocess.CompletedProcess[str]:
    """`asyncrl run --plain` with this reward function."""
    settings = SHORT | {"num_steps": 10_000, "reward__functions": kit.python_reward(folder, reward)} | overrides
    config = kit.written(parse_config(kit.tiny_settings(folder, **settings)), folder / "c.toml")
    shadow(folder)
    return asyncrl("run", config, "--plain", cwd=folder)


def test_a_reward_that_raises_on_every_sample_ends_the_run_with_its_traceback_on_the_screen(tmp_path):
    ended = run(tmp_path, "def score(prompt, text):\n    return lenght(text)\n")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "NameError at my_reward.py:2" in ended.stdout
    assert "    return lenght(text)" in ended.stdout
    assert ended.stdout.count("Traceback") == 1, "one cause is told once"
    assert re.search(r"all of the first \d+ samples failed; most often at reward: .*NameError", ended.stderr)
    assert "Traceback" in (tmp_path / "tiny" / "logs" / "controller.log").read_text()
    overview = asyncrl("inspect", tmp_path / "tiny").stdout
    assert len(set(re.findall(r"^failed +(.*?)  +\d+$", overview, flags=re.MULTILINE))) == 1, overview


def test_failures_that_are_allowed_and_samples_over_a_limit_are_on_the_step_line_and_the_run_goes_on(tmp_path):
    reward = (
        "import pathlib, time\n"
        "def score(prompt, text):\n"
        "    first = pathlib.Path(__file__).with_name('slept')\n"
        "    if not first.exists():\n"
        "        first.touch()\n"
        "        time.sleep(1000)\n"
        "    return 1 / (hash(text) % 4 > 0)\n"
    )
    settings = {"supervision__max_failed_share": 1.0, "algorithm__group_size": 8, "reward__timeout_s": 5.0, "num_steps": 3}
    ended = run(tmp_path, reward, **settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ZeroDivisionError at my_reward.py:7" in ended.stdout
    assert ended.stdout.count("a sample scored 0: reward python ran past reward.timeout_s (5 s)") == 1, ended.stdout
    assert re.search(r"step \d+/3 .* FAILED \d+ samples, \d+% of groups", ended.stdout), ended.stdout
    assert re.search(r"step 3/3 .* OVER LIMIT [1-9]\d* samples, \d+%", ended.stdout), ended.stdout


def test_what_a_restart_would_meet_again_ends_the_run_at_once(tmp_path):
    """Damaged weights; which other faults are such is in unit/control/launch/test_process_main.py."""
    settings = kit.tiny_settings(tmp_path, num_steps=1, **SHORT | {"learner__fake_step_s": None})
    settings["model"] = {"kind": "pretrained", "path": str(tmp_path / "model")}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    character_tokenizer(build_task(parse_config(settings).task, 0).alphabet).save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    ended = asyncrl("run", kit.written(parse_config(settings), tmp_path / "c.toml"), "--plain")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"cannot open the model in \S+model: ", ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout.count("learner died") <= 1, "it was not started again and again"
