"""The backend for `vllm serve` over a stand-in for its routes, in this process: the start, refusals, death."""

import asyncio
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from asyncrl.clock import Clock, SystemClock
from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.errors import EngineConfigError, EngineDied, GenerationError
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.generate.vllm.load_request import LoadReply
from asyncrl.generate.vllm.server import LOOK_INTERVAL_S, GenerateReply, VLLMServer, read_gauges
from tests.builders import until
from tests.contract.engine_cases import collect, make_model, make_request, tensors_of
from tests.virtual_clock import VirtualClock


class StubServer:
    """The routes of `vllm serve`: what it was started with, and what it was told."""

    def __init__(self) -> None:
        self.number, self.max_model_len, self.data_parallel_size, self.num_workers = "0.32.0", 64, 1, 1
        self.url = self.key = self.missing = self.silent = self.refuse_next = ""
        self.missing_status = 404
        self.candidate_logprob, self.started_s, self.healthy_after, self.drop_next = 0.0, 1e9, 0, False
        self.label, self.dtype = "default", "torch.float32"
        self.calls: list[str] = []
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(middlewares=[self._gate])
        app.add_routes([web.get("/metrics", self._metrics), web.route("*", "/{path:.*}", self._answer)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @web.middleware
    async def _gate(self, request: web.Request, handler):
        self.calls.append(request.path_qs)
        is_guarded = self.key and request.path.startswith(("/v1", "/inference", "/metrics"))
        if is_guarded and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {self.started_s}\n")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == self.missing:  # a route that is not there
            return web.json_response({"error": "Not Found"}, status=self.missing_status)
        if request.path == self.silent:
            await asyncio.Event().wait()
        if request.path == "/health":
            self.healthy_after -= 1
            return web.Response(status=503 if self.healthy_after >= 0 else 200)
        body = msgspec.json.decode(await request.read() or b"{}")
        if request.path == "/update_weight_version":
            self.label = body["new_version"]
        if request.path == "/inference/v1/generate":
            return await self._generate(body, request)
        parallel = {"data_parallel_size": self.data_parallel_size}
        answers = {
            "/version": {"version": self.number},
            "/v1/models": {"data": [{"id": "m", "max_model_len": self.max_model_len}]},
            "/server_info": {
                "vllm_config": {
                    "scheduler_config": {"max_num_seqs": 6},
                    "parallel_config": parallel,
                    "model_config": {"dtype": self.dtype},
                }
            },
            "/collective_rpc": {"results": [msgspec.json.encode(LoadReply()).decode()] * self.num_workers},
        }
        return web.json_response(answers.get(request.path, {}))

    async def _generate(self, body: dict, request: web.Request) -> web.Response:
        if self.healthy_after > 0:
            return web.json_response({"error": {"message": "EngineDeadError", "code": 500}}, status=500)
        if self.refuse_next:
            message, self.refuse_next = self.refuse_next, ""
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        num_tokens, is_probe = body["sampling_params"]["max_tokens"], body["request_id"].startswith("asyncrl-")
        if not is_probe:
            self.begun.set()
            await self.may_end.wait()
            if self.drop_next:
                self.drop_next = False
                request.transport.close()
        logprobs = [{"logprob": self.candidate_logprob if is_probe else -0.5}] * num_tokens
        spans = [{"version": self.label, "start": 0, "end": num_tokens}]
        choice = {"finish_reason": "length", "token_ids": [3] * num_tokens, "logprobs": {"content": logprobs}}
        return web.json_response({"choices": [{**choice, "weight_versions": spans}]})


@pytest.fixture
async def stub():
    made = StubServer()
    yield made
    await made.stop()


@asynccontextmanager
async def running(stub: StubServer, folder: Path, clock: Clock | None = None, **changes):
    if not stub.url:
        await stub.start()
    config = {"url": stub.url, "max_sequence_tokens": 64, "num_slots": 4, "start_timeout_s": 30, **changes}
    engine = VLLMEngine(VLLMServer(VLLMServerEngineConfig(**config), clock or SystemClock()), folder)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize(("changes", "expected"), [
    ({"missing": "/resume"}, "lacks something .*/resume answered 404.* VLLM_SERVER_DEV_MODE=1 python -m vllm.* --dtype float32"),
    ({"missing": "/inference/v1/generate"}, "lacks something .*generate answered 404.* --enable-scale-out"),
    ({"candidate_logprob": -0.1}, "reports logprobs of another .* --logprobs-mode processed_logprobs"),
    ({"num_workers": 0}, "cannot take weights from us.* --worker-extension-cls asyncrl"),
    ({"number": "0.20.1"}, r"0\.20\.1 is too old"),
    ({"number": "0.26.0"}, r"vLLM 0\.26\.0, which does not say .* use 0\.32 or newer"),
    ({"data_parallel_size": 2}, "2 data-parallel replicas, .* one server a replica"),
    ({"max_model_len": 63}, "63 tokens, .* is 64"),
    ({"key": "secret"}, "api_key_file"),
    ({"healthy_after": 1000}, "no healthy vLLM server"),
    ({"missing": "/resume", "missing_status": 503}, "/resume answered 503"),
])  # fmt: skip
async def test_a_server_without_what_is_needed_is_refused_with_what_to_do(stub, folder, changes, expected: str) -> None:
    for name, value in changes.items():
        setattr(stub, name, value)
    with pytest.raises(GenerationError, match=expected) as refused:
        async with running(stub, folder, start_timeout_s=0.01 if "healthy_after" in changes else 30):
            pass
    may_pass = "healthy_after" in changes or "missing_status" in changes
    assert isinstance(refused.value, EngineConfigError) != may_pass, "it is fatal unless it may pass"


async def test_a_server_that_would_use_the_long_factors_of_longrope_is_refused(stub, longrope_folder) -> None:
    with pytest.raises(GenerationError, match=r"takes sequences of 64 tokens.* start it with --max-model-len 16"):
        async with running(stub, longrope_folder, max_sequence_tokens=16):
            pass
    stub.max_model_len = 16
    async with running(stub, longrope_folder, max_sequence_tokens=16):
        pass


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_server_of_another_dtype_than_the_folder_s_is_accepted_with_a_warning(stub, folder, dtype, caplog) -> None:
    stub.dtype = f"torch.{dtype}"
    async with running(stub, folder):
        pass
    assert ("computes in bfloat16 and the model's folder is float32" in caplog.text) == (dtype == "bfloat16")


async def test_a_server_that_comes_up_late_is_waited_for_and_one_left_paused_goes_on(stub, folder) -> None:
    stub.healthy_after = 2
    async with running(stub, folder) as engine:
        assert stub.calls.count("/health") == 3
        assert "/resume" in stub.calls
        assert (engine.version, engine.num_slots) == (-1, 4)


@pytest.mark.parametrize("text", ["\n", "secret\nnot this\n"])
async def test_the_key_is_the_files_first_line(stub, folder, tmp_path: Path, text: str) -> None:
    stub.key = "secret"
    (tmp_path / "key").write_text(text)
    with nullcontext() if "secret" in text else pytest.raises(GenerationError, match="api_key_file"):
        async with running(stub, folder, api_key_file=str(tmp_path / "key")):
            pass


async def test_a_refused_request_and_a_broken_connection_fail_alone(stub, folder) -> None:
    stub.may_end.set()
    async with running(stub, folder) as engine:
        stub.refuse_next = "too busy for this"
        with pytest.raises(GenerationError, match=r"request bad: .*answered 400: .*too busy for this"):
            await collect(engine.submit(make_request("bad")))
        stub.drop_next = True
        with pytest.raises(GenerationError, match=r"request a: .*cannot be reached"):
            await collect(engine.submit(make_request("a")))
        assert (await collect(engine.submit(make_request("good")))).finish_reason == "length"


async def test_a_lost_server_ends_every_stream_and_every_later_call_with_its_url(stub, folder) -> None:
    async with running(stub, folder) as engine:
        streams = [engine.submit(make_request(f"r{i}")) for i in range(6)]
        await stub.begun.wait()
        await stub.stop()
        for stream in streams:
            with pytest.raises(EngineDied, match=rf"{stub.url} .*cannot be reached.*newest weights"):
                await collect(stream)
        with pytest.raises(EngineDied, match=stub.url):
            _ = engine.num_slots
        with pytest.raises(EngineDied, match=stub.url):
            await engine.load_weights(1, {}, "keep")


@pytest.mark.parametrize(("change", "value", "expected"), [
    ("started_s", 2e9, "was restarted"),
    ("healthy_after", 60, "its engine is dead"),
    ("key", "another", "answered 401: .*Unauthorized"),
])  # fmt: skip
async def test_a_server_that_was_restarted_or_died_or_refuses_us_is_noticed(stub, folder, change, value, expected) -> None:
    clock = VirtualClock()
    async with running(stub, folder, clock) as engine:
        stream = engine.submit(make_request("a"))
        await stub.begun.wait()
        setattr(stub, change, value)
        with pytest.raises(EngineDied, match=expected):  # noqa: PT012
            async with asyncio.timeout(30):
                while engine.num_slots:
                    clock.advance(LOOK_INTERVAL_S)
                    await asyncio.sleep(0.01)
        with pytest.raises(EngineDied, match=expected):
            await collect(stream)


async def test_a_server_that_takes_connections_and_does_not_answer_is_noticed(stub, folder, monkeypatch) -> None:
    async with running(stub, folder) as engine:
        monkeypatch.setattr("asyncrl.generate.vllm.server.LOOK_LIMIT_S", 0.05)
        stub.silent, stub.calls = "/health", []
        await engine.backend.look()
        assert stub.calls.count("/health") > 1  # once may be a busy server
        with pytest.raises(EngineDied, match=r"cannot be reached: no answer in 0\.05 s"):
            _ = engine.num_slots
    with pytest.raises(GenerationError, match=r"no healthy vLLM server in 0\.02 s"):
        async with running(stub, folder, start_timeout_s=0.02):
            pass


@pytest.mark.parametrize("is_loading", [False, True])
async def test_an_engine_that_ends_while_the_server_is_paused_resumes_it(stub, folder, is_loading) -> None:
    async with running(stub, folder) as engine:
        stub.silent = "/collective_rpc" if is_loading else ""
        stub.calls.clear()
        tensors = tensors_of(make_model(1, hidden_size=8, num_hidden_layers=1))
        async with asyncio.TaskGroup() as group:
            paused = group.create_task(engine.load_weights(1, tensors, "keep") if is_loading else engine.pause())
            await until(lambda: stub.silent in stub.calls if is_loading else paused.done())
            paused.cancel()
        assert "/resume" not in stub.calls
    assert stub.calls[-1] == "/resume"


SPANS = [{"version": "v", "start": 0, "end": 1}]


@pytest.mark.parametrize("choice", [{}, {"weight_versions": SPANS}, {"logprobs": {"content": [{"logprob": -1}]}}])
def test_a_completion_that_lacks_something_is_told(choice) -> None:
    with pytest.raises(GenerationError, match="the server sent 1 tokens with"):
        msgspec.convert({"choices": [{"token_ids": [1], **choice}]}, GenerateReply).piece()


def test_prompt_logprobs_are_those_of_the_prompts_own_tokens_and_all_there() -> None:
    rows = [None, {"6": {"logprob": -1.5}}, {"9": {"logprob": 0.0}, "7": {"logprob": -2.5}}]
    reply = msgspec.convert({"prompt_logprobs": rows}, GenerateReply)
    assert reply.scores((5, 6, 7)) == [-1.5, -2.5]
    for other in ((5, 6, 8), (5, 6), (5, 6, 7, 8)):
        with pytest.raises(GenerationError, match="prompt tokens instead of"):
            reply.scores(other)


METRICS = b"""# HELP process_start_time_seconds Start time.
process_start_time_seconds 1.5e+09
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",effective_attention_block_size="128",num_gpu_blocks="100",num_gpu_blocks_override="7"} 1.0
"""


def test_gauges_that_are_not_there_are_zero() -> None:
    assert read_gauges(METRICS) == (1.5e9, 3, 50, 16)
    assert read_gauges(b"python_info 1.0\n") == (0.0, 0, 0, 0)
