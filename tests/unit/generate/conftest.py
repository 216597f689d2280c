"""What the tests of this folder share: a stand-in for `vllm serve`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web

from asyncrl.generate.vllm.load_request import LoadReply


@dataclass
class StubServer:
    """The routes of `vllm serve`: what it was started with, what it was told, and the reins on its tokens."""

    number: str = "0.32.0"
    max_model_len: int = 64
    max_num_seqs: int = 5
    data_parallel_size: int = 1
    key: str = ""
    development: bool = True
    scale_out: bool = True
    processed_logprobs: bool = True
    extension: bool = True
    spans: bool = True
    sleep_mode: bool = True
    healthy_after: int = 0
    """`/health` calls that fail first."""
    load_reply: LoadReply = field(default_factory=LoadReply)
    started_s: float = 1e9
    label: str = "default"
    paused: bool = False
    asleep: set[str] = field(default_factory=set)
    """What of its memory is away."""
    calls: list[str] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    """Requests whose connection went before they were done."""
    refuse_next: str = ""
    refuse_sleep: bool = False
    end_early: bool = False
    """Streams end with the next token and without a reason, as those of a server that shuts down."""
    garble_loads: bool = False
    """Answers to loads are cut short."""
    drop_next: bool = False
    may_sample: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    may_deliver: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    num_sampled: int = 0
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        self.may_deliver.set()
        app = web.Application(middlewares=[self._gate])
        app.add_routes([
            web.get("/health", self._health),
            web.get("/version", self._say(lambda: {"version": self.number})),
            web.get("/v1/models", self._say(lambda: {"data": [{"id": "m", "max_model_len": self.max_model_len}]})),
            web.get("/metrics", self._metrics),
        ])
        if self.development:
            app.add_routes([
                web.get("/is_paused", self._say(lambda: {"is_paused": self.paused})),
                web.get("/server_info", self._say(self._info)),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.post("/collective_rpc", self._rpc),
            ])
            if self.spans:
                app.add_routes([web.post("/update_weight_version", self._set_label)])
        if self.scale_out:
            app.add_routes([web.post("/inference/v1/generate", self._generate)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def streamed(self) -> list[dict]:
        """Bodies of the completions asked for, without those that only look at the server."""
        return [body for body in self.bodies if body["stream"]]

    def sample(self, num_tokens: int) -> None:
        """Let so many more tokens be sampled, whoever's turn it is."""
        for _ in range(num_tokens):
            self.may_sample.release()

    async def until(self, condition) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(condition)

    @web.middleware
    async def _gate(self, request: web.Request, handler):
        if request.path != "/metrics":
            self.calls.append(request.path_qs)
        if (
            self.key
            and request.path.startswith(("/v1", "/inference"))
            and request.headers.get("Authorization") != f"Bearer {self.key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        finally:
            await self._tell()

    def _say(self, answer):
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(answer())

        return handler

    def _info(self) -> dict:
        return {
            "vllm_config": {
                "model_config": {"enable_sleep_mode": self.sleep_mode},
                "scheduler_config": {"max_num_seqs": self.max_num_seqs},
                "parallel_config": {"data_parallel_size": self.data_parallel_size},
            }
        }

    async def _health(self, request: web.Request) -> web.Response:
        self.healthy_after -= 1
        return web.Response(status=503 if self.healthy_after >= 0 else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {self.started_s}\n")

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused = False
        await self._tell()
        return web.json_response({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        if self.refuse_sleep:
            return web.json_response({"error": "no room in host memory"}, status=500)
        if "weights" not in self.asleep:
            self.paused, self.asleep = True, {"weights", "kv_cache"}
        return web.json_response({})

    async def _wake_up(self, request: web.Request) -> web.Response:
        """Go on by itself once all is there, as vLLM does."""
        self.asleep -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        return web.json_response({}) if self.asleep else await self._resume(request)

    async def _set_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.extension:
            return web.json_response({"error": {"message": f"no attribute {body['method']!r}", "code": 500}}, status=500)
        if self.garble_loads:
            return web.Response(text="{")
        return web.json_response({"results": [msgspec.json.encode(self.load_reply).decode()]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        await self._tell()
        if self.healthy_after > 0:
            return web.json_response({"error": {"message": "EngineDeadError", "code": 500}}, status=500)
        if self.refuse_next:
            message, self.refuse_next = self.refuse_next, ""
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        if not body["stream"]:
            return web.json_response(self._whole(body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(body, response, request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.append(body["request_id"])
            raise
        return response

    def _whole(self, body: dict) -> dict:
        num_tokens, prompt = body["sampling_params"]["max_tokens"], body["token_ids"]
        choice = self._choice([0] * num_tokens, "length", [self.label] * num_tokens)
        if self.processed_logprobs and body["sampling_params"].get("top_k") == 1:
            choice["logprobs"] = {"content": [{"logprob": 0.0}] * num_tokens}
        return {"choices": [choice], "prompt_logprobs": [None, *({str(token): {"logprob": -1.0}} for token in prompt[1:])]}

    def _choice(self, token_ids: list[int], reason: str | None, labels: list[str]) -> dict:
        spans = [{"version": label, "start": i, "end": i + 1} for i, label in enumerate(labels)]
        content = [{"logprob": -0.5} for _ in token_ids]
        account = spans if self.spans and reason is not None else None
        return {"finish_reason": reason, "token_ids": token_ids, "logprobs": {"content": content}, "weight_versions": account}

    async def _stream(self, body: dict, response: web.StreamResponse, request: web.Request) -> None:
        labels: list[str] = []
        num_tokens = body["sampling_params"]["max_tokens"]
        for index in range(num_tokens):
            await self.may_sample.acquire()
            async with self.changed:
                await self.changed.wait_for(lambda: not self.paused)
            labels.append(self.label)
            self.num_sampled += 1
            await self._tell()
            await self.may_deliver.wait()
            if self.end_early:
                break
            if self.drop_next:
                self.drop_next = False
                assert request.transport is not None
                request.transport.close()
                raise ConnectionError
            choice = self._choice([index % 8], "length" if index + 1 == num_tokens else None, labels)
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@pytest.fixture
async def stub():
    made = StubServer()
    yield made
    await made.stop()
