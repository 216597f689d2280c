"""Components on disk: one safetensors file each, written beside its name and renamed, read back through the page cache.

The file is written a tensor at a time, so spilling never needs the component's size a second time in host memory (safetensors'
own `save_file` does). Contents are the bytes of storages (`U8`), under the first name that lives on each. It is swap: not synced,
and gone with the run. Called by residency/tensors.py.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from asyncrl.errors import ResidencyError

PARTIAL = ".partial"
HEADER_ALIGNMENT = 8


def write_spill(path: Path, sizes: Mapping[str, int], contents: Iterable[torch.Tensor]) -> None:
    """Write a file whole or not at all.

    Args:
        path: Its name; a file already there is replaced.
        sizes: Bytes of each tensor by name.
        contents: The tensors in the same order, uint8, on the CPU; asked for one at a time.

    Raises:
        ResidencyError: The disk would not take it; nothing is left behind.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(_header(sizes))
            for tensor in contents:
                file.write(tensor.numpy().data)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ResidencyError(
            f"cannot write {sum(sizes.values()) / 2**30:.2f} GiB to {path}: {error.strerror or error}; make room there, or keep "
            'what is offloaded in host memory (placement.offload_to = "host")'
        ) from error


def read_spill(path: Path) -> dict[str, torch.Tensor]:
    """Return what `write_spill` wrote, memory-mapped: pages come from disk as they are read, none is copied."""
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the library's own reader is no dict
    except OSError as error:
        raise ResidencyError(
            f"cannot read {path} back: {error}; it belongs to the run that wrote it, so leave it there"
        ) from error


def _header(sizes: Mapping[str, int]) -> bytes:
    """Return the format's beginning: the header's length, then JSON, padded with spaces."""
    entries, start = {}, 0
    for name, size in sizes.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
