"""New weights on their way to a vLLM server: a file that it can see too, and what its workers answer.

On the same machine the bytes are named where they lie, or written to memory once; for a server elsewhere they are written into
`generate.engine.shared_folder`, and go again when the load is over.

Called by generate/vllm_server_engine.py; the workers' end is generate/vllm_worker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.vllm_folder import ModelFolder
from asyncrl.generate.vllm_orders import LoadOrder, LoadReply
from asyncrl.generate.vllm_server_checks import LOAD_METHOD
from asyncrl.generate.vllm_server_http import ServerClient, decoded
from asyncrl.generate.vllm_server_wire import RPCBody, RPCReply
from asyncrl.generate.vllm_weights import load_order
from asyncrl.models.deferred import DeferredTensors
from asyncrl.models.layout import copy_out, make_manifest, view_tensors
from asyncrl.models.mapped import MappedTensors


class HalfLoaded(GenerationError):  # noqa: N818 - a state of the server's weights
    """A worker failed in the middle: what it holds now is of no version."""


@contextlib.asynccontextmanager
async def order_for_server(
    tensors: Mapping[str, torch.Tensor], folder: ModelFolder, shared_folder: str
) -> AsyncIterator[LoadOrder]:
    """Describe a version for the server's workers; the files named exist as long as the context lasts.

    Args:
        tensors: As `Engine.load_weights` gets them.
        folder: The run's model folder.
        shared_folder: Of the config; empty: the server is on this machine.

    Yields:
        The order.

    Raises:
        GenerationError: Names or shapes are not the model's, or the bytes cannot be written.
    """
    stack = contextlib.ExitStack()
    try:
        yield await asyncio.to_thread(_make_order, stack, tensors, folder, shared_folder)
    finally:
        await asyncio.to_thread(stack.close)


async def load_on_server(client: ServerClient, order: LoadOrder, tensors: Mapping[str, torch.Tensor]) -> None:
    """Have every worker of the server load; returns once all have.

    Raises:
        BroadcastError: The bytes were overwritten meanwhile.
        HalfLoaded: A worker failed.
        ServerLost, ServerRefused: See `ServerClient.post`.
    """
    body = RPCBody(LOAD_METHOD, (msgspec.json.encode(order).decode(),))
    answers = decoded(await client.post("/collective_rpc", body), RPCReply, "/collective_rpc").results
    replies = [decoded((answer or "").encode(), LoadReply, LOAD_METHOD) for answer in answers]
    failed = [reply for reply in replies if reply.fault]
    if isinstance(tensors, MappedTensors):
        tensors.check()
    if failed and isinstance(tensors, DeferredTensors) and failed[0].fault == "broadcast":
        raise BroadcastError(failed[0].message)
    if failed or not replies:
        said = failed[0].message if failed else "no worker answered"
        raise HalfLoaded(
            f"{len(failed)} of {len(replies)} workers of the server at {client.url} could not load the weights: {said}. "
            "If it does not see this machine's files (another machine, a container), set generate.engine.shared_folder to a "
            "folder that both see under the same path"
        )


def _make_order(
    stack: contextlib.ExitStack, tensors: Mapping[str, torch.Tensor], folder: ModelFolder, shared_folder: str
) -> LoadOrder:
    if shared_folder and not isinstance(tensors, DeferredTensors) and not _lies_in(tensors, shared_folder):
        tensors = stack.enter_context(_written(tensors, Path(shared_folder)))
    return stack.enter_context(load_order(tensors, folder))


def _lies_in(tensors: Mapping[str, torch.Tensor], folder: str) -> bool:
    return isinstance(tensors, MappedTensors) and bool(tensors.path) and Path(tensors.path).is_relative_to(folder)


@contextlib.contextmanager
def _written(tensors: Mapping[str, torch.Tensor], folder: Path) -> Iterator[MappedTensors]:
    """Write the layout into a file of the shared folder, on the disk for others before it is named; and remove it."""
    if isinstance(tensors, MappedTensors):
        manifest, flat = tensors.manifest, tensors.flat
    else:
        manifest = make_manifest(tensors)
        flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
        copy_out(tensors, manifest, view_tensors(flat, manifest), lambda _: None)
    path = ""
    try:
        try:
            descriptor, path = tempfile.mkstemp(prefix="asyncrl-weights-", suffix=".bin", dir=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(flat.numpy().data)
                file.flush()
                os.fsync(descriptor)
        except OSError as error:
            raise GenerationError(
                f"{manifest.total_bytes} bytes of weights cannot be written to generate.engine.shared_folder ({folder}): {error}"
            ) from error
        yield MappedTensors(manifest, flat, path, 0)
    finally:
        if path:
            Path(path).unlink(missing_ok=True)
