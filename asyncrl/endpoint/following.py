"""The answer to one request, streamed or whole: the tokens of its group become text, and text becomes tool calls.

Invariants: the streamed tokens are those of the trained sample, or the request ends with an error (if a generator is lost,
another one continues its group and may sample other tokens). The streamed parts of a text, joined, are the text of all tokens:
text that may still change is held back. If a tokenizer decodes the bytes of an incomplete last character differently from
before, the parts end with the last complete character.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from asyncrl.endpoint.openai_schema import AnswerWriter, Choice
from asyncrl.errors import RunError
from asyncrl.groups import GroupStream
from asyncrl.schema.samples import ScoredGroup, ids_from_bytes, logprobs_from_bytes

OPENING, CLOSING = "<tool_call>", "</tool_call>"
"""Markers around a tool call, which is JSON with `name` and `arguments` (or `parameters`): the form of Hermes and Qwen."""
_CALL = re.compile(rf"{OPENING}\s*(.*?)\s*(?:{CLOSING}|$)", re.DOTALL)
UNFINISHED = "\ufffd"
"""The text that a tokenizer returns for the bytes of an incomplete character."""
_OTHER_TOKENS = "a generator or the newest weights were lost, and other tokens were sampled; ask again"


class Following:
    """A request's group, and the writer of its answer."""

    def __init__(self, writer: AnswerWriter, stream: GroupStream, tokenizer: Any, has_tools: bool) -> None:  # noqa: ANN401
        self.writer, self.stream = writer, stream
        self._tokenizer, self._has_tools = tokenizer, has_tools
        self._decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._texts: dict[int, TextStream] = {}
        """By member: the streamed token ids."""

    def choices(self, group: ScoredGroup) -> list[Choice]:
        """Return the choices of an answer that is not streamed."""
        choices = []
        for number, member in enumerate(group.members):
            sample = member.sample
            text, calls = tool_calls(sample.text) if self._has_tools else (sample.text, [])
            tokens = self._tokens(ids_from_bytes(sample.token_ids).tolist(), sample.logprobs)
            choices.append(Choice(index=number, text=text, calls=calls, tokens=tokens, finish_reason=sample.finish_reason))
        return choices

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream until the group is ready.

        Raises:
            RunError: Generation restarted and sampled other tokens.
        """
        async with contextlib.aclosing(self.stream.progress()) as pieces:
            async for piece in pieces:
                is_first, text = piece.index not in self._texts, self._text(piece.index)
                ids = ids_from_bytes(piece.token_ids).tolist()
                known = text.token_ids[piece.start : piece.start + len(ids)]
                if piece.start > len(text.token_ids) or known != ids[: len(known)]:
                    raise RunError(_OTHER_TOKENS)
                if new := ids[len(known) :]:  # otherwise a restarted generation repeats the streamed tokens
                    tokens = self._tokens(new, piece.logprobs[4 * len(known) :])
                    yield self.writer.chunk(Choice(index=piece.index, text=text.add(new), tokens=tokens, is_first=is_first))

    def last_chunks(self, group: ScoredGroup) -> Iterator[dict[str, Any]]:
        """Yield the last event of each choice.

        Raises:
            RunError: A sample differs from its streamed tokens.
        """
        for number, member in enumerate(group.members):
            sample = member.sample
            is_first, text = sample.index not in self._texts, self._text(sample.index)
            if text.token_ids != ids_from_bytes(sample.token_ids).tolist():
                raise RunError(_OTHER_TOKENS)
            (rest, calls), reason = text.end(sample.text), sample.finish_reason
            yield self.writer.chunk(Choice(index=number, text=rest, calls=calls, finish_reason=reason, is_first=is_first))

    def _text(self, index: int) -> TextStream:
        return self._texts.setdefault(index, TextStream(self._decode, has_tools=self._has_tools))

    def _tokens(self, ids: Sequence[int], logprobs: bytes) -> list[tuple[int, str, float]]:
        texts = (self._tokenizer.decode([token]) if self.writer.has_logprobs else "" for token in ids)
        return list(zip(ids, texts, logprobs_from_bytes(logprobs).tolist(), strict=True))


def versions_of(group: ScoredGroup) -> str:
    """Return the versions that sampled a group, in words."""
    versions = [int(version) for member in group.members for version in ids_from_bytes(member.sample.versions)]
    return f"version {min(versions)}" if min(versions) == max(versions) else f"versions {min(versions)} to {max(versions)}"


class TextStream:
    """The text of one sample whose tokens arrive in parts.

    Args:
        decode: Returns the text of tokens, by the method for the sample's text.
        has_tools: Whether the beginning of a tool call is held back, for `tool_calls`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, has_tools: bool) -> None:
        self.token_ids: list[int] = []
        self.told = ""
        """The text returned so far."""
        self._decode, self._has_tools = decode, has_tools
        self._known, self._whole, self._context = "", 0, 0
        """The text so far; how many tokens are in it; from which of them on a decoder is given them, so that it knows what is
        before."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the new text that can be streamed."""
        self.token_ids += token_ids
        before = self._decode(self.token_ids[self._context : self._whole])
        text = self._decode(self.token_ids[self._context :])
        if len(text) > len(before) and not text.endswith(UNFINISHED):
            self._known += text[len(before) :]
            self._context, self._whole = self._whole, len(self.token_ids)
        known = self._known
        if self._has_tools:
            known, opening, _ = known.partition(OPENING)
            if not opening:  # a possible beginning of a tool call is held back
                sizes = range(min(len(OPENING) - 1, len(known)), 0, -1)
                known = known[: len(known) - next((size for size in sizes if OPENING.startswith(known[-size:])), 0)]
        return self._tell(known)

    def end(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the whole text, and its tool calls if they are wanted."""
        if not text.startswith(self.told):
            return "", []
        plain, calls = tool_calls(text) if self._has_tools else (text, [])
        return self._tell(plain), calls

    def _tell(self, text: str) -> str:
        part = text[len(self.told) :]
        self.told += part
        return part


def tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the first tool call, and the tool calls; if one cannot be parsed, the whole text and no calls."""
    calls: list[dict[str, Any]] = []
    for found in _CALL.finditer(text):
        try:
            said = json.loads(found[1])
            for one in said if isinstance(said, list) else [said]:
                arguments = one["arguments"] if "arguments" in one else one["parameters"]
                written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                function = {"name": str(one["name"]), "arguments": written}
                "".join(function.values()).encode()  # half a character cannot be sent
                calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
        except (KeyError, TypeError, ValueError, RecursionError):
            return text, []
    return (text.partition(OPENING)[0], calls) if calls else (text, [])
