import os
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.control.tools import doctor
from asyncrl.control.tools.doctor import Finding, judge_packages
from asyncrl.reward.sandbox import bubblewrap

REFUSED = "bwrap: No permissions to create new namespace"
BWRAP = f"""#!/bin/sh
if [ "$1" = --help ]; then echo "--size BYTES"; else echo "{REFUSED}" >&2; exit 1; fi
"""


@pytest.fixture
def stubs():
    """A folder for the PATH, outside of pytest's, into which another user cannot look."""
    with tempfile.TemporaryDirectory() as name:
        bubblewrap._bubblewrap_help.cache_clear()
        yield Path(name)
    bubblewrap._bubblewrap_help.cache_clear()


@pytest.mark.parametrize("mode", [0o755, 0o700], ids=["refuses_namespaces", "cannot_be_reached_by_nobody"])
def test_a_bubblewrap_that_fails_is_one_line_that_says_why_and_what_comes_after_is_looked_at(stubs, monkeypatch, mode):
    (stubs / "bwrap").write_text(BWRAP)
    (stubs / "bwrap").chmod(0o755)
    stubs.chmod(mode)
    monkeypatch.setenv("PATH", str(stubs))
    monkeypatch.setattr(sys, "executable", "/bin/false")  # torch and vLLM, asked in processes of their own, are not the question
    said = CliRunner().invoke(app, ["doctor"])
    assert said.exit_code == 1, said.output  # torch is missing
    lines = said.output.splitlines()
    (line,) = [number for number, text in enumerate(lines) if text.startswith("MISS sandbox")]
    reached = mode == 0o755 or os.geteuid() != 0
    assert (REFUSED if reached else "Permission denied") in lines[line]
    assert "only the code_exec reward needs it" in lines[line + 1]
    after = [text.split()[1] for text in lines[line + 2 :] if text.startswith(("ok  ", "MISS"))]
    assert after[0] == "mps"
    assert {"torch", "msgspec"} <= set(after)


def test_the_doctor_ends_with_1_where_something_required_is_missing(monkeypatch):
    for found, status in (
        (Finding("open files", ok=False, detail="64"), 1),
        (Finding("mps", ok=False, detail="", required=False), 0),
    ):
        monkeypatch.setattr(doctor, "diagnose", lambda found=found: [found])
        assert CliRunner().invoke(app, ["doctor"]).exit_code == status


def test_packages_are_judged_against_what_the_metadata_asks_for():
    installed = {"torch": "2.13.0+cpu", "numpy": "1.9", "ray": "2.60.0", "trl": "1.17.0"}
    asked = [
        "torch>=2.8", "numpy>=2.0", 'ray>=2.50; extra == "ray"', 'trl==1.16.0; extra == "bench"', 'wandb>=0.25; extra == "wandb"',
        'pytest>=9; extra == "dev"', 'asyncrl[ray,tasks]; extra == "dev"',
    ]  # fmt: skip
    findings = {finding.name: finding for finding in judge_packages(asked, installed.get)}
    assert list(findings) == ["torch", "numpy", "ray", "trl", "wandb"]
    assert (findings["torch"].ok, findings["torch"].required) == (True, True)
    assert findings["numpy"].detail == "1.9 (wanted >=2.0)"
    assert (findings["ray"].ok, findings["ray"].required) == (True, False)
    assert (findings["trl"].ok, findings["trl"].detail) == (False, "1.17.0 (wanted ==1.16.0)")
    assert findings["wandb"].detail.startswith("not installed")
    assert "asyncrl[wandb]" in findings["wandb"].advice
