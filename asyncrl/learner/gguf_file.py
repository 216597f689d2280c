"""A GGUF file of a Llama (SmolLM2 is one) in transformers' terms: config, tensors by name, tokenizer.

Invariants: tensors come de-quantised to float32, named and laid out as transformers' own model has them; ids are the file's; what
cannot be carried over exactly (another architecture or tokenizer, rope scaling) is refused, never guessed. A wrong text splitter
would silently give tokens the model was never trained on. transformers' `gguf_file=` takes one that does not split all digits.
The only file that imports gguf (the `tasks` extra).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.errors import ConfigError

SPLITTERS = {"smollm"}
"""Values of `tokenizer.ggml.pre` that are read: every digit is a piece of its own, the rest is cut as GPT-2 does."""
CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""
_ADVICE = "give the Hugging Face folder of the model instead"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens: transformers' name for each, and the file's."""


class GGUFFile:
    """One open GGUF file.

    Example:
        >>> GGUFFile(Path("SmolLM2-135M-Instruct.Q4_1.gguf")).config().hidden_size  # doctest: +SKIP
        576
    """

    def __init__(self, path: Path) -> None:
        """Open the file (memory-mapped) and check that it can be carried over.

        Raises:
            ConfigError: gguf is missing, the file is not GGUF, or it is not a Llama with a byte-level BPE tokenizer.
        """
        try:
            import gguf  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError("reading a GGUF needs the gguf package; pip install 'asyncrl[tasks]'") from error
        try:
            self._reader = gguf.GGUFReader(str(path))
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error
        self._path, self._gguf = path, gguf
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        wanted = {"general.architecture": {"llama"}, "tokenizer.ggml.model": {"gpt2"}, "tokenizer.ggml.pre": SPLITTERS}
        for key, known in wanted.items():
            if self.field(key) not in known:
                raise ConfigError(f"{path} has {key} = {self.field(key)!r}; import reads {', '.join(known)}. Else {_ADVICE}")
        if "rope_freqs.weight" in self._tensors or self.field("llama.rope.scaling.type", "none") != "none":
            raise ConfigError(f"{path} uses rope scaling, which import does not carry over; {_ADVICE}")

    def field(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - GGUF metadata is of any type
        """Return a metadata value, or `default` where the file has none."""
        entry = self._reader.get_field(key)
        return default if entry is None else entry.contents()

    def quantisation(self) -> str:
        """Return the types its weights are stored in, `F32, Q4_1, Q8_0`."""
        return ", ".join(sorted({tensor.tensor_type.name for tensor in self._tensors.values()}))

    def config(self) -> LlamaConfig:
        """Return the transformers config of this model."""
        num_heads, width = self._need("attention.head_count"), self._need("embedding_length")
        return LlamaConfig(
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            hidden_size=width,
            num_hidden_layers=self._need("block_count"),
            intermediate_size=self._need("feed_forward_length"),
            num_attention_heads=num_heads,
            num_key_value_heads=self.field("llama.attention.head_count_kv", num_heads),
            head_dim=self.field("llama.attention.key_length", self.field("llama.rope.dimension_count", width // num_heads)),
            max_position_embeddings=self._need("context_length"),
            # The file keeps a float32; its shortest decimal form is what the model's author wrote.
            rms_norm_eps=float(str(np.float32(self._need("attention.layer_norm_rms_epsilon")))),
            rope_parameters={"rope_type": "default", "rope_theta": float(self.field("llama.rope.freq_base", 10000.0))},
            tie_word_embeddings="output.weight" not in self._tensors,
            **{f"{name}_token_id": self.field(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()},
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return each tensor, float32, under transformers' name.

        Raises:
            ConfigError: A tensor has a name that a Llama does not have.
        """
        config, found = self.config(), dict[str, torch.Tensor]()
        with torch.device("meta"):
            own = LlamaForCausalLM(config).state_dict()
        stored_as = self._gguf.get_tensor_name_map(self._gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        names = {stored_as.get_name(name, try_suffixes=(".weight",)): name for name in own}
        if unknown := self._tensors.keys() - names.keys():
            raise ConfigError(f"{self._path} has a tensor {min(unknown)!r}, unknown in a llama model; {_ADVICE}")
        for stored, tensor in self._tensors.items():
            values = torch.from_numpy(np.array(self._gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            values = values.reshape([int(size) for size in reversed(tensor.shape)])
            if heads := {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stored.split(".")[-2]):
                # llama.cpp keeps the rows of a head as (even, odd) pairs, transformers as two halves.
                half = values.shape[0] // heads // 2
                values = values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape).contiguous()
            found[names[stored]] = values
        return found

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a fast tokenizer with the file's vocabulary, merges, special tokens and chat template."""
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self.field("tokenizer.ggml.merges")]
        backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        ids = {f"{name}_token": self.field(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
        if self.field("tokenizer.ggml.add_bos_token", default=False) and ids["bos_token"] is not None:
            bos = tokens[ids["bos_token"]]
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, ids["bos_token"])]
            )
        for token, kind in zip(tokens, self.field("tokenizer.ggml.token_type", []), strict=False):
            if kind == CONTROL:
                backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif kind == USER_DEFINED:
                backend.add_tokens([AddedToken(token, special=False, normalized=False)])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            clean_up_tokenization_spaces=False,
            model_max_length=self._need("context_length"),
            **{name: tokens[index] for name, index in ids.items() if index is not None},
        )
        tokenizer.chat_template = self.field("tokenizer.chat_template")
        return tokenizer

    def _need(self, key: str) -> Any:  # noqa: ANN401 - as `field`
        value = self.field(f"llama.{key}")
        if value is None:
            raise ConfigError(f"{self._path} lacks llama.{key}; the file is incomplete")
        return value
