"""Is this server one that we can drive? Asked once at the start; what is missing is named with the flag that brings it.

Called by generate/vllm_server_engine.py.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.clock import Clock
from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm_server_http import ServerClient, ServerLost, ServerRefused, decoded
from asyncrl.generate.vllm_server_wire import (
    Choice,
    GenerateBody,
    ModelList,
    RPCBody,
    RPCReply,
    ServerSampling,
    VersionBody,
    VersionReply,
    decode_reply,
)
from asyncrl.generate.vllm_versions import VLLMVersion, parse_version

EXTENSION = "asyncrl.generate.vllm_worker.WeightsExtension"
LOAD_METHOD = "asyncrl_load"
GENERATE = "/inference/v1/generate"
_HEALTH_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server said about itself."""

    number: str
    """Of vLLM."""
    has_spans: bool
    """Whether a completion ends with which weights sampled which tokens (0.32 and later)."""
    max_requests: int
    """Most requests that it runs at once; 0: it does not say."""
    can_sleep: bool


class _ModelPart(msgspec.Struct, frozen=True):
    enable_sleep_mode: bool = False


class _SchedulerPart(msgspec.Struct, frozen=True):
    max_num_seqs: int = 0


class _ParallelPart(msgspec.Struct, frozen=True):
    data_parallel_size: int = 1


class _ConfigPart(msgspec.Struct, frozen=True):
    model_config: _ModelPart = _ModelPart()
    scheduler_config: _SchedulerPart = _SchedulerPart()
    parallel_config: _ParallelPart = _ParallelPart()


class _ServerInfo(msgspec.Struct, frozen=True):
    vllm_config: _ConfigPart = _ConfigPart()


def serve_command(model_folder: Path, version: VLLMVersion) -> str:
    """Return the command line that starts a server as we need it."""
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(str(model_folder))} "
        f"{'--enable-scale-out ' if version.has_scale_out_flag else ''}"
        f"--logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION}"
    )


async def check_server(
    client: ServerClient, config: VLLMServerEngineConfig, model_folder: Path, first_label: str, clock: Clock
) -> ServerFacts:
    """Find out what the server is and refuse it where something is missing.

    Args:
        client: To it, opened.
        config: Lengths and patience.
        model_folder: Of the run, for the command line in messages.
        first_label: Given to the weights that the server has now.
        clock: Of the patience.

    Returns:
        What it is.

    Raises:
        GenerationError: It is not healthy in time, of another version, refuses our key, or was started without a flag we need.
    """
    await _wait_until_healthy(client, config.start_timeout_s, clock)
    number = decoded(await client.get("/version"), VersionReply, "/version").version
    try:
        version = parse_version(number)
    except GenerationError as error:
        raise GenerationError(f"the server at {client.url}: {error}") from error
    await _check_model(client, config)
    hint = f"Start it so: {serve_command(model_folder, version)}"
    await _check_development_routes(client, hint)
    has_label = await set_label(client, first_label)
    choice = await _probe(client, hint)
    if any(choice.sampled_logprobs()):
        raise GenerationError(
            f"the server at {client.url} reports logprobs of another distribution than it samples from: it was started without "
            f"--logprobs-mode processed_logprobs. {hint}"
        )
    await _check_extension(client, hint)
    part = await _server_config(client)
    if (num_replicas := part.parallel_config.data_parallel_size) > 1:
        raise GenerationError(
            f"the server at {client.url} has {num_replicas} data-parallel replicas, and only the first says whether it took new "
            "weights: start one server a replica, without --data-parallel-size, and name them all in generate.engine.url"
        )
    return ServerFacts(
        number,
        has_label and choice.weight_versions is not None,
        part.scheduler_config.max_num_seqs,
        part.model_config.enable_sleep_mode,
    )


async def set_label(client: ServerClient, label: str) -> bool:
    """Name the weights that the server has now; return False where it knows no labels (before 0.27)."""
    try:
        await client.post("/update_weight_version", VersionBody(label))
    except ServerRefused as error:
        if error.status == 404:
            return False
        raise
    return True


async def _wait_until_healthy(client: ServerClient, timeout_s: float, clock: Clock) -> None:
    give_up_s = clock.now() + timeout_s
    while True:
        try:
            await client.get("/health")
        except (ServerLost, ServerRefused) as error:
            if clock.now() >= give_up_s:
                raise GenerationError(
                    f"no healthy vLLM server in {timeout_s:g} s (generate.engine.start_timeout_s): {error}"
                ) from error
        else:
            return
        await clock.sleep(_HEALTH_INTERVAL_S)


async def _check_model(client: ServerClient, config: VLLMServerEngineConfig) -> None:
    try:
        models = decoded(await client.get("/v1/models"), ModelList, "/v1/models")
    except ServerRefused as error:
        if error.status not in {401, 403}:
            raise
        raise GenerationError(
            f"{error}. Put the key that the server was started with (--api-key) into a file and name it in "
            "generate.engine.api_key_file"
        ) from error
    limit = models.data[0].max_model_len if models.data else None
    if limit is not None and limit < config.max_sequence_tokens:
        raise GenerationError(
            f"the server at {client.url} takes sequences of {limit} tokens, generate.engine.max_sequence_tokens is "
            f"{config.max_sequence_tokens}: lower that, or start the server with --max-model-len {config.max_sequence_tokens}"
        )


async def _check_development_routes(client: ServerClient, hint: str) -> None:
    """See that the routes that pause are there, and let a server go on that a killed generator left paused."""
    try:
        await client.get("/is_paused")
        await client.post("/resume")
    except ServerRefused as error:
        if error.status != 404:
            raise
        raise GenerationError(
            f"the server at {client.url} has no routes to pause and to update weights: it was started without the environment "
            f"variable VLLM_SERVER_DEV_MODE=1. {hint}"
        ) from error


async def _probe(client: ServerClient, hint: str) -> Choice:
    """Sample two tokens from one candidate each, whose logprob is 0 after top-k and something else before."""
    sampling = ServerSampling(max_tokens=2, temperature=0.5, seed=0, top_k=1, ignore_eos=True, logprobs=0, detokenize=False)
    body = GenerateBody("asyncrl-probe", (0, 1), sampling, stream=False, cache_salt="asyncrl-probe")
    try:
        reply = decode_reply(await client.post(GENERATE, body))
    except ServerRefused as error:
        if error.status not in {403, 404}:
            raise
        raise GenerationError(
            f"the server at {client.url} has no route for token ids in and out ({GENERATE}): it was started without "
            f"--enable-scale-out. {hint}"
        ) from error
    if not reply.choices:
        raise GenerationError(f"the server at {client.url} answered a request of two tokens with nothing")
    return reply.choices[0]


async def _check_extension(client: ServerClient, hint: str) -> None:
    """Ask for a load that says nothing: who has the extension answers what is wrong with it, others that there is none."""
    try:
        replies = decoded(await client.post("/collective_rpc", RPCBody(LOAD_METHOD, ("{}",))), RPCReply, "/collective_rpc")
        has_extension = bool(replies.results)
    except ServerRefused:
        has_extension = False
    if not has_extension:
        raise GenerationError(
            f"the server at {client.url} cannot take weights from us: it was started without --worker-extension-cls {EXTENSION} "
            f"(asyncrl must be installed where it runs). {hint}"
        )


async def _server_config(client: ServerClient) -> _ConfigPart:
    """Return what the server tells of its own config; nothing where it tells it in another way."""
    try:
        raw = await client.get("/server_info", {"config_format": "json"})
        return msgspec.json.decode(raw, type=_ServerInfo).vllm_config
    except (ServerRefused, msgspec.MsgspecError):
        return _ConfigPart()
