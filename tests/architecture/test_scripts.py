"""The scripts and experiments beside the package: shell parses, imports are there, and what one packs the other unpacks."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FILES = {
    "mylib/__init__.py": b"VALUE = 7\n", "mylib-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: mylib\nVersion: 1.0\n",
    "mylib-1.0.data/purelib/mylib/more.py": b"MORE = 8\n", "mylib-1.0.data/scripts/tool": b"#!/bin/sh\n",
    "vllm/_moe_C.abi3.so": b"left out", "mylib/noise.bin": os.urandom(300_000),
}  # fmt: skip


def bundle(*arguments):
    command = [sys.executable, str(SCRIPTS / "gpu_bundle.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def packed(tmp_path):
    """A folder of pieces, made of a wheel of our own, one of a library that is installed here, and a file beside them."""
    wheels, folder = tmp_path / "wheels", tmp_path / "bundle"
    wheels.mkdir()
    for name, files in {"mylib": FILES, "msgspec": {"msgspec/__init__.py": b"shadow"}}.items():
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for path, content in files.items():
                wheel.writestr(path, content)
    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 8192)
    done = bundle("pack", wheels, folder, "--piece-mib", "1", "--beside", tmp_path / "model.gguf")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_the_shell_parses(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_is_packed_is_unpacked_shadows_nothing_installed_and_pieces_that_are_missing_or_damaged_are_named(packed, tmp_path):
    pieces, site = json.loads((packed / "manifest.json").read_text())["model.gguf"], tmp_path / "site"
    assert [piece["num_bytes"] for piece in pieces] == [1 << 20, 1 << 20]
    done, kept, first = bundle("unpack", packed, site), (packed / "model.gguf.001").read_bytes(), tmp_path / "first"
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"1 libraries are in", "msgspec"} <= set(re.findall("1 libraries are in|msgspec", done.stdout))
    assert not {"msgspec", "vllm"} & {path.name for path in site.iterdir()}
    assert (site / "mylib" / "noise.bin").read_bytes() == FILES["mylib/noise.bin"]
    assert (site / "mylib" / "more.py").read_bytes() == b"MORE = 8\n"
    assert (site / "model.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    (packed / "model.gguf.001").unlink()
    missing = bundle("unpack", packed, first)
    assert (missing.returncode, (first / "mylib").is_dir()) == (3, True)
    assert re.search(r"1 of 2 pieces(.|\n)*bring model.gguf.001", missing.stdout), missing.stdout
    (packed / "model.gguf.001").write_bytes(kept[:-1] + b"?")
    damaged = bundle("unpack", packed, first)
    assert (damaged.returncode, "model.gguf.001 arrived damaged" in damaged.stdout) == (1, True)


def test_what_experiments_import_of_the_package_is_there():
    """The type checker says more, but is no part of the tests (`make check`)."""
    missing = []
    for path in sorted((SCRIPTS.parent / "experiments").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"asyncrl", "benchmarks"}:
                module = importlib.import_module(str(node.module))
                missing += [f"{path}: {node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
    assert missing == []


def test_a_gpu_machine_without_a_registry_gets_every_library_that_the_package_needs():
    told = (SCRIPTS / "gpu_requirements.txt").read_text(encoding="utf-8")
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[<>=\[]", line)[0] for line in project["dependencies"]}
    brought = {line.partition("==")[0] for line in told.splitlines() if not line.startswith("#")}
    there = set(re.findall(r"[a-z][a-z0-9-]+", "".join(line for line in told.splitlines() if line.startswith("#"))))
    assert needed <= brought | there
