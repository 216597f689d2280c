"""New weights on their way to vLLM's workers: checked as a whole against the model folder, then described in a `LoadRequest`.

Requests and replies are JSON text, since no tensor travels by the workers' RPC. Bytes that already lie in a file that the
workers see are named, not copied. Others are written once into a file of our own, in memory where the machine has /dev/shm, or
in the folder that is shared with a server elsewhere; it is gone when the load is over. Adapters (LoRA) travel alone; workers
merge them into the base.

Invariant: nothing is sent to a worker before names, shapes and completeness are those of the model folder, and bytes verified.
Imports no vllm and no peft.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
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
    """The model's."""
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
    is_touched: bool = True
    """False: it went wrong before anything was changed."""


def fault_of(replies: Sequence[LoadReply]) -> LoadReply | None:
    """Return the first worker's fault, or None; the model is untouched only if it is in every worker."""
    if not replies:
        return LoadReply("generation", "no worker answered")
    fault = next((reply for reply in replies if reply.fault), None)
    is_touched = any(reply.is_touched or not reply.fault for reply in replies)
    return None if fault is None else msgspec.structs.replace(fault, is_touched=is_touched)


@contextlib.asynccontextmanager
async def load_request_on_thread(
    tensors: Mapping[str, torch.Tensor], folder: ModelFolder, lora: LoRAConfig | None = None, shared_folder: str = ""
) -> AsyncIterator[LoadRequest]:
    """Do as `load_request` without holding up the event loop."""
    stack = contextlib.ExitStack()
    try:
        yield await asyncio.to_thread(stack.enter_context, load_request(tensors, folder, lora, shared_folder))
    finally:
        await asyncio.to_thread(stack.close)


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
        manifest = tensors.available.manifest
        _check({entry.name: entry.shape for entry in manifest.entries}, folder, lora)
        source = ReceiverSource(tensors.receiver, tensors.arguments.decode(), tensors.available)
        yield _describe(source, manifest, folder, lora)
        return
    _check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder, lora)
    for other, original in folder.tied.items():
        if other in tensors and original in tensors and not torch.equal(tensors[other], tensors[original]):
            raise GenerationError(f"new weights: {original} and {other} are one tensor in this model but differ")
    with _in_a_file(tensors, shared_folder) as file:
        yield _describe(file, file.manifest, folder, lora)


def _check(shapes: Mapping[str, tuple[int, ...]], folder: ModelFolder, lora: LoRAConfig | None) -> None:
    """Refuse weights that are not the whole of this model, or of its adapters; of tied names one is enough."""
    if lora is not None:
        check_adapters(shapes, folder, lora)
        return
    own = {**folder.shapes, **{name: tensor.shape for name, tensor in folder.fixed.items()}}
    own |= {other: folder.shapes[original] for other, original in folder.tied.items()}
    others = {original: other for other, original in folder.tied.items()}
    check_weights(shapes, own, [(name, others[name]) if name in others else (name,) for name in folder.shapes])


def _describe(
    source: FileSource | ReceiverSource, manifest: WeightsManifest, folder: ModelFolder, lora: LoRAConfig | None
) -> LoadRequest:
    come = {entry.name for entry in manifest.entries} if lora is None else set(folder.shapes)
    pairs = {*folder.tied.items(), *((original, other) for other, original in folder.tied.items())}
    also_as = {name: other for name, other in pairs if name in come and other not in come}
    if lora is not None:
        base = Base(str(folder.path.resolve()), lora.alpha / lora.rank, folder.model_type in _INPUT_FIRST)
        return LoadRequest(source, also_as, base=base)
    fixed = {name: tensor for name, tensor in folder.fixed.items() if name not in come}
    return LoadRequest(source, also_as, folder.parts, fixed)


@contextlib.contextmanager
def _in_a_file(tensors: Mapping[str, torch.Tensor], shared_folder: str) -> Iterator[FileSource]:
    """Say where the tensors lie, or write them, tied ones once, into a file of our own."""
    if isinstance(tensors, MappedTensors):
        is_seen = bool(tensors.path) and (not shared_folder or Path(tensors.path).is_relative_to(shared_folder))
        if is_seen:
            yield FileSource(tensors.path, tensors.offset, tensors.manifest)
            return
    manifest = tensors.manifest if isinstance(tensors, MappedTensors) else make_manifest(tensors)
    where = Path(shared_folder) if shared_folder else _roomy_folder(manifest.total_bytes)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="asyncrl-weights-", dir=where))
            for entry in manifest.entries:  # written, not mapped: of a file system that is full, a map would kill this process
                file.seek(entry.offset)
                file.write(tensors[entry.name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.truncate(manifest.total_bytes)
            file.flush()
            if shared_folder:
                os.fsync(file.fileno())
        except OSError as error:
            raise GenerationError(
                f"{manifest.total_bytes} bytes of weights cannot be written to {where}"
                f"{' (generate.engine.shared_folder)' if shared_folder else ''}: {error}"
            ) from error
        yield FileSource(file.name, 0, manifest)


def _roomy_folder(num_bytes: int) -> Path:
    folders = [_MEMORY, Path(tempfile.gettempdir())]
    for folder in folders:
        if folder.is_dir() and shutil.disk_usage(folder).free > num_bytes:
            return folder
    raise GenerationError(
        f"there is no room for {num_bytes} bytes of weights on their way to vLLM in {' or '.join(map(str, folders))}: "
        f"make room, or use a medium whose bytes lie in a file (broadcast.medium.kind = 'shared_memory')"
    )


def check_adapters(shapes: Mapping[str, tuple[int, ...]], folder: ModelFolder, lora: LoRAConfig) -> None:
    """Refuse what is not the whole of the adapters.

    Args:
        shapes: Of the new tensors, by name.
        folder: The base's.
        lora: The learner's.

    Raises:
        GenerationError: A tensor belongs to no layer of the base, or to one that its checkpoint has under another name; lacks its
            partner, or has another shape; or a layer that `target_modules` names has no adapters.
    """
    expected: dict[str, tuple[int, ...]] = {}
    layers = {name.removesuffix(LORA_A).removesuffix(LORA_B) for name in shapes}
    if elsewhere := sorted(layer for layer in layers if f"{layer}.weight" in folder.parts):
        raise GenerationError(
            f"the checkpoint has {elsewhere[0]} under another name, where adapters are not merged: leave it out of "
            "learner.lora.target_modules"
        )
    for layer in layers:
        shape = folder.shapes.get(f"{layer}.weight", ())
        if len(shape) == 2:
            outputs, inputs = reversed(shape) if folder.model_type in _INPUT_FIRST else shape
            expected |= {layer + LORA_A: (lora.rank, inputs), layer + LORA_B: (outputs, lora.rank)}
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        raise GenerationError(
            f"new adapters have {len(unknown)} tensors this model does not have: {', '.join(unknown[:5])}; "
            f"with learner.lora only adapters are taken, called LAYER{LORA_A} and LAYER{LORA_B}"
        )
    missing = sorted((expected.keys() | _targeted(folder, lora)) - shapes.keys())
    if missing or not shapes:
        raise GenerationError(f"new adapters lack {len(missing)} tensors: {', '.join(missing[:5])}; send all of them")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise GenerationError(f"new adapters: {name} has shape {shape}, the model's is {expected[name]}")


def _targeted(folder: ModelFolder, lora: LoRAConfig) -> set[str]:
    """Return the tensors that must be there by name; none where the config says `all linear layers`."""
    layers = {name.removesuffix(".weight") for name, shape in folder.shapes.items() if len(shape) == 2}
    hit = {layer for layer in layers if any(layer == end or layer.endswith(f".{end}") for end in lora.target_modules)}
    return {layer + part for layer in hit for part in (LORA_A, LORA_B)}
