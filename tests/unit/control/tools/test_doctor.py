import subprocess
import sys
import tomllib
from pathlib import Path

from asyncrl.control.tools.doctor import GIB, judge_memory, judge_mps, judge_packages, judge_python, judge_shared_memory


def test_findings_say_what_was_found_and_what_to_do():
    finding = judge_python((3, 10, 4))
    assert (finding.ok, finding.detail) == (False, "3.10.4")
    assert "3.11" in finding.advice
    assert judge_memory(20 * GIB, None).ok
    tight = judge_memory(20 * GIB, 2 * GIB)
    assert (tight.ok, tight.detail) == (False, "20.0 GiB available, container limit 2.0 GiB")
    assert not judge_shared_memory(Path("/no/such/folder")).ok
    assert judge_mps(has_gpu=False, running=[]).ok
    assert "nvidia-cuda-mps-control -d" in judge_mps(has_gpu=True, running=["bash"]).advice
    assert judge_mps(has_gpu=True, running=["nvidia-cuda-mps-control"]).ok


def test_packages_are_judged_against_what_the_metadata_asks_for():
    installed = {"torch": "2.13.0+cpu", "numpy": "1.9", "ray": "2.60.0", "trl": "1.17.0"}
    asked = [
        "torch>=2.8",
        "numpy>=2.0",
        'ray>=2.50; extra == "ray"',
        'trl==1.16.0; extra == "bench"',
        'wandb>=0.25; extra == "wandb"',
        'pytest>=9; extra == "dev"',
        'asyncrl[ray,tasks]; extra == "dev"',
    ]
    findings = {finding.name: finding for finding in judge_packages(asked, installed.get)}
    assert list(findings) == ["torch", "numpy", "ray", "trl", "wandb"]
    assert (findings["torch"].ok, findings["torch"].required) == (True, True)
    assert findings["numpy"].detail == "1.9 (wanted >=2.0)"
    assert (findings["ray"].ok, findings["ray"].required) == (True, False)
    assert (findings["trl"].ok, findings["trl"].detail) == (False, "1.17.0 (wanted ==1.16.0)")
    assert findings["wandb"].detail.startswith("not installed")
    assert "asyncrl[wandb]" in findings["wandb"].advice


def test_every_requirement_of_the_project_is_looked_at_and_extras_are_optional():
    project = tomllib.loads((Path(__file__).resolve().parents[4] / "pyproject.toml").read_text())["project"]
    extras = {extra: asked for extra, asked in project["optional-dependencies"].items() if extra != "dev"}
    asked = project["dependencies"] + [f'{each}; extra == "{extra}"' for extra, all_of in extras.items() for each in all_of]
    findings = {finding.name: finding for finding in judge_packages(asked, lambda _: None)}
    assert len(findings) == len(asked)
    assert {"bitsandbytes", "trl", "datasets", "ray"} <= {name for name, finding in findings.items() if not finding.required}
    assert findings["peft"].required


def test_looking_imports_nothing_heavy_here():
    looks = "import sys; from asyncrl.control.tools.doctor import judge_curve; found = judge_curve()"
    code = f"{looks}; print(found.ok, {{'torch', 'zmq'}} & set(sys.modules))"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.split() == ["True", "set()"]
