"""What a user's type checker sees of the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import asyncrl

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".mypy_cache" / "user"
MYPY = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-site-packages"]
"""Of other packages nothing is read: a minute's work, and of no use here."""

NAMES = """RunLostError SystemClock ids_to_bytes ids_from_bytes logprobs_to_bytes logprobs_from_bytes mask_from_bytes
    Run Server Session connect load_config parse_config"""
USER = f"""
import asyncrl
from asyncrl import ({", ".join(NAMES.split())})

async def main() -> None:
    async with Run({{"name": "x"}}, overrides={{"seed": 1}}) as run:
        async for step in run.steps():
            reveal_type(step.reward_mean)

asyncrl.nope
"""


def test_a_strict_type_checker_knows_the_exported_names_and_no_others(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    told = subprocess.run(
        [*MYPY, "--cache-dir", str(CACHE), "user.py"],
        capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)},
    )  # fmt: skip
    errors = [line for line in told.stdout.splitlines() if ": error:" in line]
    assert errors == ['user.py:10: error: Module has no attribute "nope"  [attr-defined]'], told.stdout + told.stderr
    assert 'Revealed type is "float"' in told.stdout or "builtins.float" in told.stdout


def test_the_package_lists_what_it_exports():
    code = "import asyncrl as a; [getattr(a, n) for n in a.__all__]; "
    code += f"print(set(dir(a)) >= {{*a.__all__, '__version__', *{NAMES.split()}}})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert told.stdout == "True\n"


def test_a_name_that_the_package_has_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'asyncrl' has no attribute 'nope'"):
        asyncrl.nope  # noqa: B018 - looking it up is the test
