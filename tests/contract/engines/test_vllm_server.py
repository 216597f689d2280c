"""The engine contract's essentials over a real vLLM server: its own process, loopback, a tiny model on the CPU.

One server for the whole file; each test begins with an engine of its own, as a generator's process would. Its model is what the
embedded engines' are not: a mixture with buffers, untied, whose experts vLLM packs.
"""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from asyncrl.clock import SystemClock
from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.generate.vllm.launch import EXTENSION, installed_version
from asyncrl.generate.vllm.server import VLLMServer
from tests.contract.engine_cases import VOCABULARY, collect, make_request, reference_logprobs, started
from tests.contract.engines.conftest import ONE_PROCESS

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None or not installed_version().has_weight_versions,
        reason="no vLLM of 0.32 or newer: see docs/vllm.md",
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="starts a server for the CPU"),
]

MAX_TOKENS = 512
KEY = "a-key-for-this-test"
START_TIMEOUT_S = 300.0
ABS_ERROR = 1e-4
"""Of logprobs: sums over experts are of another order."""
LONG = 450
"""Tokens of a completion that is still under way when a test does something to it."""


def model_of(seed: int) -> PreTrainedModel:
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=96, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=1,
        n_shared_experts=1, n_group=1, topk_group=1, max_position_embeddings=MAX_TOKENS, initializer_range=0.2,
        bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    assert not config.tie_word_embeddings
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model_of(seed).named_parameters()}


@dataclass
class Server:
    url: str
    folder: Path
    key_file: Path


def free_port() -> int:
    """Return one below those that the system gives to whoever asks for any: it is half a minute before the server takes it."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, max(first_given, 11_000)), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports, and none is free")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model_of(0).save_pretrained(folder / "model")
    (folder / "key").write_text(KEY + "\n")
    port = free_port()
    arguments = f"--host 127.0.0.1 --port {port} --logprobs-mode processed_logprobs --dtype float32".split()
    arguments += f"--skip-tokenizer-init --enforce-eager --max-model-len {MAX_TOKENS} --max-num-seqs 10 --api-key {KEY}".split()
    executor = ONE_PROCESS["arguments"]["distributed_executor_backend"]
    arguments += ["--enable-scale-out", "--distributed-executor-backend", executor]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1", "VLLM_RPC_BASE_PATH": str(folder),
    }  # fmt: skip
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", str(folder / "model"), "--worker-extension-cls", EXTENSION, *arguments]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Server(f"http://127.0.0.1:{port}", folder / "model", folder / "key")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
async def engine(server: Server):
    config = VLLMServerEngineConfig(
        url=server.url, max_sequence_tokens=MAX_TOKENS, num_slots=8, api_key_file=str(server.key_file),
        start_timeout_s=START_TIMEOUT_S,
    )  # fmt: skip
    async with started(VLLMEngine(VLLMServer(config, SystemClock()), server.folder)) as made:
        yield made


async def until_running(server: Server, num: int) -> None:
    """Wait until the server runs so many requests, or none any more."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while True:
            async with session.get(f"{server.url}/metrics") as answer:
                rows = [row for row in (await answer.text()).splitlines() if row.startswith("vllm:num_requests_running{")]
            running = sum(float(row.rpartition(" ")[2]) for row in rows)
            if rows and (running >= num if num else running == 0):
                return
            await asyncio.sleep(0.02)


async def test_weights_come_in_flight_and_every_token_knows_its_version(engine: VLLMEngine, server: Server) -> None:
    await engine.load_weights(0, weights_of(0), "recompute")
    temperature = 0.7
    requests = [
        make_request(f"r{i}", i, tuple(range(2, 12 + i)), max_new_tokens=LONG, temperature=temperature) for i in range(10)
    ]
    streams = [engine.submit(request) for request in requests]
    await until_running(server, 4)
    assert await engine.load_weights(1, weights_of(1), "recompute") >= 0
    completions = [await collect(stream) for stream in streams]
    assert any(set(completion.versions) == {0, 1} for completion in completions)
    assert all(len(completion.token_ids) == LONG for completion in completions)
    assert completions[-1].versions == [1] * LONG
    old, new = model_of(0), model_of(1)
    for request, completion in zip(requests, completions, strict=True):
        assert completion.versions == sorted(completion.versions)
        first = completion.versions.index(1) if 1 in completion.versions else LONG
        by_old = reference_logprobs(old, request.prompt_ids, completion.token_ids, temperature)
        assert completion.logprobs[:first] == pytest.approx(by_old[:first], abs=ABS_ERROR)
        by_new = reference_logprobs(new, request.prompt_ids, completion.token_ids, temperature)
        assert completion.logprobs[first:] == pytest.approx(by_new[first:], abs=ABS_ERROR)


async def test_abort_early_close_and_close_leave_the_server_idle(engine: VLLMEngine, server: Server) -> None:
    aborted, closed = (engine.submit(make_request(name, max_new_tokens=LONG)) for name in ("aborted", "closed"))
    await until_running(server, 2)
    engine.abort("aborted")
    assert (await collect(aborted)).finish_reason == "abort"
    closed.close()
    assert engine.num_running == 0
    await until_running(server, 0)
    streams = [engine.submit(make_request(f"r{i}", i, max_new_tokens=LONG)) for i in range(12)]
    await until_running(server, 1)
    await engine.close()
    assert {(await collect(stream)).finish_reason for stream in streams} == {"abort"}
    await until_running(server, 0)
