"""`--dry-run`: the resolved config and what follows from it, before anything starts.

Memory figures are first-order sums of what must be resident (formulas in the text); called by the CLI.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from asyncrl.config.load import dump_config
from asyncrl.config.run import RunConfig
from asyncrl.config.stages import ScratchModel, TransformersEngineConfig
from asyncrl.control.process_plan import plan_processes
from asyncrl.errors import ConfigError

BYTES = {"float32": 4, "bfloat16": 2}
CHARACTER_VOCABULARY = 64
"""Upper bound for the character tokenizers of scratch models."""


def describe(config: RunConfig) -> str:
    """Return the resolved TOML and the derived quantities as text."""
    lines = [dump_config(config), "# derived"]
    lines += [f"# {name:32} {value}" for name, value in derived(config).items()]
    return "\n".join(lines)


def derived(config: RunConfig) -> dict[str, str]:
    """Return what follows from the config, by name, with the formula where there is one.

    Raises:
        ConfigError: A pretrained model's folder has no readable config.json.
    """
    algorithm, engine = config.algorithm, config.generate.engine
    parameters = count_parameters(config)
    learner_bytes = parameters * BYTES[config.learner.dtype] * 4
    sent_bytes = parameters * BYTES[_sent_dtype(config)]
    engine_bytes = parameters * BYTES[getattr(engine, "dtype", "float32")] + _kv_bytes(config)
    return {
        "groups per step": f"{algorithm.groups_per_step}",
        "samples per step": f"{config.samples_per_step}  ({algorithm.groups_per_step} groups x {algorithm.members_per_group})",
        "most groups issued and not trained": (
            f"{config.most_groups_ahead}  ((max_staleness {config.buffer.max_staleness} + 1) x {algorithm.groups_per_step})"
        ),
        "most samples in flight": f"{config.most_samples_in_flight}",
        "slots over all generators": f"{config.generate.num_workers * engine.num_slots}",
        "samples the whole run trains": f"{config.samples_per_step * config.num_steps}",
        "most tokens of one sample": f"{engine.max_sequence_tokens}",
        "parameters": f"{parameters:,}",
        "learner memory": f"{_mib(learner_bytes)} + activations  (weights, gradients, two Adam moments, {config.learner.dtype})",
        "memory of each generator": f"{_mib(engine_bytes)}  (weights and KV cache)",
        "bytes of one weight version": f"{_mib(sent_bytes)}  ({config.broadcast.medium.__struct_config__.tag})",
        **_inference(config, parameters),
        "processes": _processes(config),
    }


def _processes(config: RunConfig) -> str:
    counts: Counter[str] = Counter(item.kind for item in plan_processes(config))
    names = {"generator": "generators", "reward": "reward workers", "inference": "inference workers"}
    parts = ["1 controller", *(f"{counts[kind]} {plural}" for kind, plural in names.items() if counts[kind])]
    return ", ".join([*parts, f"{counts['learner']} learner" if counts["learner"] else "learner outside"])


def _inference(config: RunConfig, parameters: int) -> dict[str, str]:
    """Return what an inference worker holds; nothing where there is none."""
    if not config.needs_inference:
        return {}
    sizes = {model.name: _weight_bytes(model.path, "inference.reward_models.path") for model in config.inference.reward_models}
    if config.has_reference_worker:
        path = config.algorithm.reference.path
        own = parameters * BYTES[config.inference.dtype]
        sizes["reference"] = _weight_bytes(path, "algorithm.reference.path") if path else own
    return {"memory of each inference worker": f"{_mib(sum(sizes.values()))} + activations  ({', '.join(sizes)})"}


def _weight_bytes(path: str, field: str) -> int:
    files = list(Path(path).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{field} {path!r} has no *.safetensors")
    return sum(file.stat().st_size for file in files)


def count_parameters(config: RunConfig) -> int:
    """Return the number of parameters of the policy, of a Llama-like layout where the model is given by its config.json."""
    model = config.model
    if isinstance(model, ScratchModel):
        shape = (model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads or model.num_heads,
                 model.intermediate_size or 4 * model.hidden_size, CHARACTER_VOCABULARY, model.tie_embeddings)  # fmt: skip
        return _llama_parameters(*shape)
    raw = _model_json(model.path)
    heads = raw["num_attention_heads"]
    return _llama_parameters(
        raw["hidden_size"], raw["num_hidden_layers"], heads, raw.get("num_key_value_heads") or heads,
        raw["intermediate_size"], raw["vocab_size"], bool(raw.get("tie_word_embeddings", False)),
    )  # fmt: skip


def _llama_parameters(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, tied: bool) -> int:
    attention = hidden * hidden * 2 + 2 * hidden * (hidden // heads) * kv_heads
    block = attention + 3 * hidden * intermediate + 2 * hidden
    return layers * block + vocab * hidden * (1 if tied else 2) + hidden


def _kv_bytes(config: RunConfig) -> int:
    """Return keys and values of every slot: 2 x layers x kv heads x head size x tokens x slots."""
    engine, model = config.generate.engine, config.model
    if not isinstance(engine, TransformersEngineConfig):
        return 0
    if isinstance(model, ScratchModel):
        layers, width = model.num_layers, model.hidden_size // model.num_heads * (model.num_kv_heads or model.num_heads)
    else:
        raw = _model_json(model.path)
        heads = raw["num_attention_heads"]
        layers, width = raw["num_hidden_layers"], raw["hidden_size"] // heads * (raw.get("num_key_value_heads") or heads)
    return 2 * layers * width * engine.max_sequence_tokens * engine.num_slots * BYTES[engine.dtype]


def _model_json(path: str) -> dict[str, int]:
    file = Path(path) / "config.json"
    try:
        content: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path {path!r} has no readable config.json ({error}); `asyncrl model import` makes such a folder"
        ) from error
    return content


def _sent_dtype(config: RunConfig) -> str:
    return config.learner.dtype if config.broadcast.dtype == "model" else config.broadcast.dtype


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
