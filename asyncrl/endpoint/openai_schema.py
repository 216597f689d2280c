"""The part of OpenAI's requests and answers that the endpoint supports. Pure.

docs/endpoint.md lists what a client may request. A field that would change the sampling is refused, never silently ignored: the
logprobs for training are those of the run's own sampling.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.schema.samples import FinishReason

MOST_CHOICES = 128
"""Maximum number of choices of one request."""
ROLES = {"developer": "system", "function": "tool"}
"""Older and newer names of roles."""
SAMPLING = (
    "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "logit_bias", "stop", "seed", "parallel_tool_calls",
)  # fmt: skip
"""Sampling fields that the run's config determines or the engines do not support."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "stop": ("", []), "parallel_tool_calls": (True,),
}  # fmt: skip
"""Values that change nothing."""
MOST_REWARD = 1e9
MOST_NAME = 256
"""Maximum number of characters of a model's name, since every part of an answer repeats it."""


class RefusedError(AsyncRLError):
    """A request that gets an error in OpenAI's form."""

    def __init__(self, status: int, text: str, code: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed request."""

    include_usage: bool = False


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """A field of vLLM, not of OpenAI: each choice has `token_ids`, and the answer `prompt_token_ids`."""
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    modalities: list[Literal["text"]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None


class CompletionAsked(_Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[int | str]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class ChatAsked(_Asked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


class Rewarded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/rewards."""

    id: str
    """Of the answer."""
    rewards: list[float]
    """Of each of its choices, in their order."""


def parsed(body: bytes, kind: type[Any], sampling: Mapping[str, float], ignored: Collection[str]) -> Any:  # noqa: ANN401
    """Parse a request.

    Args:
        body: JSON.
        kind: The type of the request.
        sampling: The run's own sampling values by name; a request may contain these values.
        ignored: Names in SAMPLING that are not checked.

    Raises:
        RefusedError: The body is not a request, or it requests something unsupported.
    """
    asked = decoded(body, kind)
    if asked.n is not None and not 1 <= asked.n <= MOST_CHOICES:
        raise RefusedError(400, f"n is {asked.n}, and must be 1 to {MOST_CHOICES}", "invalid_value", "n")
    if len(asked.model or "") > MOST_NAME:
        raise RefusedError(400, f"the name of a model has at most {MOST_NAME} characters", "invalid_value", "model")
    for name in SAMPLING:
        value = getattr(asked, name, None)
        if value is None or name in ignored or value == sampling.get(name) or value in NEUTRAL.get(name, ()):
            continue
        told = f"the run samples with {sampling[name]:g}" if name in sampling else "it is not supported"
        advice = f"leave it out, or have it ignored: Endpoint(ignored=[{name!r}])"
        raise RefusedError(400, f"{name} is {value!r}, and {told}; {advice}", "unsupported_value", name)
    if isinstance(asked, ChatAsked):
        wrong = {
            "top_logprobs": bool(asked.top_logprobs),
            "tool_choice": asked.tool_choice not in (None, "auto", "none"),
            "response_format": (asked.response_format or {}).get("type", "text") != "text",
        }
    else:
        wrong = {"echo": asked.echo, "best_of": asked.best_of not in {None, asked.n or 1}, "suffix": bool(asked.suffix)}
        wrong["logprobs"] = bool(asked.logprobs)  # the number of alternative tokens; 0: the sampled token alone
    if name := next((name for name, is_wrong in wrong.items() if is_wrong), ""):
        advice = "0 gives those of the sampled tokens" if name == "logprobs" else "leave it out"
        raise RefusedError(400, f"{name} = {getattr(asked, name)!r} is not supported; {advice}", "unsupported_value", name)
    return asked


def decoded(body: bytes, kind: type[Any]) -> Any:  # noqa: ANN401
    """Decode a body. Raises RefusedError if it does not have this type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body cannot be understood: {error}", "invalid_request") from error


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form for chat templates: contents are text, and arguments of tool calls are decoded JSON.

    Raises:
        RefusedError: There are no messages, or one is invalid.
    """
    if not messages:
        raise RefusedError(400, "there are no messages", "invalid_value", "messages")
    turns = list[dict[str, Any]]()
    for number, message in enumerate(messages):
        where, role = f"messages[{number}]", ROLES.get(str(message.get("role")), str(message.get("role")))
        content, calls, why = message.get("content"), message.get("tool_calls") or [], ""
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        if role not in {"system", "user", "assistant", "tool"}:
            why = f".role is {role!r:.80}, none of system, user, assistant, tool"
        elif content is None and not calls:
            why = " has neither a content nor tool calls"
        elif isinstance(content, list) and not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
            why = ".content has parts that are no text; only texts are understood"
        elif not isinstance(content, str | list | None):
            why = f".content must be a text, got {content!r:.80}"
        if why:
            raise RefusedError(400, where + why, "invalid_value", where)
        turn: dict[str, Any] = {"role": role, "content": "".join(part["text"] for part in parts)}
        turn |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
        try:
            for call in calls:
                name, arguments = str(call["function"]["name"]), call["function"].get("arguments") or "{}"
                with contextlib.suppress(TypeError, ValueError, RecursionError):  # otherwise keep the model's text
                    arguments = json.loads(arguments)
                called = {"type": "function", "id": str(call.get("id", "")), "function": {"name": name, "arguments": arguments}}
                turn.setdefault("tool_calls", []).append(called)
        except (AttributeError, KeyError, TypeError) as error:
            raise RefusedError(400, f"{where}.tool_calls is not understood: {error!r}", "invalid_value", where) from error
        turns.append(turn)
    return turns


class Choice(msgspec.Struct, kw_only=True):
    """One choice, or a part of it, before it is written for a client."""

    index: int
    text: str = ""
    calls: list[dict[str, Any]] = []
    tokens: list[tuple[int, str, float]] = []
    """Id, text and logprob of each."""
    is_first: bool = True
    """In a stream: this is the first part of the choice."""
    finish_reason: FinishReason | None = None


class AnswerWriter(msgspec.Struct, frozen=True, kw_only=True):
    """Writes the answer to one request."""

    id: str
    model: str
    created: int
    is_chat: bool
    has_logprobs: bool
    has_token_ids: bool
    prompt_ids: tuple[int, ...]

    def answer(self, choices: Sequence[Choice], versions: str) -> dict[str, Any]:
        """Return the whole answer.

        Args:
            choices: The complete choices.
            versions: The versions that sampled it, for `system_fingerprint`.
        """
        written = [self._choice(choice, "message") for choice in choices]
        num_tokens = sum(len(choice.tokens) for choice in choices)
        return self._head("chat.completion", is_first=True) | {"choices": written} | self._end(num_tokens, versions)

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """Return an event of a stream: the next part of a choice."""
        head = self._head("chat.completion.chunk", is_first=choice.is_first)
        return head | {"choices": [self._choice(choice, "delta")]}

    def last_chunk(self, num_tokens: int, versions: str) -> dict[str, Any]:
        """Return the event that has a stream's usage."""
        return self._head("chat.completion.chunk", is_first=False) | {"choices": []} | self._end(num_tokens, versions)

    def _head(self, chat_kind: str, *, is_first: bool) -> dict[str, Any]:
        kind = chat_kind if self.is_chat else "text_completion"
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | ({"prompt_token_ids": self.prompt_ids} if is_first and self.has_token_ids else {})

    def _end(self, num_tokens: int, versions: str) -> dict[str, Any]:
        num_prompt = len(self.prompt_ids)
        used = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
        return {"system_fingerprint": versions, "usage": used}

    def _choice(self, choice: Choice, field: Literal["message", "delta"]) -> dict[str, Any]:
        reason = "tool_calls" if choice.calls and choice.finish_reason == "stop" else choice.finish_reason
        written: dict[str, Any] = {"index": choice.index, "finish_reason": reason, "logprobs": None}
        if self.has_logprobs:
            told = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for _, text, logprob in choice.tokens
            ]
            texts, logprobs = [one["token"] for one in told], [one["logprob"] for one in told]
            of_text = {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
            written["logprobs"] = {"content": told, "refusal": None} if self.is_chat else of_text
        if self.has_token_ids:
            written["token_ids"] = [token for token, _, _ in choice.tokens]
        if not self.is_chat:
            return written | {"text": choice.text}
        message: dict[str, Any] = {"role": "assistant"} if choice.is_first else {}
        message["content"] = choice.text or None if choice.calls else choice.text
        if choice.calls:
            is_part = field == "delta"
            message["tool_calls"] = [{**call, "index": number} if is_part else call for number, call in enumerate(choice.calls)]
        return written | {field: message}


def error_body(error: RefusedError) -> dict[str, Any]:
    """Return an error in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
