"""`dtype = "auto"`: bfloat16 if the processor multiplies it in hardware, else float32. The same rule for learner and engine.

A bfloat16 learner keeps float32 masters (learner/optim/master_weights.py). No torch: configs are resolved before its import.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from asyncrl.config.generate import gpu_of

_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags of x86; `bf16` is ARM's."""
_LEAST_CAPABILITY = (8, 0)
"""Ampere."""


def hardware_format(device: str) -> tuple[str, str]:
    """Return the faster dtype of a device, bfloat16 or float32, and the reason."""
    gpu = gpu_of(device)
    if gpu is None:
        cpuinfo = Path("/proc/cpuinfo")
        return format_of_cpu(cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else "")
    return format_of_gpu(ask_driver("compute_cap", gpu))


def ask_driver(query: str, gpu: int | None = None) -> str:
    """Return nvidia-smi's answer for a GPU, by torch's number, or for all GPUs, one line each; empty if there is no answer."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return ""
    of_one = []
    if gpu is not None:
        # CUDA_VISIBLE_DEVICES renumbers the GPUs that it names. nvidia-smi does not accept some of its forms (a part of a UUID, a
        # MIG device): then torch's number is used.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        named = visible[gpu].strip() if gpu < len(visible) else ""
        of_one = [f"--id={named if re.fullmatch(r'[0-9]+|GPU-[0-9a-f-]{36}', named) else gpu}"]
    command = [tool, *of_one, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603 - ours
    except subprocess.TimeoutExpired:
        return ""
    return "" if done.returncode else done.stdout.strip()


def format_of_cpu(cpuinfo: str) -> tuple[str, str]:
    """Return the dtype for the CPU that `/proc/cpuinfo` describes, and the reason."""
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    found = [flag for flag in _CPU_FLAGS if lines and flag in lines[0]]
    if found:
        return "bfloat16", f"the CPU multiplies it in hardware ({found[0]})"
    return "float32", "the CPU does not multiply bfloat16 in hardware (no AMX, no AVX512-BF16)"


def format_of_gpu(capability: str) -> tuple[str, str]:
    """Return the dtype for a GPU of this compute capability ("9.0", as from nvidia-smi), and the reason."""
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return "float32", "nvidia-smi does not say what the GPU can do"
    if (int(major), int(minor)) >= _LEAST_CAPABILITY:
        return "bfloat16", f"the GPU multiplies it in hardware (compute capability {capability})"
    return "float32", f"the GPU does not multiply bfloat16 in hardware (compute capability {capability}, 8.0 is the first)"
