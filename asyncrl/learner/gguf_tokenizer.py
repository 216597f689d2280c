"""A GGUF file's tokenizer as a Hugging Face fast tokenizer.

Invariants: ids are the file's; control tokens are special tokens, skipped on decoding; an unknown text
splitter is refused, because a wrong one gives tokens the model was never trained on, silently.
Called by learner/gguf_model.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.learner.gguf_model import GGUFModel

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_tokenizer(model: GGUFModel) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `model` carries.

    Raises:
        ConfigError: It is not a byte-level BPE, or its text splitter is not one of `splitter`'s.
    """
    kind = model.field("tokenizer.ggml.model", "none")
    if kind != "gpt2":
        raise ConfigError(
            f"{model.path} has a {kind!r} tokenizer; import reads byte-level BPE ('gpt2'). Give the Hugging Face folder instead"
        )
    tokens: list[str] = model.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in model.field("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    pre_tokenizer, normalizer = splitter(model.field("tokenizer.ggml.pre", "default"), str(model.path))
    backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = _post_processor(model, tokens)
    _add_special(backend, tokens, model.field("tokenizer.ggml.token_type", []))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: model.field(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=model.field(f"{model.architecture}.context_length"),
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
    tokenizer.chat_template = model.field("tokenizer.chat_template")
    return tokenizer


def splitter(name: str, source: str) -> tuple[pre_tokenizers.PreTokenizer, normalizers.Normalizer | None]:
    """Return how text is cut before BPE, by llama.cpp's name for it.

    Raises:
        ConfigError: The name is unknown.
    """
    if name in {"smollm", "refact", "starcoder", "command-r"}:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(cut=True)]), None
    if name in {"gpt-2", "default"}:
        return _byte_level(cut=True), None
    if name in {"llama-bpe", "llama3", "llama-v3"}:
        return _by_pattern(_WORDS % 3), None
    if name == "qwen2":
        return _by_pattern(_WORDS % 1), normalizers.NFC()
    raise ConfigError(f"{source} splits text by {name!r}, which import does not know; give the Hugging Face folder instead")


def _byte_level(*, cut: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(cut=False)])


def _post_processor(model: GGUFModel, tokens: list[str]) -> Any:  # noqa: ANN401 - tokenizers has no base class for them
    """Put the begin token before each text where the file says so; else only keep offsets right."""
    bos = model.field("tokenizer.ggml.bos_token_id")
    if not model.field("tokenizer.ggml.add_bos_token", default=False) or bos is None:
        return processors.ByteLevel(trim_offsets=False)
    token = tokens[bos]
    return processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token} $B:1", special_tokens=[(token, bos)])


def _add_special(backend: Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    for token, token_type in zip(tokens, token_types, strict=False):
        if token_type == CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
