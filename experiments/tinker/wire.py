"""What clients send, checked, as arrays; and answers as the bytes that the SDK reads.

Requests are the SDK's own types; passes, and the answers to passes and samples, are protobuf. Invariant: an `Example` can be
trained: its ids are in the vocabulary, its arrays have its length and are finite.

Legend: N tokens of an example.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as messages
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from asyncrl.errors import AsyncRLError

DTYPES: dict[int, np.dtype[Any]] = {messages.DTYPE_FLOAT32: np.dtype("<f4"), messages.DTYPE_INT64: np.dtype("<i8")}
UNSUPPORTED = (
    "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n",
    "record_stability_info", "model_path", "base_model",
)  # fmt: skip
"""Fields of a sample request that are refused where they are set."""
MOST_SAMPLES = 1024


class RefusedError(AsyncRLError):
    """What a client asks for cannot be; the message says what to do."""

    def __init__(self, text: str, status: int = 422) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model takes."""

    vocabulary: int
    most_tokens: int
    """Of a sequence that is trained."""


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence to train; `Datum` in the SDK."""

    token_ids: NDArray[np.int64]
    """[N], what the model reads."""
    target_ids: NDArray[np.int64]
    """[N], the token whose log-probability is taken after each of them."""
    inputs: dict[str, NDArray[np.float32]]
    """[N] each, what else the loss reads, by name."""


def decoded(body: bytes, kind: type[Any]) -> Any:
    """Return a body of which no field is checked yet; RefusedError where it is no object, or no message."""
    try:
        said = ForwardBackwardRequest.FromString(body) if kind is ForwardBackwardRequest else json.loads(body)
    except (DecodeError, ValueError, RecursionError) as error:
        raise RefusedError(f"the body is no {kind.__name__} of tinker 0.38: {error}") from error
    if kind is not ForwardBackwardRequest and not isinstance(said, dict):
        raise RefusedError("the body must be a JSON object")
    return said


def checked(said: Any, kind: type[Any]) -> Any:
    """Return what `decoded` gave as a request of the SDK's; RefusedError names the first field that does not fit."""
    try:
        return said if kind is ForwardBackwardRequest else kind.model_validate(said)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"])) or "the body"
        raise RefusedError(f"{kind.__name__}: {field}: {fault['msg']}; send what tinker 0.38 sends") from error


def settings_of(asked: ForwardBackwardRequest) -> dict[str, float]:
    """Return `loss_fn_config`; RefusedError where a value is text or not finite."""
    values = asked.loss_fn_config_v2.items()
    settings = {key: value.number if value.WhichOneof("value") == "number" else math.nan for key, value in values}
    if wrong := [key for key, value in settings.items() if not math.isfinite(value)]:
        raise RefusedError(f"loss_fn_config: {wrong[0]} must be a finite number")
    return settings


def examples_of(data: Iterable[messages.Datum], limits: Limits) -> list[Example]:
    """Return what a pass trains; RefusedError says which datum is wrong, and how."""
    examples = []
    for number, datum in enumerate(data):
        try:
            examples.append(_example(datum, limits))
        except RefusedError as error:
            raise RefusedError(f"data[{number}]: {error}") from error
    if not examples:
        raise RefusedError("there are no data; send at least one datum")
    return examples


def _example(datum: messages.Datum, limits: Limits) -> Example:
    if others := {kind for chunk in datum.model_input if (kind := chunk.WhichOneof("chunk")) != "encoded_text"}:
        raise RefusedError(f"chunks of kind {others.pop()} are not supported here; send tokens")
    tokens = _values("model_input", b"".join(chunk.encoded_text.tokens for chunk in datum.model_input), np.dtype("<i4"))
    if not 1 <= len(tokens) <= limits.most_tokens:
        raise RefusedError(f"model_input has {len(tokens)} tokens; 1 to {limits.most_tokens} can be trained")
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        if tensor.HasField("sparse_csr") or len(tensor.shape) > 1 or tensor.dtype not in DTYPES:
            raise RefusedError(
                f"{name} must be dense, of one dimension, and float32 or int64; no other tensors are supported here"
            )
        inputs[name] = values = _values(name, tensor.dense, DTYPES[tensor.dtype])
        if len(values) != len(tokens) or not np.isfinite(values).all():
            raise RefusedError(f"{name} has {len(values)} values; there must be {len(tokens)}, one a token, all of them finite")
    targets = inputs.pop("target_tokens", np.zeros(0))
    if targets.dtype.kind != "i":
        raise RefusedError("target_tokens are missing, or not int64; give one for each token of model_input")
    for name, ids in (("model_input", tokens), ("target_tokens", targets)):
        if outside := ids[(ids < 0) | (ids >= limits.vocabulary)].tolist():
            raise RefusedError(f"{name}: token {outside[0]} is outside the vocabulary: allowed are 0 to {limits.vocabulary - 1}")
    return Example(tokens.astype(np.int64), targets, {name: values.astype(np.float32) for name, values in inputs.items()})


def _values(name: str, encoded: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(encoded) % dtype.itemsize:
        raise RefusedError(f"{name}: {len(encoded)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(encoded, dtype)


def pass_answer(logprobs: Sequence[NDArray[np.float32]], loss: float) -> bytes:
    """Return the answer to a pass: log-probabilities [N] of each example, in their order, and the sum of the losses."""
    ends = np.cumsum([0, *(each.nbytes for each in logprobs)], dtype="<i8")
    flat = np.concatenate(logprobs).astype("<f4").tobytes()
    field = messages.BatchedTensor(data=flat, offsets=ends.tobytes(), dtype=messages.DTYPE_FLOAT32)
    outputs = [messages.ArrayRecord(num_datums=len(logprobs), fields={"logprobs": field})]
    answer = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs)
    answer.metrics["loss:sum"] = loss
    return bytes(answer.SerializeToString())


def prompt_of(asked: types.SampleRequest) -> list[int]:
    """Return a sample request's prompt; RefusedError where it has more than tokens, or asks for what is not supported here."""
    if others := {chunk.type for chunk in asked.prompt.chunks} - {"encoded_text"}:
        raise RefusedError(f"chunks of kind {others.pop()} are not supported here; send tokens")
    if unsupported := [name for name in UNSUPPORTED if getattr(asked, name)]:
        raise RefusedError(f"{unsupported[0]} is not supported here; leave it out")
    if not 1 <= asked.num_samples <= MOST_SAMPLES:
        raise RefusedError(f"num_samples must be 1 to {MOST_SAMPLES}, got {asked.num_samples}")
    return asked.prompt.to_ints()


def sample_answer(samples: Iterable[tuple[list[int], list[float], str]], prompt_logprobs: Sequence[float]) -> bytes:
    """Return the answer to a sample request: ids, log-probabilities and `stop` or `length` of each, and those of the prompt."""
    answer = messages.SampleResponse(prompt_logprobs=np.array(prompt_logprobs, "<f4").tobytes())
    for ids, logprobs, reason in samples:
        answer.sequences.add(
            stop_reason=messages.STOP_REASON_STOP if reason == "stop" else messages.STOP_REASON_LENGTH,
            tokens=np.array(ids, "<i4").tobytes(),
            logprobs=np.array(logprobs, "<f4").tobytes(),
        )
    return bytes(answer.SerializeToString())
