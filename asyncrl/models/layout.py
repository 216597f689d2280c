"""The flat layout of a version: named tensors as one block of bytes, and views of them without a copy.

Invariants:
- Every tensor starts at a multiple of 64 bytes; the gaps are zero, so equal tensors have equal bytes and equal fingerprints.
- Tensors that share their memory (tied embeddings) are in the layout once, under the first of their names.
- The layout depends only on names, shapes, order and dtypes: every version of a run has the same layout.
- A bucket is a sequence of complete tensors that are hashed, sent and applied together.

torch copies element by element through the caches; the C library's memmove bypasses them for large copies (it sets the limit) and
takes half the time. So tensors of equal dtype are copied by memmove.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, Literal, TypeGuard

import numpy as np
import torch

from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import TensorEntry, WeightsManifest

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ALIGNMENT_BYTES = 64
COPY_THREADS = max(1, min(4, os.cpu_count() or 1))
"""More threads do not copy faster: two to four use the full memory bandwidth of one processor."""
LEAST_BYTES_FOR_THREADS = 8 << 20
"""Smaller copies finish before threads would start."""

SendDType = Literal["model", "float32", "bfloat16"]

DTYPE_OF_NAME = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}


def make_manifest(
    tensors: Mapping[str, torch.Tensor], dtype: SendDType = "model", bucket_bytes: int = 64 << 20
) -> WeightsManifest:
    """Make the layout of `tensors` in their order, with tied tensors once.

    Args:
        tensors: Name to tensor, any device and strides, as in the model's state dict.
        dtype: Dtype in which floating-point tensors are sent; `model`: unchanged. Other tensors keep their dtype.
        bucket_bytes: See `WeightsManifest`.

    Returns:
        The manifest.

    Raises:
        BroadcastError: There is no tensor, or a tensor's dtype has no name in safetensors.
    """
    entries: list[TensorEntry] = []
    seen: set[tuple[object, ...]] = set()
    offset = 0
    for name, tensor in tensors.items():
        here = tensor.to_local() if is_divided(tensor) else tensor
        place = (here.device, here.untyped_storage().data_ptr(), here.storage_offset())
        identity = (*place, tuple(here.shape), here.stride(), here.dtype, tuple(tensor.shape))  # of the very same elements
        if identity in seen:
            continue
        if tensor.numel():
            seen.add(identity)
        own: torch.dtype = tensor.dtype
        if own not in NAME_OF_DTYPE:
            raise BroadcastError(f"tensor {name!r} has dtype {own}, which cannot be sent; known are {', '.join(DTYPE_OF_NAME)}")
        sent_as = own if dtype == "model" or not own.is_floating_point else DTYPE_OF_NAME["F32" if dtype == "float32" else "BF16"]
        num_bytes = tensor.numel() * sent_as.itemsize
        entries.append(TensorEntry(name, tuple(tensor.shape), NAME_OF_DTYPE[sent_as], offset, num_bytes))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not offset:
        raise BroadcastError("there are no weights to publish: the model has no tensors")
    return WeightsManifest(tuple(entries), offset, bucket_bytes)


def bucket_ends(manifest: WeightsManifest) -> tuple[int, ...]:
    """Return the end offset of each bucket, gaps included; the last is `total_bytes`.

    A bucket ends with the first tensor that makes it reach `bucket_bytes`, so a bucket may be larger.
    """
    ends: list[int] = []
    start = 0
    following = [entry.offset for entry in manifest.entries[1:]] + [manifest.total_bytes]
    for end in following:
        if end > start and (end - start >= manifest.bucket_bytes or end == manifest.total_bytes):
            ends.append(end)
            start = end
    return tuple(ends)


def view_tensors(flat: torch.Tensor, manifest: WeightsManifest) -> dict[str, torch.Tensor]:
    """Return the tensors in `flat`, as views of its memory.

    Args:
        flat: uint8 [manifest.total_bytes], contiguous.
        manifest: Its layout.

    Raises:
        BroadcastError: The manifest does not describe `flat`.
    """
    check_manifest(manifest)
    if flat.numel() != manifest.total_bytes:
        raise BroadcastError(f"the buffer has {flat.numel()} bytes, the manifest describes {manifest.total_bytes}")
    return {
        entry.name: flat[entry.offset : entry.offset + entry.num_bytes].view(DTYPE_OF_NAME[entry.dtype]).view(entry.shape)
        for entry in manifest.entries
    }


def check_manifest(manifest: WeightsManifest) -> None:
    """Refuse a received manifest whose entries overlap, exceed the buffer or contradict themselves.

    Raises:
        BroadcastError: The message names the first such entry.
    """
    if not manifest.entries:
        raise BroadcastError("the manifest names no tensor")
    end = 0
    for entry in manifest.entries:
        dtype = DTYPE_OF_NAME.get(entry.dtype)
        if dtype is None:
            raise BroadcastError(f"tensor {entry.name!r} has dtype {entry.dtype!r}; known are {', '.join(DTYPE_OF_NAME)}")
        fits = min(entry.shape, default=0) >= 0 and entry.num_bytes == prod(entry.shape) * dtype.itemsize
        if not fits or entry.offset % ALIGNMENT_BYTES or entry.offset < end:
            raise BroadcastError(
                f"tensor {entry.name!r} (shape {entry.shape}, {entry.dtype}, {entry.num_bytes} bytes at {entry.offset}) has "
                f"inconsistent numbers, or overlaps the tensor that ends at {end}"
            )
        end = entry.offset + entry.num_bytes
    if end > manifest.total_bytes:
        raise BroadcastError(f"the last tensor ends at {end}, the layout at {manifest.total_bytes}")


def check_tensors(tensors: Mapping[str, torch.Tensor], manifest: WeightsManifest) -> None:
    """Check that `tensors` can be copied into the layout.

    Raises:
        BroadcastError: One is missing or has another shape than when the layout was made.
    """
    for entry in manifest.entries:
        tensor = tensors.get(entry.name)
        if tensor is None:
            raise BroadcastError(f"tensor {entry.name!r} is in the layout of this run and not among those to publish")
        if tuple(tensor.shape) != entry.shape:
            raise BroadcastError(
                f"tensor {entry.name!r} has shape {tuple(tensor.shape)}; the layout of this run has {entry.shape}"
            )


def copy_out(tensors: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the views of a flat buffer and cast them; several at once into host memory.

    Args:
        tensors: Tensors that `check_tensors` accepted.
        views: The buffer's `view_tensors`, in the order of the layout.
    """
    is_on_host = all(view.device.type == "cpu" for view in views.values())
    if not any(map(is_divided, tensors.values())):
        if is_on_host:
            copy_tensors((tensors[name], view) for name, view in views.items())
        else:  # one call: for small tensors, a Python call each would take longer than the copy
            with torch.no_grad():
                torch._foreach_copy_(list(views.values()), [tensors[name] for name in views])
        return
    with torch.no_grad():
        for name, view in views.items():  # in order, on the caller's stream; only one gathered tensor is in memory
            source = tensors[name]
            copy_tensor(source.full_tensor() if is_divided(source) else source, view)


def copy_tensor(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` into `target`, of the same shape, changing dtype and device if they differ; keeps no graph."""
    alike = (source.dtype, source.shape) == (target.dtype, target.shape) and source.is_contiguous() and target.is_contiguous()
    if alike and source.device.type == target.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        with torch.no_grad():
            target.copy_(source)


def copy_tensors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each (source, target), several at once if they are large enough; targets must not overlap."""
    pairs = sorted(pairs, key=lambda pair: -pair[1].nbytes)
    if sum(target.nbytes for _, target in pairs) < LEAST_BYTES_FOR_THREADS:
        for source, target in pairs:
            copy_tensor(source, target)
        return
    left = iter(pairs)

    def work(_: int) -> None:
        for source, target in left:  # of one iterator: a future for each pair would take a third of the time
            copy_tensor(source, target)

    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="asyncrl-copy") as pool:
        for _ in pool.map(work, range(COPY_THREADS)):
            pass


def bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the memory of a contiguous tensor on the CPU."""
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def is_divided(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether the tensor is divided over ranks.

    If DTensor was not imported there are none; importing it (and sympy) would take half as long again as importing torch.
    """
    # While another thread imports the module, it exists without its contents.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
