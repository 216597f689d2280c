"""What is said to a vLLM server and what it answers, as far as we read it; unknown fields are skipped, so versions may differ.

Called by generate/vllm_server_engine.py and the vllm_server_* files beside it. Imports neither vllm nor aiohttp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.request_rules import RequestRules
from asyncrl.generate.vllm_requests import sampling_arguments

CLAMPED_LOGPROB = -9999.0
"""What the server sends for a logprob that is not a number."""


class ServerSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """vLLM's SamplingParams, by their names there."""

    max_tokens: int
    temperature: float
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """0: of the sampled token alone."""
    prompt_logprobs: int | None = None
    detokenize: bool | None = None


class GenerateBody(msgspec.Struct, frozen=True):
    """Body of `POST /inference/v1/generate`."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling_params: ServerSampling
    stream: bool
    cache_salt: str


class RPCBody(msgspec.Struct, frozen=True):
    """Body of `POST /collective_rpc`."""

    method: str
    args: tuple[str, ...]


class RPCReply(msgspec.Struct, frozen=True):
    """One answer a worker."""

    results: tuple[str | None, ...] = ()


class VersionBody(msgspec.Struct, frozen=True):
    """Body of `POST /update_weight_version`."""

    new_version: str


class LogprobEntry(msgspec.Struct, frozen=True):
    """One token's logprob."""

    logprob: float | None = None


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """One entry a generated token."""

    content: tuple[LogprobEntry, ...] | None = None


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by weights that bear this label."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """A piece of a completion, or the whole."""

    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: ChoiceLogprobs | None = None
    weight_versions: tuple[VersionSpan, ...] | None = None
    """On the last piece, over the whole output; 0.32 and later."""

    def sampled_logprobs(self) -> tuple[float, ...]:
        """Return the logprob of each token.

        Raises:
            GenerationError: One is missing or not a number.
        """
        entries = (self.logprobs.content if self.logprobs is not None else None) or ()
        logprobs = tuple(CLAMPED_LOGPROB if entry.logprob is None else entry.logprob for entry in entries)
        if len(logprobs) != len(self.token_ids or ()):
            raise GenerationError(f"the server sent {len(self.token_ids or ())} tokens with {len(logprobs)} logprobs")
        if logprobs and min(logprobs) <= CLAMPED_LOGPROB:
            raise GenerationError("the server sampled from non-finite logits: the weights it was given are broken")
        return logprobs


class ErrorText(msgspec.Struct, frozen=True):
    """What went wrong, in the server's words."""

    message: str = ""
    code: int | str | None = None


class GenerateReply(msgspec.Struct, frozen=True):
    """A stream's event, or the whole answer."""

    choices: tuple[Choice, ...] = ()
    prompt_logprobs: tuple[dict[str, LogprobEntry] | None, ...] | None = None
    error: ErrorText | str | None = None
    message: str = ""


class ServedModel(msgspec.Struct, frozen=True):
    """A row of `GET /v1/models`."""

    id: str = ""
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/models`."""

    data: tuple[ServedModel, ...] = ()


class VersionReply(msgspec.Struct, frozen=True):
    """Answer of `GET /version`."""

    version: str = ""


def completion_body(request: EngineRequest, rules: RequestRules, cache_salt: str) -> GenerateBody:
    """Return what asks for this completion, token by token."""
    params = ServerSampling(**sampling_arguments(request, rules), detokenize=False)
    return GenerateBody(request.request_id, request.prompt_ids, params, stream=True, cache_salt=cache_salt)


def prompt_body(token_ids: tuple[int, ...], cache_salt: str) -> GenerateBody:
    """Return what asks for the logprobs of the prompt itself; the server samples one token at least, which nobody reads."""
    params = ServerSampling(max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False)
    return GenerateBody("asyncrl-score", token_ids, params, stream=False, cache_salt=cache_salt)


def prompt_logprobs(reply: GenerateReply, token_ids: tuple[int, ...]) -> list[float]:
    """Return the logprob of each token after the first. Raises GenerationError where one is missing."""
    rows = reply.prompt_logprobs or ()
    if len(rows) != len(token_ids):
        raise GenerationError(f"the server answered with the logprobs of {len(rows)} prompt tokens instead of {len(token_ids)}")
    found = [(row or {}).get(str(token), LogprobEntry()).logprob for row, token in zip(rows, token_ids, strict=True)][1:]
    scores = [logprob for logprob in found if logprob is not None]
    if len(scores) != len(found):
        raise GenerationError("the server left out the logprob of a prompt token")
    return scores


class EventSplitter:
    """Cuts a text/event-stream into the data of its events, whatever pieces it arrives in.

    Example:
        >>> splitter = EventSplitter()
        >>> list(splitter.feed(b"data: 1")), list(splitter.feed(b"2" + bytes([10, 10])))
        ([], [b'12'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is now whole."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


_reply_decoder = msgspec.json.Decoder(GenerateReply)


def decode_reply(raw: bytes) -> GenerateReply:
    """Return an event or answer of the generate route.

    Raises:
        GenerationError: It says that it failed, or is none.
    """
    try:
        reply = _reply_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise GenerationError(f"the server sent what is no answer of /inference/v1/generate: {error}") from error
    if reply.error is not None:
        said = reply.error if isinstance(reply.error, str) else reply.error.message
        raise GenerationError(f"the server could not serve the request: {said}")
    return reply
