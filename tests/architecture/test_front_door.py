"""The front door is light, and the map is what is on disk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_importing_the_cli_loads_no_heavy_library():
    heavy = ("torch", "transformers", "ray", "wandb", "aiohttp", "matplotlib")
    code = f"import sys, asyncrl.cli; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"


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


def test_the_architecture_page_lists_the_packages_on_disk():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"^  (\w+)/", page, flags=re.MULTILINE))
    on_disk = {path.parent.name for path in (ROOT / "asyncrl").glob("*/__init__.py")}
    assert on_disk <= listed, f"not in docs/architecture.md: {sorted(on_disk - listed)}"
