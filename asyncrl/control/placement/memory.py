"""The resident memory of each process, and whether it fits a shared device, checked before any process is started.

First-order sums from the config and folders' headers: weights, optimizer state, gradients, activations and logits of a row, KV
cache, reference and reward models with one batch. Only config.json and the headers of safetensors files are opened. A generator's
memory for a forward pass is in no sum.

Every phase of a shared device must fit its budget. With `placement.kind = "async_hybrid"` the same sums are divided by shares:
training state with the activations of a row, models of inference workers on the same device, weights and the smallest KV cache
that works are added up. If they do not fit, the config is refused with the sum. With a budget of B bytes, vLLM's KV cache in each
of n generators is s B / n - weights (without a budget it gets s / n of the GPU), with s = `placement.generation_share` and, with
several GPUs, the weights that one of them holds. The transformers engine's cache is fixed by its slots, and on a GPU torch's
allocator is limited to s B / n. The share of time is in limits.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import ceil, floor, prod
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrl.config.broadcast import CUDAIPCMedium
from asyncrl.config.generate import VLLM_CPU_BLOCK_TOKENS, TransformersEngineConfig, VLLMEngineConfig
from asyncrl.config.learner import ModelConfig, ScratchModel
from asyncrl.config.places import inference_shares_device, inference_takes_turns, places_of, with_chosen_medium
from asyncrl.config.run import RunConfig
from asyncrl.control.placement.limits import core_quota, most_generators, on_gpu, own_cores, shares_device, usable_cores
from asyncrl.errors import ConfigError
from asyncrl.models.memory import (
    BYTES,
    ModelShape,
    Part,
    cache_rows,
    cache_tokens,
    forward_row,
    shape_of_json,
    trained_parts,
    training_row,
)
from asyncrl.models.number_format import ask_driver
from asyncrl.residency.plan import GIB, WORKERS_REFERENCE, check_phases
from asyncrl.schema.control import Phase
from asyncrl.weights.media.base import NUM_SLOTS

JUDGING_CHUNK_TOKENS = 1024
"""Number of tokens whose logits exist at once in a reference on an inference worker (inference/models.py)."""
CHARACTER_VOCABULARY = 64
"""Upper bound of the vocabulary of a scratch model's character tokenizer."""


def policy_shape(model: ModelConfig) -> ModelShape:
    """Return the policy's shape.

    Raises:
        ConfigError: A pretrained model's folder has no readable config.json.
    """
    if isinstance(model, ScratchModel):
        heads, head_size = model.num_heads, model.hidden_size // model.num_heads
        return ModelShape(
            model.hidden_size, model.num_layers, heads, model.num_kv_heads or heads, head_size,
            model.intermediate_size or 4 * model.hidden_size, CHARACTER_VOCABULARY, model.tie_embeddings,
        )  # fmt: skip
    return _shape_in(model.path, "model.path")


def training_sizes(config: RunConfig) -> dict[str, int]:
    """Return the bytes on one learner rank's device in training: weights, optimizer state, gradients, a row's activations."""
    sizes, learner = dict[str, int](), config.learner
    gradients = 0
    for model, parts in learner_parts(config).items():
        if model != "reference":
            gradients += _on_device(parts, "gradients")
            state = _on_device(parts, "masters") + _on_device(parts, "moments")
            sizes |= {model: _on_device(parts, "weights"), f"{model} optimizer": state}
    whole = {**sizes, "gradients": gradients}
    longest = config.samples_per_step * config.generate.engine.max_sequence_tokens
    row = training_row(
        policy_shape(config.model), min(config.packing.tokens_per_row, longest), BYTES[learner.dtype],
        checkpointing=learner.gradient_checkpointing,
        chunk_tokens=learner.logprob_chunk_tokens if learner.logprobs == "chunked" else 0,
    )  # fmt: skip
    return {name: size // learner.ranks for name, size in whole.items()} | {name: int(size) for name, size in row.items()}


def reference_sizes(config: RunConfig) -> dict[str, int]:
    """Return the bytes on one learner rank's device during the forward of its own reference; empty without one."""
    weights = _on_device(learner_parts(config).get("reference", ()), "weights")
    if not weights:
        return {}
    learner = config.learner
    row = forward_row(_reference_shape(config), config.packing.tokens_per_row, BYTES[learner.dtype], learner.logprob_chunk_tokens)
    return {"reference": weights // learner.ranks, "activations of a forward": int(row)}


def _on_device(parts: Iterable[Part], word: str) -> int:
    return sum(part.num_bytes for part in parts if part.place == "device" and word in part.name)


def _reference_shape(config: RunConfig) -> ModelShape:
    path = config.algorithm.reference.path
    return _shape_in(path, "algorithm.reference.path") if path else policy_shape(config.model)


def judging_forward_bytes(config: RunConfig) -> int:
    """Return the bytes that an inference worker needs for one batch: its largest model's, since models take turns."""
    inference = config.inference
    longest = config.most_samples_in_flight * config.generate.engine.max_sequence_tokens
    tokens = min(inference.tokens_per_batch, longest)
    sizes = [
        forward_row(_shape_in(model.path, "inference.reward_models.path"), tokens, BYTES[model.dtype], 0)
        for model in inference.reward_models
    ]
    if config.has_reference_worker:
        sizes.append(forward_row(_reference_shape(config), tokens, BYTES[inference.dtype], min(tokens, JUDGING_CHUNK_TOKENS)))
    return int(max(sizes, default=0))


def learner_parts(config: RunConfig) -> dict[str, tuple[Part, ...]]:
    """Return the memory of all learner ranks together, by model: policy, critic, reference."""
    learner, algorithm, shape = config.learner, config.algorithm, policy_shape(config.model)
    adapters = shape.adapter_parameters(learner.lora)
    trained, frozen = (adapters, shape.parameters) if learner.lora is not None else (shape.parameters, 0)
    parts = {"policy": trained_parts(trained, frozen, learner)}
    critic, reference = algorithm.critic, algorithm.reference
    if critic is not None and critic.kind == "head":
        parts["critic"] = trained_parts(shape.hidden + 1, 0, replace(learner, dtype="float32"))
    elif critic is not None:
        body = stored_elements(critic.path, "algorithm.critic.path") if critic.path else shape.body_parameters
        parts["critic"] = trained_parts(body + shape.hidden + 1, 0, learner)
    if algorithm.needs_reference and reference.where == "learner":
        parts["reference"] = (Part("policy without its adapters", 0),)
        if reference.path or learner.lora is None:
            parts["reference"] = (Part(f"{learner.dtype} weights", _reference_elements(config) * BYTES[learner.dtype]),)
    return parts


def generator_parts(config: RunConfig) -> tuple[Part, ...]:
    """Return the memory of each generator, weights first; empty if its engine has no model or is a server elsewhere."""
    engine, shape = config.generate.engine, policy_shape(config.model)
    if not isinstance(engine, TransformersEngineConfig | VLLMEngineConfig):
        return ()
    held = BYTES[config.learner.dtype if engine.dtype == "auto" else engine.dtype]
    weights = (shape.parameters + shape.adapter_parameters(config.learner.lora)) * held
    if isinstance(engine, TransformersEngineConfig):
        places = cache_rows(engine.slots) * cache_tokens(engine.max_sequence_tokens)
        return Part("weights", weights), Part("KV cache", shape.cached_values * places * held)
    # On a GPU the KV cache takes the remaining memory, unless the config gives a size.
    rest_of_gpu = "" if engine.kv_cache_gib else f"what is left of {engine.gpu_memory_share:.0%} of each GPU"
    whole = Part("weights", weights * engine.data_parallel)
    if engine.device == "cuda" and rest_of_gpu:
        return whole, Part(f"KV cache: {rest_of_gpu}", 0)
    where = "" if engine.device == "cpu" or not rest_of_gpu else f" on a CPU, on a GPU {rest_of_gpu}"
    cache = int((engine.kv_cache_gib or 1.0) * GIB) * engine.tensor_parallel * engine.data_parallel
    return whole, Part(f"KV cache{where}", cache)


def inference_parts(config: RunConfig) -> tuple[Part, ...]:
    """Return the memory of each inference worker, one part per model; empty without such workers."""
    parts = [
        Part(model.name, stored_elements(model.path, "inference.reward_models.path") * BYTES[model.dtype])
        for model in config.inference.reward_models
    ]
    if config.has_reference_worker:
        parts.append(Part("reference", _reference_elements(config) * BYTES[config.inference.dtype]))
    return tuple(parts)


def version_bytes(config: RunConfig) -> int:
    """Return the bytes of one weight version: with LoRA, of the adapters alone."""
    shape, dtype = policy_shape(config.model), config.broadcast.dtype
    sent = shape.parameters if config.learner.lora is None else shape.adapter_parameters(config.learner.lora)
    return sent * BYTES[config.learner.dtype if dtype == "model" else dtype]


def number_of_model(folder: str, field: str) -> int:
    """Return a number from a model's config.json, from its text model's section if it has one; 0: not given."""
    try:
        model = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return int(model.get(field) or model.get("text_config", {}).get(field) or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def stored_elements(path: str, field: str) -> int:
    """Return how many numbers the safetensors files of a folder hold, from their headers.

    Raises:
        ConfigError: There are no such files, or one cannot be read; the message names `field`.
    """
    files = list(Path(path).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{field} {path!r} has no *.safetensors")
    number = 0
    try:
        for file in files:
            size = file.stat().st_size
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header: dict[str, Any] = json.loads(stream.read(length)) if length < size else {}
            ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
            if size < (end := 8 + length + max(ends, default=0)):
                raise ConfigError(f"{field} {path!r}: {file.name} is cut off: it has {size} bytes, not {end}")
            number += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{field} {path!r} has a *.safetensors that cannot be read ({error})") from error
    return number


def _reference_elements(config: RunConfig) -> int:
    path = config.algorithm.reference.path
    return stored_elements(path, "algorithm.reference.path") if path else policy_shape(config.model).parameters


def _shape_in(path: str, field: str) -> ModelShape:
    try:
        content: dict[str, Any] = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{field} {path!r} has no readable config.json ({error}); `asyncrl model import` makes such a folder"
        ) from error
    return shape_of_json(content, f"{field} {path!r}: config.json")


# -- whether it fits ---------------------------------------------------------------------------------------------------


def with_own_memory(config: RunConfig) -> RunConfig:
    """Return the config for a generator beside training: vLLM's memory is limited to its share."""
    engine = config.generate.engine
    if not shares_device(config) or not isinstance(engine, VLLMEngineConfig):
        return config
    share = config.placement.generation_share / most_generators(config)
    budget_bytes = int(config.placement.device_memory_gib * GIB)
    if budget_bytes:
        room_gib = (share * budget_bytes - least_parts(config)[0].num_bytes) / GIB
        engine = replace(engine, kv_cache_gib=min(engine.kv_cache_gib or room_gib, room_gib))
    elif on_gpu(config):
        engine = replace(engine, gpu_memory_share=min(engine.gpu_memory_share, share))
    return replace(config, generate=replace(config.generate, engine=engine))


def memory_bounds(config: RunConfig) -> tuple[float, float, int]:
    """Return the budget shares of one generator and of the learner, and the budget in bytes (0: the whole GPU)."""
    share, budget_bytes = config.placement.generation_share, int(config.placement.device_memory_gib * GIB)
    return (share / most_generators(config), 1 - share, budget_bytes) if shares_device(config) else (1.0, 1.0, 0)


def check_shares(config: RunConfig) -> None:
    """Refuse shares that do not fit, with the sum. If the device's memory is unknown, only the cores are checked.

    Raises:
        ConfigError: The share has no whole core, or training and the minimum for generation do not fit together.
    """
    if not shares_device(config):
        return
    if not on_gpu(config):
        own_cores(config.placement.generation_share, usable_cores(), core_quota())
    budget_bytes = int(config.placement.device_memory_gib * GIB) or gpu_memory_bytes(config)
    if not budget_bytes:
        return
    share, number, beside = config.placement.generation_share, most_generators(config), _training_parts(config)
    training, generation = sum(beside.values()), number * sum(part.num_bytes for part in least_parts(config))
    parts = ", ".join(f"{part.name} {_gib(part.num_bytes)}" for part in least_parts(config)) or "no model"
    sums = (
        f"  training state                {_gib(training)} of {_gib((1 - share) * budget_bytes)} "
        f"((1 - {share:g}) x {_gib(budget_bytes)}): {', '.join(f'{name} {_gib(size)}' for name, size in beside.items())}\n"
        f"  generation, at least          {_gib(generation)} of {_gib(share * budget_bytes)} ({share:g} x {_gib(budget_bytes)}): "
        f"{number} x ({parts})"
    )
    if training + generation > budget_bytes:
        enough = ceil(1000 * max(training / max(1 - share, 1e-9), generation / max(share, 1e-9)) / GIB) / 1000
        raise ConfigError(
            f"placement: training and generation do not fit the device beside each other:\n{sums}\n  set "
            f"placement.device_memory_gib to at least {enough:.3f} GiB if the device has it; fewer "
            "generate.num_workers or slots; learner.optimizer = 'adamw_8bit' or offload_optimizer; or "
            "placement.kind = 'colocated', where they take turns"
        )
    least, most = ceil(100 * generation / budget_bytes) / 100, floor(100 * (1 - training / budget_bytes)) / 100
    if not least <= share <= most:
        asked = f"between {least:.2f} and {most:.2f}" if least <= most else f"near {least:.2f}, and the budget a little larger"
        raise ConfigError(f"placement.generation_share {share:g} does not divide the device's memory:\n{sums}\n  set it {asked}")


def check_phase_room(config: RunConfig) -> None:
    """Refuse a device that is too small for some phase: a device that phases share, or a learner's own with a budget.

    Without `placement.device_memory_gib` the budget of a shared GPU is its whole memory; on a CPU there is then no budget, and
    nothing is refused.

    Raises:
        ConfigError: A phase does not fit; the message has the sum and the options that lower it.
    """
    placement, is_builtin = config.placement, config.learner.kind == "builtin"
    budget_bytes = int(placement.device_memory_gib * GIB) or (gpu_memory_bytes(config) if placement.takes_turns else 0)
    if not budget_bytes or shares_device(config):
        return
    trained = training_sizes(config) if is_builtin else {}  # the memory of outside code is unknown
    stays = {"policy": trained["policy"]} if placement.kind == "hybrid" else {}
    sums: list[tuple[Phase, dict[str, int]]] = [("train", trained)]
    if placement.takes_turns:  # in hybrid the generators use the learner's weights
        held = {
            "KV cache" if part.name.startswith("KV") else "engine weights": part.num_bytes * most_generators(config)
            for part in generator_parts(config)
            if part.name.startswith("KV") or placement.kind != "hybrid"
        }
        sums.insert(0, ("rollout", stays | held))
    if is_builtin and (reference := reference_sizes(config)):
        sums.append(("inference", stays | reference))
    if inference_takes_turns(config):
        named = {
            WORKERS_REFERENCE if part.name == "reference" else f"reward {part.name}": part.num_bytes
            for part in inference_parts(config)
        }
        judges = named | {"activations of a batch": judging_forward_bytes(config)}
        sums.append(("inference", stays | {name: size * config.inference.num_workers for name, size in judges.items()}))
    check_phases(sums, budget_bytes)


def check_engine_cache(config: RunConfig) -> None:
    """Refuse a KV cache of vLLM without room for one sequence.

    Only for a scratch model: a pretrained one may keep less than its shape says (windows, latent attention).

    Raises:
        ConfigError: It is too small; the message has the size that is needed.
    """
    engine, model = config.generate.engine, config.model
    if not isinstance(engine, VLLMEngineConfig) or not isinstance(model, ScratchModel) or not engine.kv_cache_gib:
        return
    held = BYTES[config.learner.dtype if engine.dtype == "auto" else engine.dtype]
    blocks = 1 + ceil(min(engine.max_sequence_tokens + 1, model.max_positions) / VLLM_CPU_BLOCK_TOKENS)  # vLLM holds one back
    tokens = blocks * VLLM_CPU_BLOCK_TOKENS
    needed = policy_shape(model).cached_values * tokens * held / engine.tensor_parallel
    if engine.kv_cache_gib * GIB < needed:
        raise ConfigError(
            f"generate.engine.kv_cache_gib ({engine.kv_cache_gib:g}) has no room for one sequence of "
            f"generate.engine.max_sequence_tokens ({engine.max_sequence_tokens}): set at least {ceil(needed / GIB * 1e6) / 1e6:g}"
        )


def least_parts(config: RunConfig) -> tuple[Part, ...]:
    """Return a generator's minimum memory on one GPU: weights, and the KV cache of all its slots (with vLLM, of one sample)."""
    engine, shape = config.generate.engine, policy_shape(config.model)
    if not isinstance(engine, VLLMEngineConfig):
        return generator_parts(config)
    held = BYTES[config.learner.dtype if engine.dtype == "auto" else engine.dtype]
    num_gpus = len(places_of(config).engine_gpus)  # 0: all ranks of an engine are in host memory
    one = shape.cached_values * engine.max_sequence_tokens * held // (engine.tensor_parallel if num_gpus else 1)
    weights = generator_parts(config)[0].num_bytes // max(num_gpus, 1)
    return Part("weights", weights), Part("KV cache of one sample", one)


def gpu_memory_bytes(config: RunConfig) -> int:
    """Return the memory of the learner's GPU as its driver reports it; 0 without a GPU or a report."""
    gpu = places_of(config).learner_gpu
    told = "" if gpu is None else ask_driver("memory.total", gpu)
    return int(told) << 20 if told.isdigit() else 0


def _training_parts(config: RunConfig) -> dict[str, int]:
    """Return the memory beside generation: the learner with a row, versions to fetch, inference workers on the device."""
    if config.learner.kind != "builtin":
        return {}
    sizes, reference = training_sizes(config), reference_sizes(config)
    if not config.placement.device_memory_gib:  # with a budget it is loaded and freed in turn (learner/train_state.py)
        sizes |= {name: size for name, size in reference.items() if name == "reference"}
    elif sum(reference.values()) > sum(sizes.values()):
        sizes = reference
    if inference_shares_device(config):
        judge = sum(part.num_bytes for part in inference_parts(config)) + judging_forward_bytes(config)
        sizes["inference workers"] = judge * config.inference.num_workers
    if isinstance(with_chosen_medium(config)[0].broadcast.medium, CUDAIPCMedium):
        sizes["weight versions to fetch"] = NUM_SLOTS * version_bytes(config)
    return sizes


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3f} GiB"
