"""A `vllm serve` that somebody else runs, over HTTP: token ids in and out, pause, weights, sleep.

What the server must offer is asked for once, at the start; what is missing is named with the flag that brings it. From then on
its gauges are read every two seconds. A server that is gone, or was restarted, is dead to the engine: the generator's process
ends, its groups are handed out again, and its successor gives the server the newest weights. Imports no vllm.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from asyncrl.clock import Clock
from asyncrl.config.generate import VLLMEngineConfig, VLLMServerEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest, RequestRules, SleepLevel
from asyncrl.generate.vllm.backend import Facts, Piece, sampling_arguments
from asyncrl.generate.vllm.checkpoint import ModelFolder
from asyncrl.generate.vllm.http_client import (
    GenerateBody,
    ServerClient,
    ServerLost,
    ServerRefused,
    ServerSampling,
    decode_reply,
    decoded,
    prompt_logprobs,
)
from asyncrl.generate.vllm.launch import EXTENSION
from asyncrl.generate.vllm.load_request import LoadReply, LoadRequest
from asyncrl.generate.vllm.versions import VLLMVersion, parse_version

LOOK_INTERVAL_S = 2.0
"""How often the server's gauges are read."""
_HEALTH_INTERVAL_S = 0.5
_GENERATE, _RPC, _LOAD = "/inference/v1/generate", "/collective_rpc", "asyncrl_load"
_LOAD_HINT = (
    ". If the server does not see this machine's files (another machine, a container), set generate.engine.shared_folder to a "
    "folder that both see under the same path"
)
_ROW = re.compile(
    r"^(process_start_time_seconds|vllm:num_requests_running|vllm:kv_cache_usage_perc|vllm:cache_config_info)(\{.*\})? (\S+)$",
    re.MULTILINE,
)
_LABEL = re.compile(r'(num_gpu_blocks|(?<!\w)block_size)="(\d+)"')


class _RPCBody(msgspec.Struct, frozen=True):
    method: str
    args: tuple[str, ...]


class _RPCReply(msgspec.Struct, frozen=True):
    results: tuple[str | None, ...] = ()


class _VersionBody(msgspec.Struct, frozen=True):
    new_version: str


@dataclass(slots=True)
class _Stream:
    last_news_s: float
    response: aiohttp.ClientResponse | None = None
    is_too_silent: bool = False


@dataclass(frozen=True, slots=True)
class Gauges:
    """One reading of `/metrics`; several engines behind one server are added up."""

    started_s: float
    """When the server's process began; 0: it does not say."""
    running: int
    free_blocks: int
    block_tokens: int
    """Of a KV block; 0: it does not say."""


class VLLMServer:
    """See `asyncrl.generate.vllm.backend.Backend`."""

    facts: Facts

    def __init__(self, config: VLLMServerEngineConfig, clock: Clock) -> None:
        """Note what `start` will drive; of several urls, the first."""
        self.config: VLLMEngineConfig | VLLMServerEngineConfig = config
        self._config = config
        self._clock = clock
        self.shared_folder = config.shared_folder
        self.fault = ""
        self._is_paused = False
        self._streams: dict[str, _Stream] = {}
        self._looking = asyncio.Lock()
        self._client: ServerClient | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, folder: ModelFolder, on_room: Callable[[int, int], None], on_death: Callable[[], None]) -> None:
        """Find out what the server is and refuse it where something is missing, with the flag that brings it.

        Raises:
            GenerationError: It is not healthy in time, too old, refuses our key, or was started without a flag we need.
        """
        config, self._on_room, self._on_death = self._config, on_room, on_death
        key = await asyncio.to_thread(read_api_key, config.api_key_file)
        client = self._client = ServerClient(config.urls[0], key, config.request_timeout_s, self._clock)
        await self._wait_until_healthy(client)
        try:
            version = parse_version(str(decoded(await client.get("/version"), dict[str, Any], "/version").get("version")))
        except GenerationError as error:
            raise GenerationError(f"the server at {client.url}: {error}") from error
        await self._check_model(client)
        hint = f"Start it so: {serve_command(folder.path, version)}"
        await _check_flags(client, hint)
        said = await _server_config(client)
        if (num_replicas := int(said.get("parallel_config", {}).get("data_parallel_size", 1))) > 1:
            raise GenerationError(
                f"the server at {client.url} has {num_replicas} data-parallel replicas, and only the first says whether it took "
                "new weights: start one server a replica, without --data-parallel-size, and name them all in generate.engine.url"
            )
        gauges = read_gauges((await client.get("/metrics")).decode(errors="replace"))
        self._started_s = gauges.started_s
        most = int(said.get("scheduler_config", {}).get("max_num_seqs", 0))
        can_sleep = bool(said.get("model_config", {}).get("enable_sleep_mode", False))
        self.facts = Facts(
            num_slots=min(config.num_slots, max(1, most - 1)) if most else config.num_slots,  # one is for the probe
            block_tokens=gauges.block_tokens,
            is_remote=True,
            has_spans=version.has_weight_versions,
            most_scored_tokens=config.max_sequence_tokens,
            why_no_sleep=""
            if can_sleep
            else f"the server at {client.url} cannot sleep: start it with --enable-sleep-mode (GPUs only)",
            load_hint=_LOAD_HINT,
        )
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="vllm-server-watch")

    async def stream(self, request: EngineRequest, rules: RequestRules, salt: str) -> AsyncGenerator[Piece, None]:
        """Generate a completion over one connection, which is closed where it is wanted no more."""
        sampling = ServerSampling(**sampling_arguments(request, rules), detokenize=False)
        body = GenerateBody(request.request_id, request.prompt_ids, sampling, stream=True, cache_salt=salt)
        stream = self._streams[request.request_id] = _Stream(self._clock.now())
        try:
            async with self._opened.stream(_GENERATE, body) as stream.response:
                async for line in stream.response.content:
                    event = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or event == b"[DONE]":
                        continue
                    stream.last_news_s = self._clock.now()
                    for choice in decode_reply(event).choices:
                        spans = choice.weight_versions
                        account = None if spans is None else [(span.version, span.end - span.start) for span in spans]
                        yield Piece(choice.token_ids or (), choice.sampled_logprobs(), choice.finish_reason, account)
        except ServerLost as error:
            if stream.is_too_silent:
                raise GenerationError(
                    f"the server at {self._opened.url} sent no token for {self._config.request_timeout_s:g} s "
                    f"(generate.engine.request_timeout_s is {self._config.request_timeout_s:g}): raise that, or look whether "
                    "others keep the server busy"
                ) from error
            raise
        finally:
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop at a token boundary."""
        self._is_paused = True
        await self._opened.post("/pause", params={"mode": "keep", "clear_cache": "true" if clear_cache else "false"})

    async def resume(self) -> None:
        """Go on."""
        await self._opened.post("/resume")
        self._note_running()

    async def load(self, request: LoadRequest) -> list[LoadReply]:
        """Have every worker load."""
        raw = await self._opened.post(_RPC, _RPCBody(_LOAD, (msgspec.json.encode(request).decode(),)))
        return [decoded((text or "").encode(), LoadReply, _LOAD) for text in decoded(raw, _RPCReply, _RPC).results]

    async def name_weights(self, label: str) -> None:
        """Name the weights that are there now."""
        await self._opened.post("/update_weight_version", _VersionBody(label))

    async def score(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """Return the logprob of each token after the first; the server samples one token at least, which nobody reads."""
        sampling = ServerSampling(max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False)
        body = GenerateBody("asyncrl-score", token_ids, sampling, stream=False, cache_salt=salt)
        return prompt_logprobs(decode_reply(await self._opened.post(_GENERATE, body)), token_ids)

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back."""
        await self._opened.post("/sleep", params={"level": str(level), "mode": "keep"})

    async def wake_up(self, tag: str = "") -> None:
        """Take memory again."""
        try:
            await self._opened.post("/wake_up", params={"tags": tag} if tag else None)
        except ServerRefused as error:
            raise GenerationError(f"the memory of the server at {self._opened.url} did not come back: {error}") from error
        if tag == "kv_cache":
            self._note_running()

    async def look(self) -> None:
        """Ask how it is and read the gauges; take note of the room there is, or that the server is gone."""
        client = self._opened
        async with self._looking:
            if self.fault:
                return
            try:
                await client.get("/health")
                gauges = read_gauges((await client.get("/metrics")).decode(errors="replace"))
            except ServerLost as error:
                self.fault = str(error)
            except ServerRefused as error:
                self.fault = f"the vLLM server at {client.url} answers, but its engine is dead: {error}; start it again"
            else:
                if gauges.started_s != self._started_s:
                    self.fault = (
                        f"the vLLM server at {client.url} was restarted and has lost the weights it was given; a restarted "
                        "generator gives it the newest"
                    )
                elif gauges.block_tokens:
                    self._on_room(gauges.free_blocks, gauges.running)
        if self.fault:
            self._on_death()

    async def close(self) -> None:
        """Close the connections; the server runs on."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._client is not None:
            await self._client.close()

    @property
    def _opened(self) -> ServerClient:
        assert self._client is not None, "the engine is not started"
        return self._client

    def _note_running(self) -> None:
        self._is_paused = False
        for stream in self._streams.values():
            stream.last_news_s = self._clock.now()

    async def _watch(self) -> None:
        """Look again and again, until the server is gone; break off streams that are silent for too long."""
        while not self.fault:
            await self._clock.sleep(LOOK_INTERVAL_S)
            await self.look()
            for stream in list(self._streams.values()):
                silent_s = self._clock.now() - stream.last_news_s
                if stream.response is not None and not self._is_paused and silent_s > self._config.request_timeout_s:
                    stream.is_too_silent = True
                    stream.response.close()

    async def _wait_until_healthy(self, client: ServerClient) -> None:
        timeout_s = self._config.start_timeout_s
        give_up_s = self._clock.now() + timeout_s
        while True:
            try:
                await client.get("/health")
            except (ServerLost, ServerRefused) as error:
                if self._clock.now() >= give_up_s:
                    raise GenerationError(
                        f"no healthy vLLM server in {timeout_s:g} s (generate.engine.start_timeout_s): {error}"
                    ) from error
            else:
                return
            await self._clock.sleep(_HEALTH_INTERVAL_S)

    async def _check_model(self, client: ServerClient) -> None:
        try:
            models = decoded(await client.get("/v1/models"), dict[str, Any], "/v1/models").get("data") or [{}]
        except ServerRefused as error:
            if error.status not in {401, 403}:
                raise
            raise GenerationError(
                f"{error}. Put the key that the server was started with (--api-key) into a file and name it in "
                "generate.engine.api_key_file"
            ) from error
        limit, wanted = models[0].get("max_model_len"), self._config.max_sequence_tokens
        if limit is not None and limit < wanted:
            raise GenerationError(
                f"the server at {client.url} takes sequences of {limit} tokens, generate.engine.max_sequence_tokens is "
                f"{wanted}: lower that, or start the server with --max-model-len {wanted}"
            )


def serve_command(model_folder: Path, version: VLLMVersion) -> str:
    """Return the command line that starts a server as we need it."""
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(str(model_folder))} "
        f"{'--enable-scale-out ' if version.has_scale_out_flag else ''}"
        f"--logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION}"
    )


async def _check_flags(client: ServerClient, hint: str) -> None:
    """See that the server was started with every flag that is needed; one that a killed generator left paused goes on."""

    def lacks(what: str, flag: str) -> GenerationError:
        return GenerationError(f"the server at {client.url} {what}: it was started without {flag}. {hint}")

    try:
        await client.get("/is_paused")
        await client.post("/resume")
    except ServerRefused as error:
        if error.status != 404:
            raise
        raise lacks("has no routes to pause and to update weights", "the environment variable VLLM_SERVER_DEV_MODE=1") from error
    # Two tokens from one candidate each, whose logprob is 0 after top-k and something else before.
    sampling = ServerSampling(max_tokens=2, temperature=0.5, seed=0, top_k=1, ignore_eos=True, logprobs=0, detokenize=False)
    body = GenerateBody("asyncrl-probe", (0, 1), sampling, stream=False, cache_salt="asyncrl-probe")
    try:
        reply = decode_reply(await client.post(_GENERATE, body))
    except ServerRefused as error:
        if error.status not in {403, 404}:
            raise
        raise lacks(f"has no route for token ids in and out ({_GENERATE})", "--enable-scale-out") from error
    if not reply.choices:
        raise GenerationError(f"the server at {client.url} answered a request of two tokens with nothing")
    if any(reply.choices[0].sampled_logprobs()):
        raise lacks("reports logprobs of another distribution than it samples from", "--logprobs-mode processed_logprobs")
    # A load that says nothing: who has the extension answers what is wrong with it, others that there is none.
    replies: tuple[str | None, ...] = ()
    with suppress(ServerRefused):
        replies = decoded(await client.post(_RPC, _RPCBody(_LOAD, ("{}",))), _RPCReply, _RPC).results
    if not replies:
        flag = f"--worker-extension-cls {EXTENSION} (asyncrl must be installed where it runs)"
        raise lacks("cannot take weights from us", flag)


async def _server_config(client: ServerClient) -> dict[str, Any]:
    """Return what the server tells of its own config; nothing where it tells it in another way."""
    with suppress(ServerRefused, msgspec.MsgspecError):
        raw = await client.get("/server_info", {"config_format": "json"})
        return msgspec.json.decode(raw, type=dict[str, dict[str, Any]]).get("vllm_config", {})
    return {}


def read_gauges(text: str) -> Gauges:
    """Read the metrics page; a row that is not there leaves its field empty."""
    started_s, running, usages, num_blocks, block_tokens = 0.0, 0.0, [], 0, 0
    for name, labels, value in _ROW.findall(text):
        if name == "process_start_time_seconds":
            started_s = float(value)
        elif name == "vllm:num_requests_running":
            running += float(value)
        elif name == "vllm:kv_cache_usage_perc":
            usages.append(float(value))
        else:
            said = dict(_LABEL.findall(labels))
            num_blocks += int(said.get("num_gpu_blocks", 0))
            block_tokens = int(said.get("block_size", 0))
    usage = sum(usages) / len(usages) if usages else 0.0
    return Gauges(started_s, int(running), int(num_blocks * (1 - usage)), block_tokens if num_blocks else 0)


def read_api_key(path: str) -> str:
    """Return the file's first line; empty where no file is named.

    Raises:
        GenerationError: It cannot be read, or its first line is empty.
    """
    if not path:
        return ""
    try:
        key = Path(path).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise GenerationError(f"generate.engine.api_key_file {path!r} cannot be read: {error}") from error
    if not key:
        raise GenerationError(f"generate.engine.api_key_file {path!r}: its first line must be the key, and is empty")
    return key
