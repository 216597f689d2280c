"""What each process must have resident, and what a pass takes beside it: first-order sums from the config and folders' headers.

Nothing is opened but config.json and the headers of safetensors files. Every refusal of a plan that cannot fit adds these up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.generate import TransformersEngineConfig, VLLMEngineConfig
from asyncrl.config.learner import ModelConfig, ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.models.memory import BYTES, ModelShape, Part, forward_row, shape_of_json, trained_parts, training_row

GIB = 1 << 30
JUDGING_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once in a reference on an inference worker (inference/models.py)."""
CHARACTER_VOCABULARY = 64
"""Upper bound for the character tokenizers of scratch models."""


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
    """Return what one rank of the learner has on its device while it trains: weights, state, gradients, one row in the making."""
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
    """Return what one rank of the learner has on its device while it reads a reference of its own; nothing where it has none."""
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
    """Return what an inference worker needs for one batch, by the largest of its models: they judge one after the other."""
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
    """Return what the learner's ranks hold together, by model: policy, critic, reference."""
    learner, algorithm, shape = config.learner, config.algorithm, policy_shape(config.model)
    adapters = shape.adapter_parameters(learner.lora)
    trained, frozen = (adapters, shape.parameters) if learner.lora is not None else (shape.parameters, 0)
    parts = {"policy": trained_parts(trained, frozen, learner)}
    critic, reference = algorithm.critic, algorithm.reference
    if critic is not None and critic.kind == "head":
        parts["critic"] = trained_parts(shape.hidden + 1, 0, msgspec.structs.replace(learner, dtype="float32"))
    elif critic is not None:
        body = stored_elements(critic.path, "algorithm.critic.path") if critic.path else shape.body_parameters
        parts["critic"] = trained_parts(body + shape.hidden + 1, 0, learner)
    if algorithm.needs_reference and reference.where == "learner":
        parts["reference"] = (Part("policy without its adapters", 0),)
        if reference.path or learner.lora is None:
            parts["reference"] = (Part(f"{learner.dtype} weights", _reference_elements(config) * BYTES[learner.dtype]),)
    return parts


def generator_parts(config: RunConfig) -> tuple[Part, ...]:
    """Return what each generator holds; nothing where its engine has no model, or has it on a server elsewhere."""
    engine, shape = config.generate.engine, policy_shape(config.model)
    if isinstance(engine, VLLMEngineConfig):
        held = BYTES[config.learner.dtype if engine.dtype == "auto" else engine.dtype]
        whole = (shape.parameters + shape.adapter_parameters(config.learner.lora)) * held * engine.data_parallel
        # On a GPU the KV cache is what room there is, unless the config says how much.
        rest_of_gpu = "" if engine.kv_cache_gib else f"what is left of {engine.gpu_memory_share:.0%} of each GPU"
        if engine.device == "cuda" and rest_of_gpu:
            return Part("weights", whole), Part(f"KV cache: {rest_of_gpu}", 0)
        on_gpu = "" if engine.device == "cpu" or not rest_of_gpu else f" on a CPU, on a GPU {rest_of_gpu}"
        cache = int((engine.kv_cache_gib or 1.0) * GIB) * engine.tensor_parallel * engine.data_parallel
        return Part("weights", whole), Part(f"KV cache{on_gpu}", cache)
    if not isinstance(engine, TransformersEngineConfig):
        return ()
    held = BYTES[engine.dtype]
    weights = (shape.parameters + shape.adapter_parameters(config.learner.lora)) * held
    return Part("weights", weights), Part("KV cache", shape.cached_values * engine.max_sequence_tokens * engine.slots * held)


def inference_parts(config: RunConfig) -> tuple[Part, ...]:
    """Return what each inference worker holds, a part a model; nothing where there is none."""
    parts = [
        Part(model.name, stored_elements(model.path, "inference.reward_models.path") * BYTES[model.dtype])
        for model in config.inference.reward_models
    ]
    if config.has_reference_worker:
        parts.append(Part("reference", _reference_elements(config) * BYTES[config.inference.dtype]))
    return tuple(parts)


def version_bytes(config: RunConfig) -> int:
    """Return the bytes of one weight version: of the adapters alone under LoRA."""
    shape, dtype = policy_shape(config.model), config.broadcast.dtype
    sent = shape.parameters if config.learner.lora is None else shape.adapter_parameters(config.learner.lora)
    return sent * BYTES[config.learner.dtype if dtype == "model" else dtype]


def number_of_model(folder: str, field: str) -> int:
    """Return a number that a model's config.json says, of its text model where that has one of its own; 0: it does not say."""
    try:
        model = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return int(model.get(field) or model.get("text_config", {}).get(field) or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def stored_elements(path: str, field: str) -> int:
    """Return how many numbers the safetensors files of a folder hold, from their headers.

    Raises:
        ConfigError: There are none, or one is no safetensors file; `field` is whose path it is.
    """
    files = list(Path(path).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{field} {path!r} has no *.safetensors")
    number = 0
    try:
        for file in files:
            with file.open("rb") as stream:
                header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
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
