"""Code inside vLLM's worker processes: it loads a version's tensors in place, from a file or a receiver.

vLLM mixes `WeightsExtension` into its worker class (`worker_extension_cls`), so `self` is the worker: `self.model_runner`,
`self.vllm_config`, `self.device`. Its methods are called by `collective_rpc`, text in, text out.

Three silent faults are prevented. A plain `load_weights` stops half-way if linear layers are repacked (on a CPU, or quantized):
such models are reloaded layer by layer. A tied head keeps its old values: it is loaded under its own name too (`also_as`), or
repacked if the model skips that name. A single shard of a fused layer gives wrong weights: load_request.py requires the whole
set.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.vllm.checkpoint import HEAD, weight_files
from asyncrl.generate.vllm.load_request import LORA_A, LORA_B, Base, FileSource, LoadReply, LoadRequest, ReceiverSource
from asyncrl.models.layout import view_tensors
from asyncrl.weights.tensors import Receiver, make_receiver

_NOISY = "vllm.model_executor.model_loader.reload.layerwise"
"""This logger warns at every load about layers without weights (rotary embeddings); we check missing weights ourselves."""

NamedTensors = Iterator[tuple[str, torch.Tensor]]
Theirs = Any
"""A vLLM worker or its model; vLLM has no types for them."""


class WeightsExtension:
    """Mixed into vLLM's worker; every name begins with `asyncrl_`, so that no worker attribute is hidden."""

    def asyncrl_load(self, order: str) -> str:
        """Replace the weights by a `LoadRequest`; return a `LoadReply`. Both are JSON.

        Never raises: vLLM reads the first rank's error and leaves the others in its queue, where the next call would read them.
        """
        try:
            reply = _load(self, msgspec.json.decode(order, type=LoadRequest))
        except BroadcastError as error:
            reply = LoadReply("broadcast", str(error))
        except Exception as error:  # noqa: BLE001 - the boundary of vLLM's process: raised there, the reply would be lost
            reply = LoadReply("generation", f"{type(error).__name__}: {error}")
        return msgspec.json.encode(reply).decode()

    def asyncrl_follow(self, owner_pid: int, sockets: str) -> None:
        """End this worker and its engine core when the process that owns the engine has ended for any reason.

        Args:
            owner_pid: The generator's process id; it must be alive. With one worker, the worker may be the engine core itself.
            sockets: The folder of the engine's sockets; removed at the end.
        """
        owner, parent = os.pidfd_open(owner_pid), os.pidfd_open(os.getppid())  # a handle never refers to another process

        def follow() -> None:
            select.select([owner], [], [])
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(parent, signal.SIGKILL)
            shutil.rmtree(sockets, ignore_errors=True)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=follow, name="asyncrl-owner-watch", daemon=True).start()


def _load(worker: Theirs, order: LoadRequest) -> LoadReply:
    """Load all tensors, from the arrival of the first one; a layer whose tensors do not arrive keeps its old ones."""
    logging.getLogger(_NOISY).setLevel(logging.ERROR)
    vocabulary = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    device = torch.device(worker.device)
    with import_module("vllm.config").set_current_vllm_config(worker.vllm_config), torch.no_grad():
        model = worker.model_runner.get_model()
        is_plain = device.type == "cuda" and is_plainly_loaded(model)
        tensors = _tensors(worker, order.source, device, copies=not is_plain)
        heads = {name: module for name, module in model.named_modules() if isinstance(module, vocabulary.ParallelLMHead)}
        if order.base is not None:
            tensors = merged(tensors, order.base, device)
        # A model without a head uses the embedding itself (Gemma) and has no other name for it.
        named: NamedTensors = (pair for pair in checkpoint_tensors(tensors, order) if heads or pair[0] != HEAD)
        try:
            named = chain(list(islice(named, 1)), named)
        except BroadcastError as error:
            return LoadReply("broadcast", str(error), is_untouched=True)
        expected = {name for name, parameter in model.named_parameters() if parameter.numel()}
        if is_plain:
            loaded: set[str] | None = model.load_weights(named)
            missing = set() if loaded is None else expected - loaded
        else:
            loaded, missed = _load_layerwise(worker, model, named, device)
            missing = expected & missed
        if missing:
            raise GenerationError(f"vLLM did not load {len(missing)} of its parameters: {', '.join(sorted(missing)[:5])}")
        for name, head in heads.items():
            # A tied head that the model skips while loading (Llama until 0.28, GPT-2 still) has the embedding's storage, which
            # has new values; but on a CPU its matrix product uses a packed copy.
            if f"{name}.weight" not in (loaded or ()) and isinstance(head.quant_method, vocabulary.UnquantizedEmbeddingMethod):
                head.quant_method.process_weights_after_loading(head)
        if order.zero_kv:
            caches = [worker.model_runner.kv_caches]
            while caches:  # a tensor, or a list of such, by vLLM's version and model
                cache = caches.pop()
                if isinstance(cache, torch.Tensor):
                    cache.zero_()
                else:
                    caches.extend(cache)
    return LoadReply()


def is_plainly_loaded(model: torch.nn.Module) -> bool:
    """Return whether a GPU uses a model's weights as loaded: not quantized, no mixture of experts, plain attention.

    For such a model the layer-wise reload has no effect beyond loading, and takes longer than the loading.
    """
    linear = import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod
    embedding = import_module("vllm.model_executor.layers.vocab_parallel_embedding").UnquantizedEmbeddingMethod
    attention = import_module("vllm.model_executor.layers.attention").Attention
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        processes = hasattr(module, "process_weights_after_loading") and type(module) is not attention
        if processes or (method is not None and type(method) not in {linear, embedding}):
            return False
    return True


def _load_layerwise(worker: Theirs, model: Theirs, named: NamedTensors, device: torch.device) -> tuple[set[str] | None, set[str]]:
    """Load layer by layer, and prepare each layer as at the start; return the names of loaded and of missing parameters.

    Not loaded is, in layers that are not complete yet, all of a layer's which was given nothing, whatever the model says it
    loaded (GPT-OSS writes past the reload), and what the model does not name. Of a complete layer it need not name them as they
    are called (mixtures until 0.28).
    """
    reload = import_module("vllm.model_executor.model_loader.reload")
    info_of = import_module("vllm.model_executor.model_loader.reload.layerwise").get_layerwise_info
    if device.type == "cpu":  # experts are packed again as they load: vLLM packs the first ones, and copies later ones in
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
    reload.initialize_layerwise_reload(model)
    try:
        loaded: set[str] | None = model.load_weights(named)
        missed = set()
        for name, layer in model.named_modules():
            info = info_of(layer)
            if not getattr(layer, "num_org_embeddings_per_partition", 1):
                continue  # a rank's part of a small vocabulary may be padding only
            waiting = {own for own, parameter in layer.named_parameters(recurse=False) if parameter.is_meta and info.can_load()}
            own = {f"{name}.{parameter}" for parameter in waiting}
            missed |= own - (loaded or own) if info.load_numel else own
        return loaded, missed
    finally:
        reload.finalize_layerwise_reload(model, worker.model_runner.model_config)


def _tensors(worker: Theirs, source: FileSource | ReceiverSource, device: torch.device, *, copies: bool) -> NamedTensors:
    """Yield views of the mapped file, in the order of the layout, or what a receiver hands out; copies of it where it is kept."""
    if isinstance(source, FileSource):
        try:
            num_bytes = source.offset + source.manifest.total_bytes
            mapped = torch.from_file(source.path, shared=False, size=num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise BroadcastError(f"the weights in {source.path} cannot be mapped: {error}") from error
        yield from view_tensors(mapped[source.offset :], source.manifest).items()
        return
    key, kept = (source.receiver, source.arguments), getattr(worker, "_asyncrl_receiver", None)
    if kept is None or kept[0] != key:  # created at the first order, and kept while its arguments stay the same
        if kept is not None:
            kept[1].close()
        kept = (key, make_receiver(source.receiver, source.arguments.encode()))
        worker._asyncrl_receiver = kept  # noqa: SLF001 - the worker is what we are mixed into
    receiver: Receiver = kept[1]
    with closing(iter(receiver.fetch(source.available, device))) as tensors:
        for name, tensor in tensors:
            # Layer-wise, a fused layer waits for its last shard; a received tensor lives until the next one.
            yield name, tensor.clone() if copies else tensor


def checkpoint_tensors(tensors: NamedTensors, order: LoadRequest) -> NamedTensors:
    """Yield tensors in a checkpoint's form: under every name, split into views, plus the tensors that no version changes."""
    for name, given in tensors:
        for own in [name, *([order.also_as[name]] if name in order.also_as else [])]:
            if own not in order.parts:
                yield own, given
                continue
            tensor = given.contiguous()
            for part in order.parts[own]:
                yield part.name, tensor.as_strided(part.shape, part.stride, tensor.storage_offset() + part.offset)
    for name, fixed in order.fixed.items():
        yield name, torch.frombuffer(bytearray(fixed.data), dtype=getattr(torch, fixed.dtype)).view(fixed.shape)


def merged(adapters: Iterable[tuple[str, torch.Tensor]], base: Base, device: torch.device) -> NamedTensors:
    """Yield the whole model: the base's tensors, with the adapters added.

    Args:
        adapters: All adapters of a version, [rank, in] and [out, rank].
        base: The location of the base model.
        device: The device for the sums.

    Source: Hu et al. 2021 (arXiv 2106.09685), equation 3: W + alpha / r B A.
    """
    by_name = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in adapters}
    for file in weight_files(Path(base.folder)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                weight, layer = tensors.get_tensor(name), name.removesuffix(".weight")
                if layer + LORA_A in by_name:
                    product = by_name[layer + LORA_B] @ by_name[layer + LORA_A]
                    sized = product.T if base.is_input_first else product
                    weight = weight.to(device, torch.float32) + base.scale * sized
                yield name, weight
