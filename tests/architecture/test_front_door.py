"""The front door and every process start light, and every command says what it does."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


NOBODYS = {"vllm", "ray", "wandb", "tensorboard", "matplotlib", "rich", "typer", "pandas", "scipy", "sklearn", "datasets", "trl",
           "torchvision", "torchao", "bitsandbytes", "reasoning_gym", "math_verify", "gguf", "peft"}  # fmt: skip
"""What no stage reads at its start: of use to some configs, at the end of a run, or to others."""
TORCH = {"torch", "sympy", "transformers", "accelerate"}
HEAVY = {
    "asyncrl.cli": (NOBODYS - {"typer", "rich"}) | TORCH | {"aiohttp", "numpy"},
    "asyncrl.pipeline": NOBODYS | TORCH | {"aiohttp"},
    "asyncrl.control.controller, asyncrl.buffer.open, asyncrl.observe.sinks": NOBODYS | TORCH,
    "asyncrl.learner.fake, asyncrl.generate.fake, asyncrl.algorithms.advantages": NOBODYS | TORCH,
    "asyncrl.control.tools.choices, asyncrl.replay.decisions": NOBODYS | TORCH,
    "asyncrl.reward.worker": NOBODYS | TORCH | {"aiohttp"},
    "asyncrl.generate.worker": NOBODYS | {"sympy", "transformers", "accelerate", "aiohttp"},
    "asyncrl.generate.transformers.engine, asyncrl.inference.worker, asyncrl.learner.worker": NOBODYS | {"aiohttp"},
}
"""By what a process imports before it does anything: what it must not, because everybody would wait for it at every start."""


@pytest.mark.parametrize("modules", HEAVY, ids=lambda modules: modules.partition(",")[0])
def test_a_process_starts_without_what_it_does_not_need(modules):
    code = f"import sys, {modules}; print(*sorted({HEAVY[modules]} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert answer.stdout.strip() == ""


def test_every_command_has_help():
    from typer.testing import CliRunner

    from asyncrl.cli import app

    runner = CliRunner()
    commands = [info.name or info.callback.__name__ for info in app.registered_commands]
    assert {"run", "resume", "status", "pause", "checkpoint", "drain", "stop", "inspect", "bench", "doctor"} <= set(commands)
    for command in commands:
        result = runner.invoke(app, [command, "--help"])
        assert result.exit_code == 0, command
        assert len(result.output.strip().splitlines()) > 3, command
