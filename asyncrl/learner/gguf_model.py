"""What a GGUF file holds, in Hugging Face's terms: config, tensors by name, tokenizer.

Invariants: tensors come de-quantised to float32, named and laid out as transformers' own model of that architecture has them;
whatever cannot be carried over exactly (rope scaling, an unknown architecture or text splitter) is refused, never guessed.
The only file that imports gguf (the `tasks` extra). Called by learner/import_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

INSTALL_HINT = "reading a GGUF needs the gguf package; pip install 'asyncrl[tasks]'"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How one GGUF architecture maps to transformers."""

    model_type: str
    rotated_pairs: bool
    """True where the file keeps q and k rows interleaved (even, odd) per head, not in halves as transformers does."""


ARCHITECTURES = {
    "llama": _Architecture("llama", rotated_pairs=True),
    "qwen2": _Architecture("qwen2", rotated_pairs=False),
    "qwen3": _Architecture("qwen3", rotated_pairs=False),
}


class GGUFModel:
    """One open GGUF file of a causal language model.

    Example:
        >>> model = GGUFModel(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
        >>> model.config().hidden_size
        576
    """

    def __init__(self, path: Path) -> None:
        """Open the file (memory-mapped) and check that it can be carried over.

        Raises:
            ConfigError: gguf is missing, the file is not GGUF, or its architecture is not one of `ARCHITECTURES`.
        """
        try:
            from gguf import GGUFReader  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(INSTALL_HINT) from error
        try:
            self._reader = GGUFReader(str(path))
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error
        self.path = path
        self.architecture = str(self.field("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"{path} holds a {self.architecture!r} model; import reads {', '.join(ARCHITECTURES)}. For others, give the "
                "Hugging Face folder of the model instead"
            )
        if "rope_freqs.weight" in self._tensors() or self._own("rope.scaling.type", "none") != "none":
            raise ConfigError(f"{path} uses rope scaling, which import does not carry over; give the Hugging Face folder instead")

    def field(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - GGUF metadata is of any type
        """Return a metadata value, or `default` where the file has none."""
        entry = self._reader.get_field(key)
        return default if entry is None else entry.contents()

    def quantisation(self) -> str:
        """Return the types its weights are stored in, `F32, Q4_1, Q8_0`."""
        return ", ".join(sorted({tensor.tensor_type.name for tensor in self._reader.tensors}))

    def config(self) -> PretrainedConfig:
        """Return the transformers config of this model."""
        from transformers import AutoConfig  # noqa: PLC0415 - heavy

        num_heads, width = self._need("attention.head_count"), self._need("embedding_length")
        head_width = self._own("attention.key_length", self._own("rope.dimension_count", width // num_heads))
        return AutoConfig.for_model(
            ARCHITECTURES[self.architecture].model_type,
            architectures=[ARCHITECTURES[self.architecture].model_type.capitalize() + "ForCausalLM"],
            vocab_size=int(self._tensors()["token_embd.weight"].shape[1]),
            hidden_size=width,
            num_hidden_layers=self._need("block_count"),
            intermediate_size=self._need("feed_forward_length"),
            num_attention_heads=num_heads,
            num_key_value_heads=self._own("attention.head_count_kv", num_heads),
            head_dim=head_width,
            max_position_embeddings=self._need("context_length"),
            # The file keeps a float32; its shortest decimal form is what the model's author wrote.
            rms_norm_eps=float(str(np.float32(self._need("attention.layer_norm_rms_epsilon")))),
            rope_parameters={"rope_type": "default", "rope_theta": float(self._own("rope.freq_base", 10000.0))},
            tie_word_embeddings="output.weight" not in self._tensors(),
            bos_token_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.field("tokenizer.ggml.eos_token_id"),
            pad_token_id=self.field("tokenizer.ggml.padding_token_id"),
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor, float32, under transformers' name. Raises ConfigError for a name that has none."""
        import gguf  # noqa: PLC0415 - an extra
        import torch  # noqa: PLC0415 - heavy

        heads = {"attn_q": self._need("attention.head_count")}
        heads["attn_k"] = self._own("attention.head_count_kv", heads["attn_q"])
        for name, tensor in self._tensors().items():
            values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            values = values.reshape([int(size) for size in reversed(tensor.shape)])
            kind = name.split(".")[-2]
            if ARCHITECTURES[self.architecture].rotated_pairs and kind in heads:
                values = halved(values, heads[kind])
            yield self._hugging_face_name(name), values

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return a fast tokenizer with the file's vocabulary, merges, special tokens and chat template."""
        from asyncrl.learner.gguf_tokenizer import build_tokenizer  # noqa: PLC0415 - heavy

        return build_tokenizer(self)

    def _tensors(self) -> dict[str, Any]:
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def _own(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - as `field`
        return self.field(f"{self.architecture}.{key}", default)

    def _need(self, key: str) -> Any:  # noqa: ANN401 - as `field`
        value = self._own(key)
        if value is None:
            raise ConfigError(f"{self.path} lacks {self.architecture}.{key}; the file is incomplete")
        return value

    def _hugging_face_name(self, name: str) -> str:
        parts = name.split(".")
        kind, suffix = parts[-2], parts[-1]
        if parts[0] == "blk" and len(parts) == 4 and kind in _LAYER_NAMES:
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[kind]}.{suffix}"
        if len(parts) == 2 and kind in _TOP_NAMES:
            return f"{_TOP_NAMES[kind]}.{suffix}"
        raise ConfigError(
            f"{self.path} has a tensor {name!r}, unknown in a {self.architecture} model; give the Hugging Face folder"
        )


def halved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of q and k rows: (even, odd) pairs per head back to two halves.

    Args:
        rows: [num_heads * head_width, ...], a weight or a bias.
        num_heads: Heads of this projection.

    Returns:
        The same shape, rows in transformers' order.
    """
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape).contiguous()
