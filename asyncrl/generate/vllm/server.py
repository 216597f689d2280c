"""A client of an external `vllm serve`, over HTTP: token ids in and out, pause, weights. vLLM 0.32 or newer.

A completion is one POST, answered when it is finished, with the server's report of which weights sampled which tokens; closing
its connection makes the server abort it. The start checks the server's features once; if one is missing, the error has the
command line that enables it. From then on its gauges are read every two seconds.

If a server is gone or was restarted, the engine counts as dead: the generator's process ends, its groups are assigned again, and
its successor gives the server the newest weights. `ServerLost` means that the server cannot be reached, and ends all streams.
`ServerRefused` means that the server answered with an error, and ends one request. Unknown fields of answers are ignored, so
versions may differ. Imports no vllm.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from asyncrl.clock import Clock
from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.errors import EngineConfigError, GenerationError
from asyncrl.generate.engine import EngineRequest, Piece, RequestRules
from asyncrl.generate.vllm.checkpoint import ModelFolder
from asyncrl.generate.vllm.launch import EXTENSION, parse_version, sampling_arguments
from asyncrl.generate.vllm.load_request import LoadReply, LoadRequest

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0
"""Interval between two reads of the server's gauges."""
NUM_ATTEMPTS = 3
FIRST_DELAY_S = 0.2
"""Delay between the first and the second attempt; doubled each time."""
CLAMPED_LOGPROB = -9999.0
"""The server's value for a logprob that is not a number."""
LOOK_LIMIT_S = 10.0
"""Timeout of a request that only asks how the server is."""
_HEALTH_INTERVAL_S, _FAREWELL_S = 0.5, 5.0
_GENERATE, _RPC, _LOAD = "/inference/v1/generate", "/collective_rpc", "asyncrl_load"
_GAUGES = "process_start_time_seconds", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
_CACHE = "vllm:cache_config_info"
_ROW = re.compile(rf"^({'|'.join(_GAUGES)}|{_CACHE})(\{{.*\}})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(num_gpu_blocks|(?<!\w)block_size)="(\d+)"')

Answer = TypeVar("Answer")


class ServerLost(GenerationError):  # noqa: N818 - a state of the server, told to every stream
    """The server cannot be reached."""


class ServerRefused(GenerationError):  # noqa: N818 - an answer
    """The server refused the request, or failed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class GenerateBody(msgspec.Struct, frozen=True):
    """Body of `POST /inference/v1/generate`."""

    request_id: str
    token_ids: Sequence[int]
    sampling_params: Mapping[str, Any]
    cache_salt: str


class _Logprob(msgspec.Struct, frozen=True):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: tuple[_Logprob, ...] | None = None


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: tuple[_Span, ...] | None = None


class GenerateReply(msgspec.Struct, frozen=True):
    """A completion."""

    choices: tuple[_Choice, ...] = ()
    prompt_logprobs: tuple[dict[str, _Logprob] | None, ...] | None = None

    def piece(self) -> Piece:
        """Return the completion, with -inf for a logprob that is not a number. Raises GenerationError if a part is missing."""
        choice = self.choices[0] if self.choices else _Choice()
        token_ids, spans = choice.token_ids or (), choice.weight_versions or ()
        entries = (choice.logprobs.content if choice.logprobs is not None else None) or ()
        if len(entries) != len(token_ids) or not spans:
            raise GenerationError(
                f"the server sent {len(token_ids)} tokens with {len(entries)} logprobs and the weights of "
                f"{sum(span.end - span.start for span in spans)}"
            )
        given = (CLAMPED_LOGPROB if entry.logprob is None else entry.logprob for entry in entries)
        logprobs = [logprob if logprob > CLAMPED_LOGPROB else -float("inf") for logprob in given]
        return Piece(token_ids, logprobs, choice.finish_reason, [(span.version, span.end - span.start) for span in spans])

    def scores(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each prompt token after the first. Raises GenerationError if one is missing."""
        rows = self.prompt_logprobs or ()
        found = [(row or {}).get(str(token), _Logprob()).logprob for row, token in zip(rows[1:], token_ids[1:], strict=False)]
        scores = [logprob for logprob in found if logprob is not None]
        if len(rows) != len(token_ids) or len(scores) != len(found):
            raise GenerationError(f"the server sent the logprobs of {len(scores)} prompt tokens instead of {len(token_ids) - 1}")
        return scores


class VLLMServer:
    """One server, with the public interface of `EmbeddedVLLM`; `sleep` is refused."""

    load_hint = (
        ". If the server does not see this machine's files (another machine, a container), set generate.engine.shared_folder "
        "to a folder that both see under the same path"
    )

    def __init__(self, config: VLLMServerEngineConfig, clock: Clock) -> None:
        """Store the server's address; of several urls, the first."""
        self.config, self._clock = config, clock
        self._url = config.urls[0].rstrip("/")
        self.shared_folder = config.shared_folder
        self.num_slots, self.block_tokens = config.num_slots, 0
        self.fault = ""
        self._session: aiohttp.ClientSession | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, folder: ModelFolder, on_room: Callable[[int, int], object], on_death: Callable[[], None]) -> None:
        """Check the server, and refuse it if a feature is missing.

        Raises:
            EngineConfigError: The server is too old, refuses our key, or was started without a required flag.
            GenerationError: It is not healthy in time.
        """
        config, self._on_room, self._on_death = self.config, on_room, on_death
        key = await asyncio.to_thread(read_api_key, config.api_key_file)
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            # vLLM closes a connection that was idle for 5 s, and a request on a just closed connection is lost.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        )
        give_up_s = self._clock.now() + config.start_timeout_s
        while True:
            try:
                await self._ask("GET", "/health", limit_s=min(LOOK_LIMIT_S, config.start_timeout_s))
                break
            except (ServerLost, ServerRefused) as error:
                if self._clock.now() >= give_up_s:
                    raise GenerationError(
                        f"no healthy vLLM server in {config.start_timeout_s:g} s (generate.engine.start_timeout_s): {error}"
                    ) from error
            await self._clock.sleep(_HEALTH_INTERVAL_S)
        number = str(self._decoded(await self._ask("GET", "/version"), dict[str, Any]).get("version"))
        if not parse_version(number).has_weight_versions:
            raise EngineConfigError(
                f"the server at {self._url} is vLLM {number}, which does not say which weights sampled a token: use 0.32 or newer"
            )
        await self._check_offers(folder)
        said: dict[str, dict[str, Any]] = {}
        with suppress(ServerRefused, msgspec.MsgspecError):  # a server that does not report its config is accepted
            raw = await self._ask("GET", "/server_info", params={"config_format": "json"})
            said = msgspec.json.decode(raw, type=dict[str, dict[str, Any]]).get("vllm_config", {})
        if (num_replicas := int(said.get("parallel_config", {}).get("data_parallel_size", 1))) > 1:
            raise EngineConfigError(
                f"the server at {self._url} has {num_replicas} data-parallel replicas, and only the first says whether it took "
                "new weights: start one server a replica, without --data-parallel-size, and name them all in generate.engine.url"
            )
        dtype = str(said.get("model_config", {}).get("dtype", folder.dtype)).removeprefix("torch.")
        if folder.dtype not in {dtype, "auto"}:
            log.warning(
                "the server at %s computes in %s and the model's folder is %s, so its logprobs differ from the learner's: start "
                "it with --dtype %s", self._url, dtype, folder.dtype, folder.dtype,
            )  # fmt: skip
        most = int(said.get("scheduler_config", {}).get("max_num_seqs", 0))
        self.num_slots = min(config.num_slots, max(1, most - 2)) if most else config.num_slots  # as engine_arguments has it
        self._started_s, _, _, self.block_tokens = read_gauges(await self._ask("GET", "/metrics"))
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="vllm-server-watch")

    async def stream(self, request: EngineRequest, rules: RequestRules, salt: str) -> AsyncGenerator[Piece, None]:
        """Generate a completion, in one piece."""
        body = GenerateBody(request.request_id, request.prompt_ids, sampling_arguments(request, rules), salt)
        yield self._decoded(await self._ask("POST", _GENERATE, body, is_completion=True), GenerateReply).piece()

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop at a token boundary."""
        await self._ask("POST", "/pause", params={"mode": "keep", "clear_cache": "true" if clear_cache else "false"})

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._ask("POST", "/resume")

    async def load(self, request: LoadRequest) -> list[LoadReply]:
        """Make every worker load."""
        return await self._load(msgspec.json.encode(request).decode())

    async def name_weights(self, label: str) -> None:
        """Set the label of the current weights."""
        await self._ask("POST", "/update_weight_version", {"new_version": label})

    async def score(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """Return the logprob of each token after the first; the server must sample at least one token, which is ignored."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "prompt_logprobs": 0, "detokenize": False}
        raw = await self._ask("POST", _GENERATE, GenerateBody("asyncrl-score", token_ids, sampling, salt))
        return self._decoded(raw, GenerateReply).scores(token_ids)

    async def sleep(self) -> None:
        """Refuse; a run that shares a device has no server (config/check.py)."""
        raise GenerationError(f"the server at {self._url} does not belong to this run, so it cannot be put to sleep")

    async def wake_up(self, tag: str) -> None:
        """Do nothing: the server never sleeps."""

    async def look(self) -> None:
        """Check the server's health and read its gauges; note its free blocks, or that it is gone."""
        if self.fault:
            return
        try:
            await self._ask("GET", "/health", limit_s=LOOK_LIMIT_S)
            page = await self._ask("GET", "/metrics", limit_s=LOOK_LIMIT_S)
            started_s, running, free_blocks, block_tokens = read_gauges(page)
        except ServerLost as error:
            self.fault = str(error)
        except ServerRefused as error:
            self.fault = f"the vLLM server at {self._url} answers, but its engine is dead: {error}; start it again"
        else:
            if started_s != self._started_s:
                self.fault = (
                    f"the vLLM server at {self._url} was restarted and has lost the weights it was given; a restarted "
                    "generator gives it the newest"
                )
            elif block_tokens:
                self._on_room(free_blocks, running)
        if self.fault:
            self._on_death()

    async def close(self) -> None:
        """Close the connections; the server keeps running, and is not left paused."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
            if not self.fault:
                with suppress(GenerationError, TimeoutError):
                    await asyncio.wait_for(self.resume(), _FAREWELL_S)
        if self._session is not None:
            await self._session.close()

    async def _watch(self) -> None:
        while not self.fault:
            await self._clock.sleep(LOOK_INTERVAL_S)
            await self.look()

    async def _check_offers(self, folder: ModelFolder) -> None:
        """Check the server's start flags; if a killed generator left it paused, resume it."""
        wanted, fault = self.config.max_sequence_tokens, ""
        try:
            models = self._decoded(await self._ask("GET", "/v1/models"), dict[str, Any]).get("data") or [{}]
            limit = models[0].get("max_model_len")
            await self._ask("POST", "/resume")
            # Two tokens with one candidate each: the logprob is 0 after top-k, and another value before it.
            sampling = {"max_tokens": 2, "temperature": 0.5, "top_k": 1, "ignore_eos": True, "logprobs": 0, "detokenize": False}
            raw = await self._ask("POST", _GENERATE, GenerateBody("asyncrl-probe", (0, 1), sampling, "asyncrl-probe"))
            if any(self._decoded(raw, GenerateReply).piece().logprobs):
                fault = "reports logprobs of another distribution than it samples from"
            elif not await self._load("{}"):  # an empty request: a server with the extension answers with its fault
                fault = "cannot take weights from us"
        except ServerRefused as error:
            if error.status >= 500 or error.status in {408, 429}:  # it may be starting, or about to end
                raise
            if error.status in {401, 403}:
                raise EngineConfigError(
                    f"{error}. Put the key that the server was started with (--api-key) into a file and name it in "
                    "generate.engine.api_key_file"
                ) from error
            fault = f"lacks something ({error})"
        if fault:
            raise EngineConfigError(
                f"the server at {self._url} {fault}. Start it so, where asyncrl is installed: VLLM_SERVER_DEV_MODE=1 "
                f"python -m vllm.entrypoints.openai.api_server --model {shlex.quote(str(folder.path))} --dtype {folder.dtype} "
                f"--enable-scale-out --logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION} (on a CPU also with "
                "TORCHDYNAMO_DISABLE=1 and --enforce-eager)"
            )
        if limit is not None and limit > folder.rope_positions > 0:
            raise EngineConfigError(
                f"the server at {self._url} takes sequences of {limit} tokens; then it computes all positions of this model "
                f"otherwise than the learner: start it with --max-model-len {folder.rope_positions}"
            )
        if limit is not None and limit < wanted:
            raise EngineConfigError(
                f"the server at {self._url} takes sequences of {limit} tokens, generate.engine.max_sequence_tokens is "
                f"{wanted}: lower that, or start the server with --max-model-len {wanted}"
            )

    async def _load(self, request: str) -> list[LoadReply]:
        raw = await self._ask("POST", _RPC, {"method": _LOAD, "args": [request]})
        texts = self._decoded(raw, dict[str, tuple[str | None, ...]]).get("results", ())
        return [self._decoded((text or "").encode(), LoadReply) for text in texts]

    async def _ask(
        self,
        method: str,
        path: str,
        body: object = None,
        params: Mapping[str, str] | None = None,
        *,
        is_completion: bool = False,
        limit_s: float | None = None,
    ) -> bytes:
        """Send a request and return the answer; if the connection is lost, try again a few times.

        Args:
            method: GET or POST.
            path: The path of the route.
            body: Sent as JSON; None: no body.
            params: Query parameters.
            is_completion: Whether it is a completion: it is sent only once and has no time limit.
            limit_s: Timeout of each attempt; None: the configured one, after which there is no other attempt.

        Raises:
            ServerLost: The server cannot be reached.
            ServerRefused: It answered with a status other than 200.
        """
        assert self._session is not None, "the engine is not started"
        most_s, num_attempts = limit_s or self.config.request_timeout_s, 1 if is_completion else NUM_ATTEMPTS
        timeout = aiohttp.ClientTimeout(total=None if is_completion else most_s, sock_connect=min(10.0, most_s))
        content = None if body is None else msgspec.json.encode(body)
        for attempt in range(1, num_attempts + 1):
            try:
                async with self._session.request(
                    method, self._url + path, data=content, params=params, timeout=timeout
                ) as answer:
                    raw = await answer.read()
                    if answer.status != 200:
                        text = raw[:500].decode(errors="replace")
                        raise ServerRefused(f"{self._url}{path} answered {answer.status}: {text}", answer.status)
                    return raw
            except (aiohttp.ClientError, TimeoutError) as error:
                if attempt == num_attempts or (isinstance(error, TimeoutError) and limit_s is None):
                    why = str(error) or f"no answer in {most_s:g} s"
                    raise ServerLost(
                        f"the vLLM server at {self._url} (generate.engine.url) cannot be reached: {why}. "
                        "See that it runs and that this machine can reach it; once it is healthy, a restarted generator gives "
                        "it the newest weights"
                    ) from error
            await self._clock.sleep(FIRST_DELAY_S * 2 ** (attempt - 1))
        raise AssertionError("not reached")

    def _decoded(self, raw: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.MsgspecError as error:
            raise GenerationError(f"an answer of the server at {self._url} is not understood: {error}") from error


def read_gauges(page: bytes) -> tuple[float, int, int, int]:
    """Read the metrics page of a server with one engine; a missing row counts 0.

    Returns:
        Start time of the server's process in seconds; running requests; free KV blocks; tokens of a block.
    """
    rows = {name: (labels, float(value)) for name, labels, value in _ROW.findall(page.decode(errors="replace"))}
    started_s, running, usage = (rows.get(name, ("", 0.0))[1] for name in _GAUGES)
    said = dict(_LABEL.findall(rows.get(_CACHE, ("", 0.0))[0]))
    num_blocks = int(said.get("num_gpu_blocks", 0))
    return started_s, int(running), int(num_blocks * (1 - usage)), int(said.get("block_size", 0)) if num_blocks else 0


def read_api_key(path: str) -> str:
    """Return the file's first line; empty if no file is named. Raises EngineConfigError if it cannot be read or is empty."""
    if not path:
        return ""
    try:
        key = Path(path).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineConfigError(f"generate.engine.api_key_file {path!r} cannot be read: {error}") from error
    if not key:
        raise EngineConfigError(f"generate.engine.api_key_file {path!r}: its first line must be the key, and is empty")
    return key
