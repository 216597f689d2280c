"""The engine over a stand-in for `vllm serve` (conftest.py), in this process: tokens come only when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.clock import Clock, SystemClock, VirtualClock
from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.errors import BroadcastError, EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.generate.vllm.load_request import LoadReply
from asyncrl.generate.vllm.server import LOOK_INTERVAL_S, VLLMServer, serve_command
from asyncrl.generate.vllm.versions import parse_version
from asyncrl.models.layout import make_manifest
from asyncrl.schema.samples import SamplingParams
from asyncrl.weights.tensors import MappedTensors
from tests.contract.engine_cases import collect


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model().save_pretrained(path)
    return path


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model().state_dict().items() if name != "lm_head.weight"}


@asynccontextmanager
async def running(stub, folder: Path, clock: Clock | None = None, **changes) -> AsyncIterator[VLLMEngine]:
    if not stub.url:
        await stub.start()
    config = {"url": stub.url, "max_sequence_tokens": 64, "num_slots": 4, "start_timeout_s": 0.01, **changes}
    engine = VLLMEngine(VLLMServer(VLLMServerEngineConfig(**config), clock or SystemClock()), folder)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def request(name: str, num_tokens: int = 4) -> EngineRequest:
    return EngineRequest(name, (2, 3), SamplingParams(max_new_tokens=num_tokens, ignore_eos=True), 7)


# -- the start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"development": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "without --enable-scale-out"),
        ({"processed_logprobs": False}, "without --logprobs-mode processed_logprobs"),
        ({"extension": False}, "without --worker-extension-cls asyncrl"),
        ({"number": "0.20.1"}, r"0\.20\.1 is too old.*0\.26"),
        ({"data_parallel_size": 2}, "2 data-parallel replicas, .* one server a replica"),
        ({"max_model_len": 63}, "63 tokens, .* is 64"),
        ({"key": "secret"}, "api_key_file"),
        ({"healthy_after": 1000}, "no healthy vLLM server"),
    ],
)
async def test_a_server_without_what_is_needed_is_refused_with_the_flag(stub, folder, changes, expected: str) -> None:
    for name, value in changes.items():
        setattr(stub, name, value)
    with pytest.raises(GenerationError, match=expected) as refused:
        async with running(stub, folder):
            pass
    if "without" in expected or "DEV_MODE" in expected:
        assert serve_command(folder, parse_version(stub.number)) in str(refused.value)


async def test_nobody_at_the_address_is_told_with_the_url(stub, folder) -> None:
    await stub.start()
    await stub.stop()
    with pytest.raises(GenerationError, match=rf"{stub.url} .*cannot be reached"):
        async with running(stub, folder):
            pass


async def test_a_server_that_comes_up_late_is_waited_for(stub, folder) -> None:
    stub.healthy_after = 2
    async with running(stub, folder, start_timeout_s=30) as engine:
        assert stub.calls.count("/health") == 3
        assert engine.version == -1


async def test_a_server_left_paused_by_a_killed_generator_goes_on(stub, folder) -> None:
    stub.paused = True
    async with running(stub, folder):
        assert not stub.paused


async def test_the_key_is_the_files_first_line(stub, folder, tmp_path: Path) -> None:
    stub.key = "secret"
    (tmp_path / "key").write_text("secret\nnot this\n")
    stub.sample(4)
    async with running(stub, folder, api_key_file=str(tmp_path / "key")) as engine:
        assert (await collect(engine.submit(request("a")))).finish_reason == "length"


@pytest.mark.parametrize("text", [None, "\n"])
async def test_a_key_file_without_a_key_is_refused(stub, folder, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
    with pytest.raises(GenerationError, match="api_key_file"):
        async with running(stub, folder, api_key_file=str(tmp_path / "key")):
            pass


async def test_no_more_requests_run_than_the_server_runs_beside_a_probe(stub, folder) -> None:
    stub.max_num_seqs = 3
    async with running(stub, folder) as engine:
        assert engine.num_slots == 2
        streams = [engine.submit(request(f"r{i}")) for i in range(3)]
        await stub.until(lambda: len(stub.streamed()) == 2)
        stub.sample(12)
        assert [(await collect(stream)).token_ids for stream in streams] == [[0, 1, 2, 3]] * 3
        assert engine.num_running == 0


# -- versions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [True, False])
async def test_every_token_has_the_version_that_sampled_it_however_late_it_comes(stub, folder, spans: bool) -> None:
    stub.spans, stub.number = spans, "0.32.0" if spans else "0.26.1"
    async with running(stub, folder) as engine:
        await engine.load_weights(0, tensors(), "keep")
        stream = engine.submit(request("a", 6))
        stub.sample(1)
        first = await anext(stream)
        stub.sample(2)
        await stub.until(lambda: stub.num_sampled == 3)
        if spans:
            stub.may_deliver.clear()
            stub.sample(1)
            await stub.until(lambda: stub.num_sampled == 4)
        await engine.load_weights(1, tensors(), "keep")
        assert engine.version == 1
        stub.may_deliver.set()
        stub.sample(3)
        rest = await collect(stream)
        assert first.versions == (0,)
        assert [*first.token_ids, *rest.token_ids] == [0, 1, 2, 3, 4, 5]
        assert rest.versions == ([0, 0, 0, 1, 1] if spans else [0, 0, 1, 1, 1])


@pytest.mark.parametrize(("kv", "cleared"), [("keep", "false"), ("recompute", "true")])
async def test_recompute_clears_the_cache_and_keep_does_not(stub, folder, kv, cleared: str) -> None:
    async with running(stub, folder) as engine:
        assert await engine.load_weights(0, tensors(), kv) >= 0
        control = [call for call in stub.calls if call.startswith(("/pause", "/collective", "/update", "/resume"))][-4:]
        assert control == [f"/pause?mode=keep&clear_cache={cleared}", "/collective_rpc", "/update_weight_version", "/resume"]


# -- what goes wrong -----------------------------------------------------------------------------------------------------


async def test_a_refused_request_fails_alone(stub, folder) -> None:
    async with running(stub, folder) as engine:
        stub.refuse_next = "too busy for this"
        bad = engine.submit(request("bad"))
        with pytest.raises(GenerationError, match=r"request bad: .*answered 400: too busy for this"):
            await collect(bad)
        stub.sample(4)
        assert (await collect(engine.submit(request("good")))).finish_reason == "length"


async def test_a_broken_connection_fails_its_request_while_the_server_lives(stub, folder) -> None:
    async with running(stub, folder) as engine:
        stub.drop_next = True
        stream = engine.submit(request("a"))
        stub.sample(1)
        with pytest.raises(GenerationError, match=r"request a: .*cannot be reached"):
            await collect(stream)
        stub.sample(4)
        assert (await collect(engine.submit(request("b")))).finish_reason == "length"


async def test_a_lost_server_ends_every_stream_and_every_later_call_with_its_url(stub, folder) -> None:
    async with running(stub, folder) as engine:
        streams = [engine.submit(request(f"r{i}")) for i in range(6)]
        await stub.until(lambda: len(stub.streamed()) == 4)
        assert stub.aborted == []
        await stub.stop()
        for stream in streams:
            with pytest.raises(EngineDied, match=rf"{stub.url} .*cannot be reached.*newest weights"):
                await collect(stream)
        assert engine.num_running == 0
        with pytest.raises(EngineDied, match=stub.url):
            _ = engine.num_slots
        with pytest.raises(EngineDied, match=stub.url):
            engine.submit(request("late"))
        with pytest.raises(EngineDied, match=stub.url):
            await engine.load_weights(1, tensors(), "keep")


async def test_a_restarted_server_is_noticed_although_it_answers(stub, folder) -> None:
    async with running(stub, folder) as engine:
        stub.started_s += 60
        stub.drop_next = True
        stream = engine.submit(request("a"))
        stub.sample(1)
        with pytest.raises(EngineDied, match="was restarted"):
            await collect(stream)
        with pytest.raises(EngineDied, match="was restarted"):
            _ = engine.num_slots


async def test_a_server_whose_engine_died_fails_no_request_although_it_answers(stub, folder) -> None:
    async with running(stub, folder) as engine:
        stub.healthy_after = 100
        streams = [engine.submit(request(f"r{i}")) for i in range(3)]
        for stream in streams:
            with pytest.raises(EngineDied, match=r"its engine is dead: .*answered 503"):
                await collect(stream)
        with pytest.raises(EngineDied, match="its engine is dead"):
            _ = engine.num_slots


@pytest.mark.parametrize("lives", [True, False])
async def test_a_stream_that_ends_without_a_reason_is_an_abort_unless_the_server_goes(stub, folder, lives: bool) -> None:
    async with running(stub, folder) as engine:
        stub.end_early = True
        stream = engine.submit(request("a"))
        await stub.until(lambda: len(stub.streamed()) == 1)
        stub.healthy_after = 0 if lives else 100
        stub.sample(1)
        if lives:
            assert (await collect(stream)).finish_reason == "abort"
        else:
            with pytest.raises(EngineDied, match="its engine is dead"):
                await collect(stream)


async def test_an_order_that_a_dead_engine_refuses_ends_all(stub, folder) -> None:
    async with running(stub, folder) as engine:
        stream = engine.submit(request("a"))
        await stub.until(lambda: len(stub.streamed()) == 1)
        stub.healthy_after, stub.refuse_sleep = 100, True
        with pytest.raises(EngineDied, match="its engine is dead"):
            await engine.sleep(1)
        with pytest.raises(EngineDied, match="its engine is dead"):
            await collect(stream)


async def test_an_idle_engine_notices_too(stub, folder) -> None:
    clock = VirtualClock()
    async with running(stub, folder, clock) as engine:
        stub.started_s += 60
        clock.advance(LOOK_INTERVAL_S)
        with pytest.raises(EngineDied, match="was restarted"):
            await until_lost(engine, clock)


async def until_lost(engine: VLLMEngine, clock: VirtualClock) -> None:
    async with asyncio.timeout(30):
        while engine.num_slots:
            clock.advance(LOOK_INTERVAL_S)
            await asyncio.sleep(0.01)


async def test_a_silent_request_fails_but_not_while_paused(stub, folder) -> None:
    clock = VirtualClock()
    async with running(stub, folder, clock, request_timeout_s=50) as engine:
        stream = engine.submit(request("a"))
        await stub.until(lambda: len(stub.streamed()) == 1)
        await engine.pause()
        for _ in range(50):
            clock.advance(LOOK_INTERVAL_S)
            await asyncio.sleep(0)
        assert engine.num_running == 1
        await engine.resume()
        async with asyncio.timeout(30):
            while engine.num_running:
                clock.advance(LOOK_INTERVAL_S)
                await asyncio.sleep(0.01)
        with pytest.raises(GenerationError, match="request_timeout_s is 50"):
            await collect(stream)


async def test_overwritten_bytes_hold_the_server_until_weights_are_whole(stub, folder) -> None:
    def check() -> None:
        raise BroadcastError("overwritten")

    manifest = make_manifest(tensors())
    half = MappedTensors(manifest, torch.zeros(manifest.total_bytes, dtype=torch.uint8), check=check)
    async with running(stub, folder) as engine:
        with pytest.raises(BroadcastError, match="overwritten"):
            await engine.load_weights(0, half, "keep")
        await engine.resume()
        assert (stub.paused, engine.version) == (True, -1)
        await engine.load_weights(1, tensors(), "keep")
        assert (stub.paused, engine.version) == (False, 1)


async def test_a_worker_that_could_not_load_is_told_with_what_to_do(stub, folder) -> None:
    async with running(stub, folder) as engine:
        stub.load_reply = LoadReply("broadcast", "the weights cannot be mapped")
        with pytest.raises(GenerationError, match=r"cannot be mapped.*shared_folder"):
            await engine.load_weights(0, tensors(), "keep")
        assert stub.paused


async def test_a_load_whose_answer_is_lost_holds_the_server_until_another_succeeds(stub, folder) -> None:
    async with running(stub, folder) as engine:
        await engine.load_weights(0, tensors(), "keep")
        stub.garble_loads = True
        with pytest.raises(GenerationError, match="not understood"):
            await engine.load_weights(1, tensors(), "keep")
        await engine.resume()
        assert (stub.paused, engine.version) == (True, 0)
        stub.garble_loads = False
        await engine.load_weights(2, tensors(), "keep")
        assert (stub.paused, engine.version) == (False, 2)


async def test_a_shared_folder_that_is_not_there_is_told_before_anything_stops(stub, folder, tmp_path: Path) -> None:
    async with running(stub, folder, shared_folder=str(tmp_path / "nothing")) as engine:
        with pytest.raises(GenerationError, match="shared_folder"):
            await engine.load_weights(0, tensors(), "keep")
        assert not any(call.startswith("/pause") for call in stub.calls)


async def test_sleep_needs_a_server_that_can(stub, folder) -> None:
    stub.sleep_mode = False
    async with running(stub, folder) as engine:
        with pytest.raises(GenerationError, match="--enable-sleep-mode"):
            await engine.sleep(1)


async def test_after_deep_sleep_nothing_runs_until_there_are_weights(stub, folder) -> None:
    async with running(stub, folder) as engine:
        await engine.sleep(2)
        with pytest.raises(GenerationError, match="wake it first"):
            await engine.load_weights(1, tensors(), "keep")
        await engine.wake()
        with pytest.raises(GenerationError, match="of no version"):
            await engine.score([2, 3])
        await engine.load_weights(1, tensors(), "keep")
        told = [call for call in stub.calls if call.startswith(("/sleep", "/wake", "/collective", "/update", "/resume"))][-5:]
        assert told == [
            "/sleep?level=2&mode=keep",
            "/wake_up?tags=weights",
            "/collective_rpc",
            "/update_weight_version",
            "/wake_up?tags=kv_cache",
        ], "the server goes on with the last of its memory: by then the weights have their name"
        assert await engine.score([2, 3, 4]) == [-1.0, -1.0]


async def test_sleeping_and_waking_twice_are_as_once_and_deeper_is_deeper(stub, folder) -> None:
    async with running(stub, folder) as engine:
        await engine.wake()
        for level in (1, 1, 2, 1):
            await engine.sleep(level)
        with pytest.raises(GenerationError, match="asleep; wake it first"):
            await engine.score([2, 3])
        await engine.wake()
        await engine.wake()
        told = [call for call in stub.calls if call.startswith(("/sleep", "/wake"))]
        assert told == ["/sleep?level=1&mode=keep", "/wake_up", "/sleep?level=2&mode=keep", "/wake_up?tags=weights"]
        assert stub.paused, "its weights are gone"


async def test_a_paused_server_stays_paused_over_a_sleep(stub, folder) -> None:
    async with running(stub, folder) as engine:
        await engine.load_weights(1, tensors(), "keep")
        stream = engine.submit(request("a"))
        await stub.until(lambda: len(stub.streamed()) == 1)
        await engine.pause()
        stub.sample(4)
        await engine.sleep(1)
        await engine.wake()
        assert (stub.paused, stub.num_sampled) == (True, 0)
        await engine.resume()
        assert (await collect(stream)).versions == [1] * 4


async def test_a_server_that_could_not_fall_asleep_goes_on(stub, folder) -> None:
    async with running(stub, folder) as engine:
        stub.refuse_sleep = True
        with pytest.raises(GenerationError, match="no room"):
            await engine.sleep(1)
        stub.sample(4)
        assert (await collect(engine.submit(request("a")))).finish_reason == "length"
