"""New weights on their way to vLLM's workers: checked as a whole against the model folder, then described in a `LoadOrder`.

Bytes that already lie in a file of this machine are named, not copied. Others are written once into a file of our own, in memory
where the machine has /dev/shm, which is gone when the load is over.

Invariant: nothing is sent to a worker before names, shapes and completeness are those of the model folder.
Called by generate/vllm_engine.py and generate/vllm_server_engine.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_adapters import base_of, check_adapters
from asyncrl.generate.vllm_folder import ModelFolder
from asyncrl.generate.vllm_orders import FileOrder, LoadOrder, ReceiverOrder
from asyncrl.models.deferred import DeferredTensors
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
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
    unknown = [name for name in shapes if name not in folder.shapes and name not in folder.tied]
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
        expected = folder.shapes[folder.tied.get(name, name)]
        if shape != expected:
            raise GenerationError(f"new weights: {name} has shape {shape}, the model's is {expected}")


@contextlib.contextmanager
def load_order(tensors: Mapping[str, torch.Tensor], folder: ModelFolder, lora: LoRAConfig | None = None) -> Iterator[LoadOrder]:
    """Describe a version for the workers; what the description names exists as long as the context lasts. Slow: use a thread.

    Args:
        tensors: As `Engine.load_weights` gets them.
        folder: The model's.
        lora: The learner's, where it has adapters: the tensors are those alone.

    Yields:
        The order.

    Raises:
        GenerationError: As `check_shapes`; or tied tensors differ, or there is no room for the bytes.
    """
    if isinstance(tensors, DeferredTensors):
        manifest = tensors.available.manifest
        _check({entry.name: entry.shape for entry in manifest.entries}, folder, lora)
        source = ReceiverOrder(tensors.receiver, tensors.arguments.decode(), tensors.available)
        yield _order(source, manifest, folder, lora)
        return
    _check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder, lora)
    _refuse_disagreement(tensors, folder)
    with _in_a_file(tensors) as file:
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
        return LoadOrder(source, _other_names({entry.name for entry in manifest.entries}, folder))
    return LoadOrder(source, _other_names(set(folder.shapes), folder), base_of(folder, lora))


def _other_names(names: set[str], folder: ModelFolder) -> dict[str, str]:
    """Return which of the tensors that come is to be loaded under a second name."""
    pairs = {*folder.tied.items(), *((original, other) for other, original in folder.tied.items())}
    return {name: other for name, other in pairs if name in names and other not in names}


@contextlib.contextmanager
def _in_a_file(tensors: Mapping[str, torch.Tensor]) -> Iterator[FileOrder]:
    """Say where the tensors lie, or write them, tied ones once, into a file of our own."""
    if isinstance(tensors, MappedTensors) and tensors.path:
        yield FileOrder(tensors.path, tensors.offset, tensors.manifest)
        return
    manifest = make_manifest(tensors)
    descriptor, path = _new_file(manifest.total_bytes)
    try:
        os.ftruncate(descriptor, manifest.total_bytes)
        flat = torch.from_file(path, shared=True, size=manifest.total_bytes, dtype=torch.uint8)
        copy_out(tensors, manifest, view_tensors(flat, manifest), lambda _: None)
        del flat
        yield FileOrder(path, 0, manifest)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _new_file(num_bytes: int) -> tuple[int, str]:
    folders = [_MEMORY, Path(tempfile.gettempdir())]
    for folder in folders:
        if folder.is_dir() and shutil.disk_usage(folder).free > num_bytes:
            return tempfile.mkstemp(prefix="asyncrl-weights-", dir=folder)
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
