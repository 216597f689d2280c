"""Small real runs: every process is started by the project's own launcher."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.buffer.ledger.store import connect_read_only
from asyncrl.config.load import dump_config, parse_config
from asyncrl.config.run import RunConfig
from asyncrl.control.lifecycle.supervisor import read_pids
from asyncrl.learner.model.policy import character_tokenizer
from asyncrl.observe.steps import read_steps
from asyncrl.schema.status import RunStatus
from asyncrl.tasks.registry import build_task
from tests.builders import laid_over

NO_MODEL = {"kind": "fake", "num_slots": 8, "max_sequence_tokens": 16, "vocabulary_size": 8, "mean_tokens": 4.0,
            "token_latency_s": 0.02}  # fmt: skip
"""An engine for runs that are about something else: its generator starts with a third of the work, and holds no core after."""
NO_MODELS = {"generate__engine": NO_MODEL, "learner__fake_step_s": 0.02}
"""No model at all: such a run costs a fifth of one that imports torch."""
ASYNCRL = (sys.executable, "-P", "-m", "asyncrl")
NO_EVALUATION = {"eval__at_start": False, "eval__at_end": False}
NO_ENGINE = {**NO_EVALUATION, "model__warm_start": None,
             "generate__engine": {**NO_MODEL, "token_latency_s": 0.002, "vocabulary_size": 14}}  # fmt: skip
"""For sessions: digits, `+`, `=` and two marks, drawn without a model."""


def tiny_settings(folder: Path, **overrides: Any) -> dict[str, Any]:
    """A run that trains a 2-layer Llama on one-digit addition, in seconds."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "folder": str(folder),
        "num_steps": 5,
        "task": {"kind": "addition", "digits": 1, "held_out": 16},
        "model": {"kind": "scratch", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_positions": 32,
                  "warm_start": {"steps": 5, "batch_size": 32}},
        "generate": {"num_workers": 1, "engine": {"kind": "transformers", "num_slots": 8, "max_sequence_tokens": 16},
                     "sampling": {"max_new_tokens": 6}},
        "reward": {"num_workers": 1},
        "packing": {"tokens_per_row": 256},
        "algorithm": {"groups_per_step": 4, "group_size": 4},
        "learner": {"learning_rate": 1e-3, "warmup_steps": 2},
        "eval": {"num_prompts": 8},
        "checkpoint": {"every_steps": 2},
        "supervision": {"stall_timeout_s": 100.0, "backoff_s": 0.1},
        "observe": {"pictures": False},
    }  # fmt: skip
    return laid_over(settings, overrides)


@pytest.fixture
def tiny(tmp_path: Path):
    """Make tiny configs: `tiny(buffer__max_staleness=0)`."""

    def make(**overrides: Any) -> RunConfig:
        return parse_config(tiny_settings(tmp_path, **overrides))

    return make


def written(config: RunConfig, path: Path) -> Path:
    """Write a config to a file; return where."""
    path.write_text(dump_config(config), encoding="utf-8")
    return path


def python_reward(folder: Path, text: str) -> list[dict[str, str]]:
    """Return reward functions that are one, the `score` of this text of a module."""
    (folder / "my_reward.py").write_text(text)
    return [{"kind": "python", "path": f"{folder / 'my_reward.py'}:score"}]


def command_line(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `asyncrl` to its end; `options` are of `subprocess.run`."""
    usual = {"capture_output": True, "text": True, "timeout": 200, "check": False}
    return subprocess.run([*ASYNCRL, *map(str, words)], **usual | options)


async def reached(run: asyncrl.Run, version: int) -> asyncrl.StepReport:
    """Wait for this version; return the report of its step."""
    return await step_where(run, lambda _: True, version - 1)


async def step_where(run: asyncrl.Run, is_so: Callable[[asyncrl.StepReport], bool], first: int = 0) -> asyncrl.StepReport:
    """Wait for a step whose report is so, this one or a later one; return the report."""
    async for report in run.steps(first):
        if is_so(report):
            return report
    pytest.fail(f"the run ended first: {await run.status()}")


async def status_where(run: asyncrl.Run, is_so: Callable[[RunStatus], bool], first: int = 0) -> RunStatus:
    """Follow the steps of a run, from this one on, until its status is so; return that."""
    async for _ in run.steps(first):
        if is_so(status := await run.status()):
            return status
    pytest.fail(f"the run ended first: {await run.status()}")


async def said(run: asyncrl.Run, rule: str, what: str = "", after: int = 0) -> int:
    """Wait until the run says of a rule's alarm that it is raised, with its advice, or `is over`; return the event's number."""
    async for event in run.events("alarm", after=after):
        if event.subject == rule and what in event.text:
            return event.seq
    pytest.fail(f"{rule} was not raised, or not over")


@pytest.fixture
def quick_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs look at room and pace, which they do every ten seconds, every 0.3 s, and a step is late after 3 s, not 30."""
    folder = tmp_path / "quick_looks"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("from asyncrl.observe import alarms\nalarms.ROOM_S, alarms.STALL_S = 0.3, 3.0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))


@pytest.fixture
def beside(tmp_path: Path):
    """Start commands that go on beside the test, each with a log; what is left of them at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: object) -> subprocess.Popen[bytes]:
        with (tmp_path / f"beside-{len(started)}.log").open("wb") as log:
            started.append(subprocess.Popen([*map(str, command)], stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(60)


@pytest.fixture
def judged(tiny, tmp_path: Path) -> dict[str, Any]:
    """Settings of a run with a reward model and a reference on an inference worker, and steps that need both."""
    alphabet = build_task(tiny().task, 0).alphabet
    torch.manual_seed(0)
    LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(character_tokenizer(alphabet)), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=32, num_labels=1, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )
    ).save_pretrained(tmp_path / "judge")  # fmt: skip
    return {
        "inference__reward_models": [{"name": "taste", "path": str(tmp_path / "judge"), "weight": 0.1}],
        "algorithm__kl": {"coefficient": 0.01},
        "algorithm__reference": {"where": "worker"},
    }


@pytest.fixture
def mixed_rewards(tmp_path: Path) -> list[dict[str, str]]:
    """Rewards that differ within any group, so that every step has something to learn."""
    return python_reward(tmp_path, "def score(prompt, text):\n    return float(sum(map(ord, text)) % 5)\n")


def assert_balanced(status: RunStatus) -> None:
    """Every group that was issued is in one state."""
    groups = dict(status.groups)
    assert groups.pop("issued") == sum(groups.values())


def assert_every_step_once(run_folder: Path, num_steps: int) -> None:
    """These steps were done, each once and in order, and their groups of four are trained, each once."""
    assert [report.step for report in read_steps(run_folder)] == list(range(num_steps))
    assert len(trained_groups(run_folder)) == 4 * num_steps
    groups = {row.state: row.groups for row in LedgerReader(run_folder).counts()}
    assert groups["trained"] == 4 * num_steps
    assert not groups.keys() & {"taken", "failed"}, groups


def metrics_of(run_folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each line that a run wrote."""
    return [json.loads(line)["metrics"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def kill_all(run_folder: Path) -> None:
    """Kill a run's controller, and then its processes: those that are left would end by themselves."""
    controller = json.loads((run_folder / "api.json").read_text())["pid"]
    for pid in (controller, *recorded_pids(run_folder).values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def samples_by(run_folder: Path, generators: str) -> int:
    """Return how many samples a run has of generators with names like this one."""
    with connect_read_only(run_folder / "ledger.sqlite") as connection:
        return int(connection.execute("SELECT count(*) FROM samples WHERE generator LIKE ?", (generators,)).fetchone()[0])


def trained_groups(run_folder: Path) -> list[int]:
    """Return the ids of the groups that were trained, none of them twice."""
    ledger = LedgerReader(run_folder / "ledger.sqlite")
    trained = [group_id for step in ledger.steps(last=1_000_000) for group_id in step.group_ids]
    assert len(trained) == len(set(trained))
    return trained


@pytest.fixture(autouse=True)
def no_process_left(tmp_path: Path):
    """No test may leave a process behind; whatever is left is killed by pid, and the test fails.

    Looked for are this process's children, and whoever names the test's folder: those of a detached run are nobody's children.
    One that is on its way out has a few seconds; a helper of this process that was there before (multiprocessing's) is nobody's.
    """
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    yield
    started = set(psutil.Process(os.getpid()).children(recursive=True)) - before
    assert_gone(started | processes_of(tmp_path))


def processes_of(folder: Path) -> set[psutil.Process]:
    """Return the other processes whose command names a folder."""
    return {one for one in psutil.process_iter() if str(folder) in " ".join(command_of(one)) and one.pid != os.getpid()}


def assert_gone(processes: set[psutil.Process]) -> None:
    """Wait some seconds for the end of those that are on their way out, and kill what is left."""
    _, alive = psutil.wait_procs(processes, timeout=90)
    left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    told = {process.pid: command_of(process) for process in left}
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {told}"


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty where it is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def recorded_pids(run_folder: Path) -> dict[str, int]:
    """Return pids by process name, from the run's own record."""
    return {name: record.pid for name, record in read_pids(run_folder).items()}


def kill(run_folder: Path, name: str) -> None:
    """Kill a process of a run outright."""
    os.kill(recorded_pids(run_folder)[name], signal.SIGKILL)
