"""What an installed wheel is: the same on every machine, with the shipped configs in it, usable from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

import pytest

import asyncrl
from asyncrl.serve.pages import TYPES
from tests.architecture.test_types import NAMES
from tests.integration.service.test_python_page import PROGRAMS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "asyncrl" / "serve" / "page"
USER = f"""
import asyncrl
from asyncrl import ({", ".join(NAMES.split())})

async def main() -> None:
    async with Run({{"name": "x"}}, overrides={{"seed": 1}}) as run:
        async for step in run.steps():
            reveal_type(step.reward_mean)

asyncrl.nope
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel):
    """The folder of commands of a venv into which pip has installed the wheel; what it depends on is borrowed from ours."""
    folder = wheel.parent / "venv"
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names has its own .pth files left alone, so that the checkout stays unknown.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def built(source: Path, folder: Path) -> Path:
    """Build as `python -m build --wheel` does, which calls this function in a venv of its own."""
    build = f"import hatchling.build as b; b.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


def bare() -> dict[str, str]:
    """The environment without what tells Python of other packages, or not to keep back what is printed."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MYPYPATH"))}


def command(installed: Path, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the installed `asyncrl` in a folder."""
    own = [installed / "asyncrl", *map(str, words)]
    return subprocess.run(own, cwd=folder, env=bare(), capture_output=True, text=True, timeout=200, check=False)


def test_the_wheel_is_pure_python_and_the_same_whenever_and_by_whomever_it_is_built(wheel, tmp_path):
    assert wheel.name.endswith("-py3-none-any.whl")
    (tmp_path / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tmp_path / "source" / name)
    for name in ("configs", "asyncrl"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for number, path in enumerate((tmp_path / "source").rglob("*.*")):  # another checkout's times and modes
        os.utime(path, (number, 1e9 + number), follow_symlinks=False)
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert built(tmp_path / "source", tmp_path).read_bytes() == wheel.read_bytes()


def test_its_types_hold_strictly_in_the_programs_of_the_docs_and_no_name_that_is_not_exported_is_known(installed, tmp_path):
    assert len(PROGRAMS) == 4
    for number, text in enumerate(PROGRAMS):
        (tmp_path / f"program_{number}.py").write_text(text)
    (tmp_path / "user.py").write_text(USER)
    # Of what these programs do not touch nothing is read: a minute's work.
    untouched = "[mypy-torch.*,transformers.*,openai.*,peft.*,safetensors.*,numpy.*,matplotlib.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\nfollow_imports = silent\n{untouched}")
    cache = ROOT / ".mypy_cache" / "user"  # a quarter of a minute the first time, seconds from then on
    mypy = [sys.executable, "-m", "mypy", "--python-executable", installed / "python", "--config-file", "mypy.ini"]
    mypy += ["--cache-dir", cache, *tmp_path.glob("*.py")]
    checked = subprocess.run(mypy, capture_output=True, text=True, check=False, cwd=tmp_path, env=bare())
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert errors == ['user.py:10: error: Module has no attribute "nope"  [attr-defined]'], checked.stdout + checked.stderr
    assert 'Revealed type is "float"' in checked.stdout or "builtins.float" in checked.stdout


def test_a_shipped_config_runs_by_name_from_an_empty_folder_and_the_page_shows_the_run(installed, tmp_path):
    assert command(installed, tmp_path, "--version").stdout == f"{asyncrl.__version__}\n"
    small = ["num_steps=2", "model.warm_start.steps=2", "eval.num_prompts=8", "algorithm.groups_per_step=2"]
    settings = [part for value in small for part in ("--set", value)]
    ran = command(installed, tmp_path, "run", "quickstart", "algorithms/gspo", *settings, "--plain")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert (tmp_path / "runs" / "quickstart" / "checkpoints" / "step-000002").is_dir()
    asked = [installed / "asyncrl", "view", "runs/quickstart"]
    with subprocess.Popen(asked, cwd=tmp_path, env=bare(), stdout=subprocess.PIPE, text=True) as viewer:
        try:
            page = viewer.stdout.readline().partition("#")[0]
            names = {str(path.relative_to(PAGE)) for path in PAGE.rglob("*") if path.suffix in TYPES}
            assert {"index.html", "page.js", "vendor/uPlot.LICENSE"} <= names
            for name in names:
                where = "" if name == "index.html" else f"page/{name}"
                with urllib.request.urlopen(page + where, timeout=60) as answer:
                    assert answer.read() == (PAGE / name).read_bytes()
        finally:
            viewer.terminate()
        assert viewer.wait(60) == 0


def test_init_writes_a_config_to_change_and_never_over_one_and_data_of_a_shipped_config_is_found(installed, tmp_path):
    assert command(installed, tmp_path, "init", "mine").returncode == 0
    assert command(installed, tmp_path, "run", "mine/quickstart.toml", "--dry-run").returncode == 0
    again = command(installed, tmp_path, "init", "mine")
    assert again.returncode == 2
    assert "is there already" in again.stderr
    said = command(installed, tmp_path, "run", "preferences", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert str(installed.parent) in said.stdout
