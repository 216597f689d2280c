"""Causal language models: required contents of a folder, and checks of a model's forward.

Invariants: nothing is downloaded; a model that changes its logits after the output layer is refused, because logprobs.py runs the
output layer separately.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.models.logprobs import run_inside

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
HEAD_TOLERANCE = 1e-3

transformers.utils.logging.disable_progress_bar()


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not a Hugging Face causal language model.

    Raises:
        ConfigError: A file is missing; the message names the folder and the file.
    """
    advice = "`asyncrl model import` makes such a folder from a GGUF or a Hugging Face checkout"
    if not folder.is_dir():
        raise ConfigError(f"model.path: there is no folder {folder}; {advice}")
    missing = missing_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZER_FILES[:3])})")
    if missing:
        raise ConfigError(f"model.path: {folder} has no {', no '.join(missing)}; {advice}")


def missing_weights(folder: Path) -> list[str]:
    """Return which of config and weights are missing in a folder."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def refuse_adapters(folder: Path) -> None:
    """Refuse LoRA adapters, alone or beside their base, where another model begins: they would be lost without notice.

    Raises:
        ConfigError: The folder has adapters.
    """
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} holds LoRA adapters: merge them into their base (peft's merge_and_unload, then "
            "save_pretrained), and give that folder"
        )


def rope_positions(config: PreTrainedConfig, *kinds: str) -> int:
    """Return the longest sequence whose rotary frequencies depend on positions alone; 0: a sequence of any length.

    Beyond it, `longrope` and `dynamic` depend on the longest sequence of a forward in transformers; `longrope` depends on
    max_model_len in vLLM.

    Args:
        config: The model's config.
        kinds: Count only these; empty: both.
    """
    text = config.get_text_config()
    rope, found = getattr(text, "rope_parameters", None) or {}, []
    for one in (each for each in (rope, *rope.values()) if isinstance(each, dict)):
        kind = one.get("rope_type")
        if kind in (kinds or ("longrope", "dynamic")):
            original = one.get("original_max_position_embeddings") if kind == "longrope" else None
            found.append(original or text.max_position_embeddings)
    return min(found, default=0)


def most_positions(config: PreTrainedConfig) -> int:
    """Return the longest sequence that the model was made for; 0: it does not say, or its rotary frequencies are stretched."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)} & {"yarn", "linear"}:
        return 0
    return rope_positions(config) or getattr(text, "max_position_embeddings", 0) or 0


def make_savable(model: PreTrainedModel) -> None:
    """Reduce the model's generation_config to its token ids if transformers would refuse to save it."""
    if (given := model.generation_config) is None:
        return
    try:
        given.validate(strict=True)
    except ValueError:
        ids = {name: getattr(given, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if ids["pad_token_id"] is not None and ids["pad_token_id"] < 0:
            del ids["pad_token_id"]
        model.generation_config = GenerationConfig(**ids)


def open_folder(field: str, folder: Path, way: Any, dtype: str, *, needs_head: bool = True, **options: object) -> Any:  # noqa: ANN401
    """Open a folder's model with a class of transformers.

    Args:
        field: Field of the config, for errors.
        folder: A folder with config and safetensors.
        way: The class.
        dtype: Dtype of the weights.
        needs_head: Whether more than `base_model` is used; if not, the folder needs only the weights of `base_model`.
        options: Further arguments of its `from_pretrained`.

    Raises:
        ConfigError: The folder is incomplete (for example, a weight is missing), or the class cannot open it.
    """
    if missing := missing_weights(folder):
        raise ConfigError(f"{field}: {folder} has no {', no '.join(missing)}")
    try:
        model, loading = way.from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True, **options
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{field}: {way.__name__} cannot open the model in {folder}: {error}") from error
    # Transformers makes random ones of what is missing. Parameters alone: checkpoints of several ranks have no buffers.
    missing = [name for name, _ in model.named_parameters() if name in loading["missing_keys"]]
    if not needs_head:
        missing = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if missing:
        names = f"{', '.join(missing[:4])} ({len(missing)} in all)"
        raise ConfigError(f"{field}: {folder} has no weights for {names}: it holds no whole model for {way.__name__}")
    return model


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Refuse models that change their logits after the output layer (soft caps, scales).

    Both sides compute the same products of the same shapes, so rounding in a 16-bit model makes no difference.

    Raises:
        ConfigError: The logits differ from those of the output layer; the message says by how much.
    """
    token_ids = torch.arange(min(8, model.config.get_text_config().vocab_size), device=model.device).unsqueeze(0)
    body, head = model.base_model, model.get_output_embeddings()
    ours = run_inside(model, lambda: head(body(token_ids, use_cache=False).last_hidden_state))
    theirs = model(input_ids=token_ids, use_cache=False).logits
    error = (ours.float().log_softmax(-1) - theirs.float().log_softmax(-1)).abs().max().item()
    if error > HEAD_TOLERANCE:
        raise ConfigError(
            f"{json.dumps(model.config.model_type)} cannot be trained or scored: its logits are not those of its output layer "
            f"(largest difference {error:.2g}, allowed {HEAD_TOLERANCE:g}); it probably scales or caps them"
        )
