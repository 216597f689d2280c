"""Packs downloaded wheels into pieces small enough to carry by hand, and unpacks them where there is no registry.

    python scripts/gpu_bundle.py pack WHEELS FOLDER [--piece-mib 52] [--beside FILE ...]
    python scripts/gpu_bundle.py unpack FOLDER SITE

FOLDER holds `libraries.tar.xz.000`, `vllm.tar.xz.000`, `.001`, ... and `manifest.json`, with the length and SHA-256 of every piece; files
named by `--beside` are split the same way. The libraries come first, so that what needs no vLLM can run before vLLM is there. `unpack` joins what is there into SITE, a folder for PYTHONPATH. What the machine has installed already it
keeps: a library of ours never shadows one of its own. Exit code 3: pieces are missing, by name; 1: one is damaged.

The standard library alone, so that it runs on a bare machine. Called by bring_vllm.sh and gpu_check.sh.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import io
import json
import lzma
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

LIBRARIES, VLLM = "libraries.tar.xz", "vllm.tar.xz"
MANIFEST = "manifest.json"
LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C",  # 305 MB; a Hopper GPU takes FlashAttention 3, any other Triton's
    "vllm/_moe_C",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/_qutlass_C",
    "vllm/_flashmla_C",
    *(f"bitsandbytes/libbitsandbytes_{other}" for other in ("cuda11", "cuda12", "cuda132", "rocm", "xpu")),
)
"""What a dense model on one GPU with CUDA 13.0 never loads."""
COPY_BYTES = 1 << 20
EXIT_DAMAGED, EXIT_MISSING = 1, 3


class Pieces(io.RawIOBase):
    """Writes a run of bytes as numbered files of a limited size, and notes their sums."""

    def __init__(self, folder: Path, name: str, piece_bytes: int) -> None:
        self._folder, self._name, self._piece_bytes = folder, name, piece_bytes
        self._file: io.BufferedWriter | None = None
        self._sum = hashlib.sha256()
        self._left = 0
        self.written: list[dict[str, Any]] = []

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any) -> int:
        rest = memoryview(chunk).cast("B")
        while len(rest):
            if self._file is None or not self._left:
                self._file = self._begin()
            taken = rest[: self._left]
            self._file.write(taken)
            self._sum.update(taken)
            self._left -= len(taken)
            rest = rest[len(taken) :]
        return memoryview(chunk).nbytes

    def close(self) -> None:
        if not self.closed:
            self._end()
        super().close()

    def _begin(self) -> io.BufferedWriter:
        self._end()
        self._sum, self._left = hashlib.sha256(), self._piece_bytes
        return (self._folder / f"{self._name}.{len(self.written):03d}").open("wb")

    def _end(self) -> None:
        if self._file is None:
            return
        self._file.close()
        path = Path(self._file.name)
        self.written.append({"name": path.name, "num_bytes": path.stat().st_size, "sha256": self._sum.hexdigest()})
        self._file = None


def pack(wheels: Path, folder: Path, piece_bytes: int, beside: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Write the pieces of `wheels` and of the files `beside` into `folder`; return the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.[0-9][0-9][0-9]"), *folder.glob(MANIFEST)]:
        old.unlink()
    vllm = set(wheels.glob("vllm-*.whl"))
    parts = {LIBRARIES: set(wheels.glob("*.whl")) - vllm, VLLM: vllm}
    manifest = {name: _pack_wheels(sorted(part), Pieces(folder, name, piece_bytes)) for name, part in parts.items()}
    for path in beside:
        pieces = Pieces(folder, path.name, piece_bytes)
        with path.open("rb") as source, pieces:
            shutil.copyfileobj(source, pieces, COPY_BYTES)
        manifest[path.name] = pieces.written
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    return manifest


def _pack_wheels(wheels: list[Path], pieces: Pieces) -> list[dict[str, Any]]:
    with (
        pieces,
        lzma.open(cast("BinaryIO", pieces), "wb", preset=9) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w|") as archive,
    ):
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as members:
                for name, target in _installed_names(members.namelist()):
                    content = members.read(name)
                    entry = tarfile.TarInfo(f"{_normal(wheel.name.split('-')[0])}/{target}")
                    entry.size, entry.mode = len(content), 0o644
                    archive.addfile(entry, io.BytesIO(content))
    return pieces.written


def _installed_names(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield a wheel's files and where each belongs, without scripts and what is left out."""
    for name in names:
        parts = PurePosixPath(name).parts
        if name.endswith("/") or name.startswith(LEFT_OUT):
            continue
        if not parts[0].endswith(".data"):
            yield name, name
        elif parts[1] in {"purelib", "platlib"}:
            yield name, "/".join(parts[2:])


def unpack(folder: Path, site: Path) -> int:
    """Join and unpack every file whose pieces are all there; return the exit code."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    code = 0
    for name, pieces in manifest.items():
        missing = [piece["name"] for piece in pieces if not (folder / piece["name"]).is_file()]
        if missing:
            print(f"{name}: {len(pieces) - len(missing)} of {len(pieces)} pieces are in {folder}; bring {', '.join(missing)}")
            code = code or EXIT_MISSING
        elif damaged := [piece["name"] for piece in pieces if _sum_of(folder / piece["name"]) != piece["sha256"]]:
            print(f"{name}: {', '.join(damaged)} arrived damaged; bring it again")
            code = EXIT_DAMAGED
        else:
            _put_in_place(name, [folder / piece["name"] for piece in pieces], pieces, site)
    return code


def _put_in_place(name: str, paths: list[Path], pieces: list[dict[str, Any]], site: Path) -> None:
    """Unpack an archive, or join a file, unless these very pieces were put there before."""
    site.mkdir(parents=True, exist_ok=True)
    note, sums = site / f".{name}.sums", " ".join(piece["sha256"] for piece in pieces)
    if note.is_file() and note.read_text(encoding="utf-8") == sums:
        return
    if name in {LIBRARIES, VLLM}:
        _unpack_archive(paths, site)
    else:
        with (site / name).open("wb") as target:
            for path in paths:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, target, COPY_BYTES)
    note.write_text(sums, encoding="utf-8")


def _unpack_archive(paths: list[Path], site: Path) -> None:
    kept: dict[str, str] = {}
    brought: set[str] = set()
    with _Joined(paths) as joined, tarfile.open(fileobj=joined, mode="r|xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)  # Python 3.11.4 has it
        for entry in archive:
            distribution, _, entry.name = entry.name.partition("/")
            if distribution not in brought and distribution not in kept:
                own = _own_version(distribution, site)
                if own is None:
                    brought.add(distribution)
                else:
                    kept[distribution] = own
            if distribution in brought:
                archive.extract(entry, site)
    print(f"{len(brought)} libraries are in {site}")
    print("kept as they are here:", ", ".join(f"{name} {version}" for name, version in sorted(kept.items())) or "none")


class _Joined(io.RawIOBase):
    """Reads several files as one."""

    def __init__(self, paths: list[Path]) -> None:
        self._rest = list(paths)
        self._file: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while True:
            if self._file is None:
                if not self._rest:
                    return 0
                self._file = self._rest.pop(0).open("rb")
            if num_bytes := self._file.readinto(target):
                return num_bytes
            self._file.close()
            self._file = None


def _own_version(distribution: str, site: Path) -> str | None:
    """Return the version that this machine has installed itself, None where it has none."""
    elsewhere = [path for path in sys.path if Path(path).resolve() != site.resolve()]
    for found in importlib.metadata.distributions(name=distribution, path=elsewhere):
        return found.version
    return None


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Pack or unpack, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("wheels", type=Path)
    packing.add_argument("folder", type=Path)
    packing.add_argument("--piece-mib", type=int, default=52)
    packing.add_argument("--beside", type=Path, nargs="*", default=[])
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("site", type=Path)
    told = parser.parse_args()
    if told.command == "unpack":
        return unpack(told.folder, told.site)
    for name, pieces in pack(told.wheels, told.folder, told.piece_mib << 20, told.beside).items():
        print(f"{name}: {len(pieces)} pieces, {sum(piece['num_bytes'] for piece in pieces) / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
