"""Prompts into token ids and completions into text: by the model's own tokenizer, or, for the fake engine, by bytes.

Completions are decoded once, for rewards and people; training uses the sampled ids and never this text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import GenerationError
from asyncrl.schema.samples import PreferenceAnswers, Prompt, ids_from_bytes

_answers_decoder = msgspec.json.Decoder(PreferenceAnswers)


class TokenizerCodec:
    """The tokenizer in the model's folder, loaded when the first prompt needs it."""

    def __init__(self, model_folder: Path, *, trust_remote_code: bool = False, replays: bool = False) -> None:
        self._model_folder, self._replays = model_folder, replays
        self._trust_remote_code = trust_remote_code
        self._tokenizer: Any = None
        self._encode: Callable[[str], list[int]]
        self._decode: Callable[[list[int]], str]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids: `token_ids` as given, `messages` by the chat template, or `text` as the tokenizer does it.

        Raises:
            GenerationError: The prompt cannot be tokenised.
        """
        if prompt.token_ids:
            return tuple(ids_from_bytes(prompt.token_ids).tolist())
        tokenizer = self._loaded()
        try:
            if prompt.messages:
                turns = [{"role": message.role, "content": message.content} for message in prompt.messages]
                ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
            else:
                ids = self._encode(prompt.text)
        except Exception as error:
            raise GenerationError(f"prompt {prompt.prompt_id!r} cannot be tokenised: {type(error).__name__}: {error}") from error
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return a completion's text, special tokens left out and spaces left as they are.

        Raises:
            GenerationError: An id is none of the tokenizer's.
        """
        self._loaded()
        try:
            text: str = self._decode(list(token_ids))
        except Exception as error:
            raise GenerationError(f"a completion cannot be turned into text: {type(error).__name__}: {error}") from error
        return text

    def answer(self, prompt: Prompt, index: int) -> tuple[int, ...]:
        """Return what member 0 (chosen) or 1 (rejected) is given back where the engine replays a task; otherwise nothing.

        Raises:
            GenerationError: The prompt is of no preferences task, there is no such answer, or it cannot be tokenised.
        """
        if not self._replays:
            return ()
        try:
            answers = _answers_decoder.decode(prompt.reference_json)
        except msgspec.MsgspecError as error:
            raise GenerationError(
                f"prompt {prompt.prompt_id!r} has no chosen and rejected answer to give back: {error}"
            ) from error
        if index > 1:
            raise GenerationError(f"prompt {prompt.prompt_id!r} has a chosen answer (0) and a rejected one (1), but none {index}")
        text, tokenizer = answers.rejected if index else answers.chosen, self._loaded()
        if tokenizer.eos_token_id is None:
            raise GenerationError(f"the tokenizer in {self._model_folder} has no end-of-sequence token")
        try:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:
            raise GenerationError(f"answer {text[:80]!r} cannot be tokenised: {type(error).__name__}: {error}") from error
        return (*ids, tokenizer.eos_token_id)  # as a model would have sampled it

    def _loaded(self) -> Any:  # noqa: ANN401 - transformers is untyped
        if self._tokenizer is None:
            modules = import_module("transformers")
            try:
                self._tokenizer = modules.AutoTokenizer.from_pretrained(
                    self._model_folder, local_files_only=True, trust_remote_code=self._trust_remote_code
                )
            except Exception as error:
                raise GenerationError(
                    f"cannot load a tokenizer from {self._model_folder}: {type(error).__name__}: {error}"
                ) from error
            tokenizer = self._tokenizer
            self._encode = lambda text: tokenizer(text)["input_ids"]
            self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            # Plain text is done by the tokenizer's own backend where nothing is in between: a fifth of the time.
            if type(tokenizer) is modules.TokenizersBackend:
                backend = tokenizer.backend_tokenizer
                backend.no_truncation()
                backend.no_padding()
                backend.encode_special_tokens = tokenizer.split_special_tokens
                self._encode = lambda text: backend.encode(text).ids
                self._decode = lambda ids: backend.decode(ids, skip_special_tokens=True)
        return self._tokenizer


class ByteCodec:
    """No tokenizer: one token a byte, folded into the vocabulary; text is the ids, separated by spaces."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return `token_ids` as given, else the bytes of the text (or of all messages)."""
        if prompt.token_ids:
            return tuple(ids_from_bytes(prompt.token_ids).tolist())
        text = "\n".join(message.content for message in prompt.messages) if prompt.messages else prompt.text
        return tuple(byte % self._vocabulary_size for byte in text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the ids as words."""
        return " ".join(map(str, token_ids))

    def answer(self, prompt: Prompt, index: int) -> tuple[int, ...]:  # noqa: ARG002 - the protocol's signature
        """Return nothing: completions are generated."""
        return ()


PromptCodec = TokenizerCodec | ByteCodec
"""What tokenises prompts and decodes completions."""
