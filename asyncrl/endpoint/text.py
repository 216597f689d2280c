"""Tokens into text as they come, and texts into tool calls.

Invariant: the parts that were given, put together, are the text of all tokens: what may still change is held back. Where a
tokenizer reads bytes of a character that was cut off otherwise than it read those before it, they end with what was whole.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

OPENING, CLOSING = "<tool_call>", "</tool_call>"
"""Round a tool call, of JSON with `name` and `arguments` (or `parameters`): the form of Hermes and Qwen templates."""
_CALL = re.compile(rf"{OPENING}\s*(.*?)\s*(?:{CLOSING}|$)", re.DOTALL)
UNFINISHED = "\ufffd"
"""What a tokenizer gives for bytes that are no whole character yet."""


class TextStream:
    """The text of one sample whose tokens come one after the other.

    Args:
        decode: Returns the text of tokens, as the sample's text is made.
        has_tools: Whether what begins a tool call is held back, for `tool_calls`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, has_tools: bool) -> None:
        self.token_ids: list[int] = []
        self.told = ""
        """What was given so far."""
        self._decode, self._has_tools = decode, has_tools
        self._known, self._whole, self._context = "", 0, 0
        """The text so far; how many tokens are in it; from which of them on a decoder is given them, so that it knows what is
        before."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Take further tokens; return the text that can be told by now."""
        self.token_ids += token_ids
        before = self._decode(self.token_ids[self._context : self._whole])
        text = self._decode(self.token_ids[self._context :])
        if len(text) > len(before) and not text.endswith(UNFINISHED):
            self._known += text[len(before) :]
            self._context, self._whole = self._whole, len(self.token_ids)
        return self._tell(_before_call(self._known) if self._has_tools else self._known)

    def end(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return what remains to be told of the whole text, and its tool calls, where they are wanted."""
        if not text.startswith(self.told):
            return "", []
        plain, calls = tool_calls(text) if self._has_tools else (text, [])
        return self._tell(plain), calls

    def _tell(self, text: str) -> str:
        part = text[len(self.told) :]
        self.told += part
        return part


def _before_call(text: str) -> str:
    """Return the text up to where a tool call begins, or may be about to."""
    before, opening, _ = text.partition(OPENING)
    if opening:
        return before
    held = next((size for size in range(min(len(OPENING) - 1, len(text)), 0, -1) if OPENING.startswith(text[-size:])), 0)
    return text[: len(text) - held]


def tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what of a text is before its first tool call, and its tool calls; all of it and none where one is not understood."""
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
