"""Small real runs: every process is started by the project's own launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.load import parse_config
from asyncrl.config.run import RunConfig
from asyncrl.control.lifecycle.pid_file import read_pids

NO_MODEL = {"kind": "fake", "num_slots": 8, "max_sequence_tokens": 16, "vocabulary_size": 8, "mean_tokens": 4.0,
            "token_latency_s": 0.02}  # fmt: skip
"""An engine for runs that are about something else: its generator starts with a third of the work, and holds no core after."""


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
        "supervision": {"stall_timeout_s": 60.0, "backoff_s": 0.1},
    }  # fmt: skip
    for path, value in overrides.items():
        table = settings
        *parents, last = path.split("__")
        for key in parents:
            table = table.setdefault(key, {})
        table[last] = value
    return settings


@pytest.fixture
def tiny(tmp_path: Path):
    """Make tiny configs: `tiny(buffer__max_staleness=0)`."""

    def make(**overrides: Any) -> RunConfig:
        return parse_config(tiny_settings(tmp_path, **overrides))

    return make


@pytest.fixture(autouse=True)
def no_process_left():
    """No test may leave a process behind; whatever is left is killed by pid, and the test fails.

    One that is on its way out has a few seconds; a helper of this process that was there before (multiprocessing's) is nobody's.
    """
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    yield
    children = set(psutil.Process(os.getpid()).children(recursive=True)) - before
    _, left = psutil.wait_procs(children, timeout=10)
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def recorded_pids():
    """Pids by process name, from the run's own record."""

    def read(run_folder: Path) -> dict[str, int]:
        return {name: record.pid for name, record in read_pids(run_folder).processes.items()}

    return read
