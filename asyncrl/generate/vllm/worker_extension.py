"""What runs inside vLLM's worker processes: it takes a version's tensors from a file or a receiver and loads them in place.

vLLM mixes `WeightsExtension` into its worker class (`worker_extension_cls`), so `self` is the worker: `self.model_runner`,
`self.vllm_config`, `self.device`. Its methods are called by `collective_rpc`, text in, text out.

Three things go wrong silently without the care taken here: a plain `load_weights` stops half-way where linears are repacked
(CPU), hence the layer-wise reload; a tied head keeps its old values unless it is loaded under its own name too (`also_as`), or
repacked where the model skips that name (`_repack_skipped_heads`); and one shard of a fused layer alone gives garbage, which
generate/vllm_weights.py excludes by asking for the whole set.
"""

from __future__ import annotations

import glob
import logging
import os
import select
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.vllm.checkpoint import HEAD, FixedTensor, Part, weight_files
from asyncrl.generate.vllm.load_request import LORA_A, LORA_B, Base, FileSource, LoadReply, LoadRequest, ReceiverSource
from asyncrl.models.layout import view_tensors
from asyncrl.weights.tensors import Receiver, make_receiver

_NOISY = "vllm.model_executor.model_loader.reload.layerwise"
"""Warns at every load of layers that have no weights (rotary embeddings); what was not loaded, we look at ourselves."""

_MEMORY = Path("/dev/shm")  # noqa: S108 - vLLM's place

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class _UntouchedError(BroadcastError):
    """The bytes are not there, and the model is as it was."""


class WeightsExtension:
    """Mixed into vLLM's worker; every name begins with `asyncrl_`, so that none of the worker's is hidden."""

    def asyncrl_load(self, order: str) -> str:
        """Replace the weights as a `LoadRequest` says; return a `LoadReply`. Both as JSON.

        Never raises: vLLM takes the first rank's error and leaves the others' in its queue, for the next call to find.
        """
        reply = LoadReply()
        try:
            _load(self, msgspec.json.decode(order, type=LoadRequest))
        except _UntouchedError as error:
            reply = LoadReply("broadcast", str(error), is_touched=False)
        except BroadcastError as error:
            reply = LoadReply("broadcast", str(error))
        except Exception as error:  # noqa: BLE001 - the boundary of vLLM's process: raised there, the reply would be lost
            reply = LoadReply("generation", f"{type(error).__name__}: {error}")
        return msgspec.json.encode(reply).decode()

    def asyncrl_follow(self, owner_pid: int, core_pids: list[int], sockets: str) -> None:
        """End the engine's cores and this worker when the process that owns the engine is gone, however it ended.

        Called once all ranks are there: what they only met by is unnamed here.

        Args:
            owner_pid: The generator's; it must live.
            core_pids: Of its children for this engine. Where vLLM has one worker, that may be the core itself.
            sockets: The folder of the engine's sockets, removed in the end.
        """
        owner, others = os.pidfd_open(owner_pid), [os.pidfd_open(pid) for pid in core_pids if pid != os.getpid()]
        _unname_rank_memory()
        threading.Thread(target=_end_with, args=(owner, others, sockets), name="asyncrl-owner-watch", daemon=True).start()


def _load(worker: Any, order: LoadRequest) -> None:  # noqa: ANN401 - vLLM's worker
    """Load everything, layer by layer; a layer whose tensors did not come keeps its old ones."""
    logging.getLogger(_NOISY).setLevel(logging.ERROR)
    reload = import_module("vllm.model_executor.model_loader.reload")
    vocabulary = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    with import_module("vllm.config").set_current_vllm_config(worker.vllm_config), torch.no_grad():
        model, tensors = worker.model_runner.get_model(), _tensors(worker, order.source)
        heads = {name: module for name, module in model.named_modules() if isinstance(module, vocabulary.ParallelLMHead)}
        expected = {name for name, parameter in model.named_parameters() if parameter.numel()}
        if torch.device(worker.device).type == "cpu":
            _forget_packed_experts(model)
        reload.initialize_layerwise_reload(model)
        try:
            if order.base is not None:
                tensors = merged(tensors, order.base, torch.device(worker.device))
            tensors = chain(_in_parts(_with_other_names(tensors, order.also_as), order.parts), _fixed(order.fixed))
            loaded = model.load_weights(tensors if heads else _without_head(tensors))
            missing = expected & _missed(model, loaded)
        finally:
            reload.finalize_layerwise_reload(model, worker.model_runner.model_config)
        if missing:
            raise GenerationError(f"vLLM did not load {len(missing)} of its parameters: {', '.join(sorted(missing)[:5])}")
        _repack_skipped_heads(heads, vocabulary.UnquantizedEmbeddingMethod, loaded or set())
        if order.zero_kv:
            for cache in _leaves(worker.model_runner.kv_caches):
                cache.zero_()


def _missed(model: torch.nn.Module, loaded: set[str] | None) -> set[str]:
    """Return parameters, of layers that are not complete yet, that were not loaded.

    That is all of a layer's which was given nothing, whatever the model says it loaded (GPT-OSS writes past the reload), and what
    the model does not name. Of a complete layer it need not name them as they are called (mixtures until 0.28).
    """
    info_of = import_module("vllm.model_executor.model_loader.reload.layerwise").get_layerwise_info
    missed = set()
    for name, layer in model.named_modules():
        info = info_of(layer)
        waiting = {own for own, parameter in layer.named_parameters(recurse=False) if parameter.is_meta and info.can_load()}
        own = {f"{name}.{parameter}" for parameter in waiting}
        missed |= own - (loaded or own) if info.load_numel else own
    return missed


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Have experts packed again as they load: on a CPU vLLM packs the first ones, and copies later ones in as they are."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_skipped_heads(heads: dict[str, Any], plain: Any, loaded: set[str]) -> None:  # noqa: ANN401
    """Make tied heads anew that were not loaded under their own name: some models skip it (Llama until 0.28, GPT-2 still).

    Such a head has the embedding's storage, which has new values; but on a CPU its matrix product runs over a packed copy.
    """
    for name, head in heads.items():
        if f"{name}.weight" not in loaded and isinstance(head.quant_method, plain):
            head.quant_method.process_weights_after_loading(head)


def _without_head(tensors: NamedTensors) -> NamedTensors:
    """Leave out the head's second name where the model has none but applies the embedding itself (Gemma)."""
    return ((name, tensor) for name, tensor in tensors if name != HEAD)


def _leaves(caches: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a tensor, or a list of such, by vLLM's version and model
    if isinstance(caches, torch.Tensor):
        yield caches
    else:
        for cache in caches:
            yield from _leaves(cache)


def _tensors(worker: Any, source: FileSource | ReceiverSource) -> NamedTensors:  # noqa: ANN401
    if isinstance(source, FileSource):
        return _from_file(source)
    return _from_receiver(worker, source)


def _from_file(source: FileSource) -> NamedTensors:
    """Return views of the mapped file, in the order of the layout."""
    try:
        num_bytes = source.offset + source.manifest.total_bytes
        mapped = torch.from_file(source.path, shared=False, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise _UntouchedError(f"the weights in {source.path} cannot be mapped: {error}") from error
    return iter(view_tensors(mapped[source.offset :], source.manifest).items())


def _from_receiver(worker: Any, source: ReceiverSource) -> NamedTensors:  # noqa: ANN401
    """Yield copies: a fused layer waits for its last shard, and a received tensor lives only until the next one."""
    receiver = _receiver_of(worker, source)
    with closing(iter(receiver.fetch(source.available, torch.device(worker.device)))) as tensors:  # type: ignore[type-var]
        for name, tensor in tensors:
            yield name, tensor.clone()


def _receiver_of(worker: Any, source: ReceiverSource) -> Receiver:  # noqa: ANN401
    """Return the worker's receiver, made at the first order and kept as long as its arguments stay the same."""
    key, kept = (source.receiver, source.arguments), getattr(worker, "_asyncrl_receiver", None)
    if kept is not None and kept[0] == key:
        receiver: Receiver = kept[1]
        return receiver
    if kept is not None:
        kept[1].close()
    receiver = make_receiver(source.receiver, source.arguments.encode())
    worker._asyncrl_receiver = (key, receiver)  # noqa: SLF001 - the worker is what we are mixed into
    return receiver


def merged(adapters: Iterable[tuple[str, torch.Tensor]], base: Base, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole model: the base's tensors, those with adapters with them added.

    Args:
        adapters: All of a version's, [rank, in] and [out, rank].
        base: Where the rest is.
        device: Where sums are taken.

    Source: Hu et al. 2021 (arXiv 2106.09685), equation 3: W + alpha / r B A.
    """
    by_name = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in adapters}
    for name, weight in _base_tensors(base):
        layer = name.removesuffix(".weight")
        if layer + LORA_A not in by_name:
            yield name, weight
            continue
        product = by_name[layer + LORA_B] @ by_name[layer + LORA_A]
        yield name, weight.to(device, torch.float32) + base.scale * (product.T if base.is_input_first else product)


def _base_tensors(base: Base) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(Path(base.folder)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _with_other_names(tensors: NamedTensors, also_as: dict[str, str]) -> NamedTensors:
    seen: set[str] = set()
    for name, tensor in tensors:
        seen.add(name)
        yield name, tensor
        if name in also_as:
            yield also_as[name], tensor
    if missing := also_as.keys() - seen:
        raise GenerationError(f"new weights lack {', '.join(sorted(missing))}")


def _in_parts(tensors: NamedTensors, parts: dict[str, tuple[Part, ...]]) -> NamedTensors:
    """Yield tensors as a checkpoint has them: views of what comes, where that is contiguous."""
    for name, given in tensors:
        if name not in parts:
            yield name, given
            continue
        tensor = given.contiguous()
        for part in parts[name]:
            yield part.name, tensor.as_strided(part.shape, part.stride, tensor.storage_offset() + part.offset)


def _fixed(tensors: dict[str, FixedTensor]) -> NamedTensors:
    for name, tensor in tensors.items():
        flat = torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))
        yield name, flat.view(tensor.shape)


def _unname_rank_memory() -> None:
    """Remove the names of the memory by which ranks on a CPU talk: all have it open by now, and one that is killed would not."""
    if ident := os.environ.get("VLLM_DIST_IDENT"):
        for path in _MEMORY.glob(f"{glob.escape(ident)}-*-cpushm_*"):
            path.unlink(missing_ok=True)


def _end_with(owner: int, others: list[int], sockets: str) -> None:
    """Wait for the end of a process, then end others and this one, all by handles, which never come to mean another process."""
    select.select([owner], [], [])
    for other in others:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(other, signal.SIGKILL)
    shutil.rmtree(sockets, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
