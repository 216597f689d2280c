"""New weights for vLLM's workers: checked as a whole against the model folder, then described in a `LoadRequest`.

Requests and replies are JSON text, since the workers' RPC carries no tensors. If the bytes are already in a file that the workers
can read, the request names the file. Otherwise they are written once into our own file: in memory if the machine has /dev/shm, or
in the folder shared with a server elsewhere. The file is removed after the load. Files of a killed process are removed when the
next process of its machine writes there (folders.py). Adapters (LoRA) are sent alone; workers merge them into the base.

Invariant: nothing is sent to a worker before names, shapes and completeness match the model folder and the bytes are verified.
Imports no vllm and no peft.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import torch

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.folders import OwnedFolder
from asyncrl.generate.engine import check_weights
from asyncrl.generate.vllm.checkpoint import FixedTensor, ModelFolder, Part
from asyncrl.models.layout import make_manifest
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest
from asyncrl.weights.tensors import DeferredTensors, MappedTensors

LORA_A, LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
_INPUT_FIRST = frozenset({"gpt2", "openai-gpt"})
"""Model types whose linear layers are stored as [in, out] (transformers' Conv1D)."""
_MEMORY = Path("/dev/shm")  # noqa: S108 - memory shared between processes; only this user can enter the folder made in it


class Base(msgspec.Struct, frozen=True):
    """The model that adapters are added to."""

    folder: str
    scale: float
    """Factor of the adapters' product: alpha / rank."""
    is_input_first: bool = False
    """Whether linear layers are stored as [in, out]."""


class FileSource(msgspec.Struct, frozen=True, tag="file"):
    """Load from a file of this machine."""

    path: str
    offset: int
    """Position of the layout in the file, in bytes."""
    manifest: WeightsManifest


class ReceiverSource(msgspec.Struct, frozen=True, tag="receiver"):
    """The worker fetches the tensors itself; see `DeferredTensors`."""

    receiver: str
    arguments: str
    available: WeightsAvailable


class LoadRequest(msgspec.Struct, frozen=True):
    """Replace the weights."""

    source: FileSource | ReceiverSource
    also_as: dict[str, str] = {}
    """Maps a name in the layout to a second name for the same tensor (tied embeddings)."""
    parts: dict[str, tuple[Part, ...]] = {}
    """Maps a name in the layout to the checkpoint's tensors for it, if they differ in name or are split."""
    fixed: dict[str, FixedTensor] = {}
    """Fixed tensors to load too, by the checkpoint's names."""
    base: Base | None = None
    """The base model, if the tensors are adapters."""
    zero_kv: bool = False
    """Whether to clear the KV cache: it may hold non-finite values, and no request needs it."""


class LoadReply(msgspec.Struct, frozen=True):
    """The result of a load in one worker."""

    fault: Literal["", "broadcast", "generation"] = ""
    """`broadcast`: the bytes were gone or damaged. For every kind the weights may be a mixture of two versions."""
    message: str = ""
    is_untouched: bool = False
    """It failed before any change: the old weights are complete."""


@contextlib.asynccontextmanager
async def load_request_on_thread(
    tensors: Mapping[str, torch.Tensor], folder: ModelFolder, lora: LoRAConfig | None = None, shared_folder: str = ""
) -> AsyncIterator[LoadRequest]:
    """Run `load_request` without blocking the event loop."""
    stack, loop = contextlib.ExitStack(), asyncio.get_running_loop()
    entering = loop.run_in_executor(None, stack.enter_context, load_request(tensors, folder, lora, shared_folder))
    try:
        yield await asyncio.shield(entering)
    finally:
        # Also if cancelled: a file that a thread is writing can be removed only when the thread is done.
        await asyncio.wait({entering})
        await asyncio.shield(loop.run_in_executor(None, stack.close))


@contextlib.contextmanager
def load_request(
    tensors: Mapping[str, torch.Tensor], folder: ModelFolder, lora: LoRAConfig | None = None, shared_folder: str = ""
) -> Iterator[LoadRequest]:
    """Describe a version for the workers; its files exist as long as the context. Slow: use a thread.

    Args:
        tensors: The tensors of `Engine.load_weights`.
        folder: The model's folder.
        lora: The learner's LoRA config, if it trains adapters: then the tensors are only the adapters.
        shared_folder: Folder for files for workers on another machine; empty: they are on this machine.

    Yields:
        The request.

    Raises:
        GenerationError: The tensors are incomplete for this model, tied ones differ, or the bytes cannot be written.
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
    """Refuse incomplete adapters: A [rank, in] and B [out, rank] of every layer are required, by the checkpoint's names."""
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


@contextlib.contextmanager
def _source(tensors: Mapping[str, torch.Tensor], shared_folder: str) -> Iterator[FileSource | ReceiverSource]:
    """Return how to fetch the tensors or where they are, or write them, tied ones once, into our own file."""
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
    prefix = f"asyncrl-weights@{platform.node()}@"  # leftovers of this machine only: not every file system has locks for several
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(OwnedFolder(prefix, where)).path / "weights"
            with path.open("xb") as file:  # written, not mapped: if the file system is full, a map would kill this process
                for entry in manifest.entries:
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
        yield FileSource(str(path), 0, manifest)
