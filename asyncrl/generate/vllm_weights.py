"""New weights on their way to vLLM's workers: checked as a whole against the model folder, then described in a `LoadOrder`.

Bytes that already lie in a file that the workers see are named, not copied. Others are written once into a file of our own, in
memory where the machine has /dev/shm, or in the folder that is shared with a server elsewhere; it is gone when the load is over.

Invariant: nothing is sent to a worker before names, shapes and completeness are those of the model folder, and bytes verified.
Called by generate/vllm_engine.py and generate/vllm_server_control.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_adapters import base_of, check_adapters
from asyncrl.generate.vllm_folder import ModelFolder
from asyncrl.generate.vllm_orders import FileOrder, LoadOrder, ReceiverOrder
from asyncrl.models.deferred import DeferredTensors
from asyncrl.models.layout import make_manifest
from asyncrl.models.mapped import MappedTensors
from asyncrl.schema.weights import WeightsManifest

_MEMORY = Path("/dev/shm")  # noqa: S108 - memory shared between processes; the file in it has a name of its own and mode 0600
_SHOWN = 5


def check_shapes(shapes: Mapping[str, tuple[int, ...]], folder: ModelFolder) -> None:
    """Refuse weights that are not the whole of this model.

    Args:
        shapes: Of the new tensors, by name.
        folder: The model's, with its names and shapes; of tied names one is enough.

    Raises:
        GenerationError: A name is unknown or missing, or a shape differs.
    """
    unknown = [name for name in shapes if name not in folder.shapes and name not in folder.tied and name not in folder.fixed]
    if unknown:
        raise GenerationError(
            f"new weights have {len(unknown)} tensors this model does not have: {_some(unknown)}; "
            f"it has {len(folder.shapes)}, among them {_some(list(folder.shapes))}"
        )
    tied_to = {original: other for other, original in folder.tied.items()}
    missing = [name for name in folder.shapes if name not in shapes and tied_to.get(name) not in shapes]
    if missing:
        raise GenerationError(
            f"new weights lack {len(missing)} of the model's {len(folder.shapes)} tensors: {_some(missing)}; send all of them"
        )
    for name, shape in shapes.items():
        known = folder.tied.get(name, name)
        expected = folder.shapes[known] if known in folder.shapes else folder.fixed[known].shape
        if shape != expected:
            raise GenerationError(f"new weights: {name} has shape {shape}, the model's is {expected}")


@contextlib.asynccontextmanager
async def load_order_on_thread(
    tensors: Mapping[str, torch.Tensor], folder: ModelFolder, lora: LoRAConfig | None = None, shared_folder: str = ""
) -> AsyncIterator[LoadOrder]:
    """Do as `load_order` without holding up the event loop."""
    stack = contextlib.ExitStack()
    try:
        yield await asyncio.to_thread(stack.enter_context, load_order(tensors, folder, lora, shared_folder))
    finally:
        await asyncio.to_thread(stack.close)


@contextlib.contextmanager
def load_order(
    tensors: Mapping[str, torch.Tensor], folder: ModelFolder, lora: LoRAConfig | None = None, shared_folder: str = ""
) -> Iterator[LoadOrder]:
    """Describe a version for the workers; what the description names exists as long as the context lasts. Slow: use a thread.

    Args:
        tensors: As `Engine.load_weights` gets them.
        folder: The model's.
        lora: The learner's, where it has adapters: the tensors are those alone.
        shared_folder: Where workers of another machine find what is written; empty: they are on this one.

    Yields:
        The order.

    Raises:
        GenerationError: As `check_shapes`; or tied tensors differ, or the bytes cannot be written.
        BroadcastError: The bytes are damaged or were overwritten.
    """
    if isinstance(tensors, DeferredTensors):
        manifest = tensors.available.manifest
        _check({entry.name: entry.shape for entry in manifest.entries}, folder, lora)
        source = ReceiverOrder(tensors.receiver, tensors.arguments.decode(), tensors.available)
        yield _order(source, manifest, folder, lora)
        return
    _check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder, lora)
    _refuse_disagreement(tensors, folder)
    with _in_a_file(tensors, shared_folder) as file:
        yield _order(file, file.manifest, folder, lora)


def _check(shapes: Mapping[str, tuple[int, ...]], folder: ModelFolder, lora: LoRAConfig | None) -> None:
    if lora is None:
        check_shapes(shapes, folder)
    else:
        check_adapters(shapes, folder, lora)


def _order(
    source: FileOrder | ReceiverOrder, manifest: WeightsManifest, folder: ModelFolder, lora: LoRAConfig | None
) -> LoadOrder:
    if lora is None:
        names = {entry.name for entry in manifest.entries}
        fixed = {name: tensor for name, tensor in folder.fixed.items() if name not in names}
        return LoadOrder(source, _other_names(names, folder), folder.parts, fixed)
    return LoadOrder(source, _other_names(set(folder.shapes), folder), base=base_of(folder, lora))


def _other_names(names: set[str], folder: ModelFolder) -> dict[str, str]:
    """Return which of the tensors that come is to be loaded under a second name."""
    pairs = {*folder.tied.items(), *((original, other) for other, original in folder.tied.items())}
    return {name: other for name, other in pairs if name in names and other not in names}


@contextlib.contextmanager
def _in_a_file(tensors: Mapping[str, torch.Tensor], shared_folder: str) -> Iterator[FileOrder]:
    """Say where the tensors lie, or write them, tied ones once, into a file of our own."""
    if isinstance(tensors, MappedTensors) and _is_seen(tensors.path, shared_folder):
        tensors.verify()
        yield FileOrder(tensors.path, tensors.offset, tensors.manifest)
        return
    manifest = tensors.manifest if isinstance(tensors, MappedTensors) else make_manifest(tensors)
    where = Path(shared_folder) if shared_folder else _roomy_folder(manifest.total_bytes)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="asyncrl-weights-", dir=where))
            _write(file, tensors, manifest)
            if shared_folder:
                os.fsync(file.fileno())
        except OSError as error:
            raise GenerationError(
                f"{manifest.total_bytes} bytes of weights cannot be written to {where}"
                f"{' (generate.engine.shared_folder)' if shared_folder else ''}: {error}"
            ) from error
        yield FileOrder(file.name, 0, manifest)


def _is_seen(path: str, shared_folder: str) -> bool:
    return bool(path) and (not shared_folder or Path(path).is_relative_to(shared_folder))


def _write(file: Any, tensors: Mapping[str, torch.Tensor], manifest: WeightsManifest) -> None:  # noqa: ANN401 - a wrapper's type
    """Lay tensors out in a file. Written, not mapped: of a file system that is full, a map would kill this process."""
    for entry in manifest.entries:
        file.seek(entry.offset)
        file.write(tensors[entry.name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    file.truncate(manifest.total_bytes)
    file.flush()


def _roomy_folder(num_bytes: int) -> Path:
    folders = [_MEMORY, Path(tempfile.gettempdir())]
    for folder in folders:
        if folder.is_dir() and shutil.disk_usage(folder).free > num_bytes:
            return folder
    raise GenerationError(
        f"there is no room for {num_bytes} bytes of weights on their way to vLLM in {' or '.join(map(str, folders))}: "
        f"make room, or use a medium whose bytes lie in a file (broadcast.medium.kind = 'shared_memory')"
    )


def _refuse_disagreement(tensors: Mapping[str, torch.Tensor], folder: ModelFolder) -> None:
    for other, original in folder.tied.items():
        if other in tensors and original in tensors and not torch.equal(tensors[other], tensors[original]):
            raise GenerationError(f"new weights: {original} and {other} are one tensor in this model but differ")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
