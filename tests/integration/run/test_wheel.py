"""What an installed wheel is: the same on every machine, with the shipped configs in it, usable from an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.integration.conftest import command_line

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the wheel is unpacked, and the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = built(ROOT, folder)
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site", wheel


def built(source: Path, folder: Path) -> Path:
    build = f"import hatchling.build as b; b.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


def asyncrl(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line(*arguments, cwd=folder, env={**os.environ, "PYTHONPATH": str(site)})


def test_the_wheel_is_pure_python_and_the_same_whenever_and_by_whomever_it_is_built(installed, tmp_path):
    assert installed[1].name.endswith("-py3-none-any.whl")
    (tmp_path / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "configs", "asyncrl"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tmp_path / "source" / name, **({"symlinks": True} if copy is shutil.copytree else {}))
    for number, path in enumerate((tmp_path / "source").rglob("*.*")):  # another checkout's times and modes
        os.utime(path, (number, 1e9 + number), follow_symlinks=False)
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert built(tmp_path / "source", tmp_path).read_bytes() == installed[1].read_bytes()


def test_the_page_is_in_the_wheel(installed):
    here, there = ROOT / "asyncrl" / "serve" / "page", installed[0] / "asyncrl" / "serve" / "page"
    files = {path.relative_to(here) for path in here.rglob("*") if path.is_file()}
    assert files == {path.relative_to(there) for path in there.rglob("*") if path.is_file()}
    assert Path("vendor/uPlot.LICENSE") in files
    assert (installed[0] / "asyncrl" / "py.typed").is_file(), (
        "type checkers read it; service/test_python_page.py says what they find"
    )


def test_a_shipped_config_runs_by_name_from_an_empty_folder(installed, tmp_path):
    small = ["num_steps=2", "model.warm_start.steps=2", "eval.num_prompts=8", "algorithm.groups_per_step=2"]
    settings = [part for value in small for part in ("--set", value)]
    ran = asyncrl(installed[0], tmp_path, "run", "quickstart", "algorithms/gspo", *settings, "--plain")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert (tmp_path / "runs" / "quickstart" / "checkpoints" / "step-000002").is_dir()


def test_data_that_comes_with_a_shipped_config_is_found(installed, tmp_path):
    said = asyncrl(installed[0], tmp_path, "run", "preferences", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert str(installed[0]) in said.stdout


def test_init_writes_a_config_to_change_and_never_over_one(installed, tmp_path):
    assert asyncrl(installed[0], tmp_path, "init", "mine").returncode == 0
    assert asyncrl(installed[0], tmp_path, "run", "mine/quickstart.toml", "--dry-run").returncode == 0
    again = asyncrl(installed[0], tmp_path, "init", "mine")
    assert again.returncode == 2
    assert "is there already" in again.stderr
