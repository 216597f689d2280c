"""New weights on their way to vLLM's workers: checked as a whole against the model folder, then described in a `LoadRequest`.

Requests and replies are JSON text, since no tensor travels by the workers' RPC. Bytes that already lie in a file that the
workers see are named, not copied. Others are written once into a file of our own, in memory where the machine has /dev/shm, or
in the folder that is shared with a server elsewhere; it is gone when the load is over. What a killed process left goes when the
next one of its machine writes there. Adapters (LoRA) travel alone; workers merge them into the base.

Invariant: nothing is sent to a worker before names, shapes and completeness are those of the model folder, and bytes verified.
Imports no vllm and no peft.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import torch

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import check_weights
from asyncrl.generate.vllm.checkpoint import FixedTensor, ModelFolder, Part
from asyncrl.models.layout import make_manifest
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.weights.tensors import DeferredTensors, MappedTensors

LORA_A, LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
_INPUT_FIRST = frozenset({"gpt2", "openai-gpt"})
"""Model types whose linear layers are stored as [in, out] (transformers' Conv1D)."""
_MEMORY = Path("/dev/shm")  # noqa: S108 - memory shared between processes; the file in it has a name of its own and mode 0600


class Base(msgspec.Struct, frozen=True):
    """What adapters are added to."""

    folder: str
    scale: float
    """Of the adapters' product: alpha / rank."""
    is_input_first: bool = False
    """Linear layers are stored as [in, out]."""


class FileSource(msgspec.Struct, frozen=True, tag="file"):
    """Load what lies in a file of this machine."""

    path: str
    offset: int
    """Bytes, of the layout in the file."""
    manifest: WeightsManifest


class ReceiverSource(msgspec.Struct, frozen=True, tag="receiver"):
    """Fetch it yourself; see `DeferredTensors`."""

    receiver: str
    arguments: str
    available: WeightsAvailable


class LoadRequest(msgspec.Struct, frozen=True):
    """Replace the weights."""

    source: FileSource | ReceiverSource
    also_as: dict[str, str] = {}
    """Name in the layout to another name that the same tensor is loaded under too (tied embeddings)."""
    parts: dict[str, tuple[Part, ...]] = {}
    """Name in the layout to what the checkpoint has instead, under other names or cut up; others are alike in both."""
    fixed: dict[str, FixedTensor] = {}
    """Loaded with the rest, by the checkpoint's names."""
    base: Base | None = None
    """Given where the tensors are adapters, which are added to it."""
    zero_kv: bool = False
    """The KV cache may hold what is not finite, and no request needs it any more."""


class LoadReply(msgspec.Struct, frozen=True):
    """How it went in one worker."""

    fault: Literal["", "broadcast", "generation"] = ""
    """`broadcast`: the bytes were gone or damaged. Either way the weights may be half of one version, half of another."""
    message: str = ""
    is_untouched: bool = False
    """It failed before anything was changed: the old weights are whole."""


@contextlib.asynccontextmanager
async def load_request_on_thread(
    tensors: Mapping[str, torch.Tensor], folder: ModelFolder, lora: LoRAConfig | None = None, shared_folder: str = ""
) -> AsyncIterator[LoadRequest]:
    """Do as `load_request` without holding up the event loop."""
    stack, loop = contextlib.ExitStack(), asyncio.get_running_loop()
    entering = loop.run_in_executor(None, stack.enter_context, load_request(tensors, folder, lora, shared_folder))
    try:
        yield await asyncio.shield(entering)
    finally:
        # Cancelled or not: what a thread has begun to write is there in a moment, and only then can it be removed.
        await asyncio.wait({entering})
        await asyncio.shield(loop.run_in_executor(None, stack.close))


@contextlib.contextmanager
def load_request(
    tensors: Mapping[str, torch.Tensor], folder: ModelFolder, lora: LoRAConfig | None = None, shared_folder: str = ""
) -> Iterator[LoadRequest]:
    """Describe a version for the workers; what the description names exists as long as the context lasts. Slow: use a thread.

    Args:
        tensors: As `Engine.load_weights` gets them.
        folder: The model's.
        lora: The learner's, where it has adapters: the tensors are those alone.
        shared_folder: Where workers of another machine find what is written; empty: they are on this one.

    Yields:
        The request.

    Raises:
        GenerationError: The tensors are not the whole of this model; tied ones differ, or the bytes cannot be written.
        BroadcastError: The bytes are damaged or were overwritten.
    """
    if isinstance(tensors, DeferredTensors):
        shapes = {entry.name: entry.shape for entry in tensors.available.manifest.entries}
    else:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if lora is None:
        own = folder.shapes | {name: tensor.shape for name, tensor in folder.fixed.items()}
        own |= {other: folder.shapes[original] for other, original in folder.tied.items()}
        others = {original: other for other, original in folder.tied.items()}
        check_weights(shapes, own, [(name, others[name]) if name in others else (name,) for name in folder.shapes])
    else:
        _check_adapters(shapes, folder, lora)
    for other, original in folder.tied.items():
        if {other, original} <= tensors.keys() and not torch.equal(tensors[other], tensors[original]):
            raise GenerationError(f"new weights: {original} and {other} are one tensor in this model but differ")
    with _source(tensors, shared_folder) as source:
        manifest = source.manifest if isinstance(source, FileSource) else source.available.manifest
        come = {entry.name for entry in manifest.entries} if lora is None else set(folder.shapes)
        pairs = {*folder.tied.items(), *((original, other) for other, original in folder.tied.items())}
        also_as = {name: other for name, other in pairs if name in come and other not in come}
        if lora is None:
            fixed = {name: tensor for name, tensor in folder.fixed.items() if name not in come}
            yield LoadRequest(source, also_as, folder.parts, fixed)
        else:
            base = Base(str(folder.path.resolve()), lora.alpha / lora.rank, folder.model_type in _INPUT_FIRST)
            yield LoadRequest(source, also_as, base=base)


def _check_adapters(shapes: Mapping[str, tuple[int, ...]], folder: ModelFolder, lora: LoRAConfig) -> None:
    """Refuse what is not the whole of the adapters: A [rank, in] and B [out, rank] of every layer, by the checkpoint's names."""
    own: dict[str, tuple[int, ...]] = {}
    layers = [
        name.removesuffix(".weight") for name, shape in folder.shapes.items() if len(shape) == 2 and name not in folder.parts
    ]
    for layer in layers:
        shape = folder.shapes[f"{layer}.weight"]
        outputs, inputs = reversed(shape) if folder.model_type in _INPUT_FIRST else shape
        own |= {layer + LORA_A: (lora.rank, inputs), layer + LORA_B: (outputs, lora.rank)}
    ends = tuple(f".{end}" for end in lora.target_modules)
    adapted = [layer for layer in layers if f".{layer}".endswith(ends) or {layer + LORA_A, layer + LORA_B} & shapes.keys()]
    check_weights(shapes, own, [(layer + part,) for layer in adapted for part in (LORA_A, LORA_B)])
    if not adapted:
        raise GenerationError("there are no new adapters; see learner.lora.target_modules")


def _sweep(where: Path, prefix: str) -> None:
    """Remove what killed processes of this machine left."""
    for path in where.glob(f"{prefix}*-*"):
        with contextlib.suppress(OSError, ValueError):  # in use, another user's, gone in this moment, or not ours
            pid, _ = path.name.removeprefix(prefix).split("-")
            # In a container that began anew a dead process may have had our number; one of another container holds its lock.
            if int(pid) == os.getpid() or not psutil.pid_exists(int(pid)):
                with path.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


@contextlib.contextmanager
def _source(tensors: Mapping[str, torch.Tensor], shared_folder: str) -> Iterator[FileSource | ReceiverSource]:
    """Say how to fetch the tensors or where they lie, or write them, tied ones once, into a file of our own."""
    if isinstance(tensors, DeferredTensors):
        yield ReceiverSource(tensors.receiver, tensors.arguments.decode(), tensors.available)
        return
    if isinstance(tensors, MappedTensors):
        manifest = tensors.manifest
        if tensors.path and (not shared_folder or Path(tensors.path).is_relative_to(shared_folder)):
            yield FileSource(tensors.path, tensors.offset, manifest)
            return
    else:
        manifest = make_manifest(tensors)
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > manifest.total_bytes
    where = Path(shared_folder or (_MEMORY if has_room else tempfile.gettempdir()))
    prefix = f"asyncrl-weights-{platform.node()}-"
    with contextlib.ExitStack() as stack:
        try:
            _sweep(where, prefix)
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=f"{prefix}{os.getpid()}-", dir=where))
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in manifest.entries:  # written, not mapped: of a file system that is full, a map would kill this process
                file.seek(entry.offset)
                file.write(tensors[entry.name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.truncate(manifest.total_bytes)
            file.flush()
            if shared_folder:
                os.fsync(file.fileno())
        except OSError as error:
            advice = "see generate.engine.shared_folder" if shared_folder else "or set broadcast.medium.kind = 'shared_memory'"
            raise GenerationError(
                f"{manifest.total_bytes} bytes of weights cannot be written to {where}: {error}; make room, {advice}"
            ) from error
        yield FileSource(file.name, 0, manifest)
