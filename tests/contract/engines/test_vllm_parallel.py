"""vLLM over several ranks: two replicas (data parallel) of two ranks each (tensor parallel) do as a single one does."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.generate.vllm.launch import installed_version
from tests.contract import engine_cases as cases
from tests.contract.engines.conftest import WITH_VLLM, deferred, is_gone, made_new, vllm_engine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), *WITH_VLLM]
REPLICAS, RANKS = 2, 2


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def shared_engine(model_folder: Path):
    async with vllm_engine(model_folder, tensor_parallel=RANKS, data_parallel=REPLICAS) as engine:
        assert [len(core.children()) for core in cores_of(engine)] == [RANKS] * REPLICAS
        assert engine.num_slots == REPLICAS * cases.SLOTS
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: VLLMEngine):
    return await made_new(shared_engine, cases.tensors_of(cases.make_model(0)))


def crowd(name: str, num_tokens: int = 40):
    return [
        cases.make_request(f"{name}{i}", i, tuple(range(2, 6 + i)), max_new_tokens=num_tokens)
        for i in range(REPLICAS * cases.SLOTS)
    ]


def cores_of(engine: VLLMEngine) -> list[psutil.Process]:
    """One a replica: this process's children that have children."""
    found = [process for process in engine.backend.processes if process.ppid() == os.getpid() and process.children()]
    return sorted(found, key=lambda process: process.create_time())


async def assert_holds(engine: VLLMEngine, model) -> None:
    """Every rank of every replica has its share of the model: what each samples agrees with a forward."""
    requests, busy = crowd("holds", 200), set()

    async def noting_who_works(stream):
        async for chunk in stream:
            busy.update(replica for replica, (_, running) in engine.backend.fullness.items() if running)
            yield chunk

    streams = [noting_who_works(engine.submit(request)) for request in requests]
    completions = [await cases.collect(stream) for stream in streams]
    assert len(busy) == REPLICAS, "a replica had nothing to do"
    for request, held in zip(requests, completions, strict=True):
        assert held.logprobs == pytest.approx(cases.reference_logprobs(model, request.prompt_ids, held.token_ids), abs=1e-5)
    probe = list(range(2, 40))
    assert await engine.score(probe) == pytest.approx(cases.reference_score(model, probe), abs=1e-5)


async def test_every_rank_takes_its_share_of_new_weights_in_flight(engine: VLLMEngine) -> None:
    completions, new = await cases.update_in_flight(engine, "recompute", REPLICAS * cases.SLOTS)
    old = cases.make_model(0)
    for request, completion in completions:
        first = completion.versions.index(1)
        before = cases.reference_logprobs(old, request.prompt_ids, completion.token_ids)[:first]
        after = cases.reference_logprobs(new, request.prompt_ids, completion.token_ids)[first:]
        assert completion.logprobs == pytest.approx(before + after, abs=1e-5)
    await assert_holds(engine, new)


async def test_pause_holds_every_replica_and_a_score_goes_between(engine: VLLMEngine) -> None:
    requests = crowd("r", 100)
    undisturbed = await cases.collect_all(engine, requests)
    streams = [engine.submit(request) for request in requests]
    first_chunks = [await anext(stream) for stream in streams]
    await engine.pause()
    await asyncio.wait_for(engine.score([1, 2, 3]), 30)
    taken = engine.backend._num_pieces
    await asyncio.sleep(0.2)
    assert engine.backend._num_pieces == taken
    await engine.resume()
    for stream, first, whole in zip(streams, first_chunks, undisturbed, strict=True):
        assert (await cases.collect(stream, first)).token_ids == whole.token_ids


async def test_bytes_that_fail_in_one_replica_alone_stop_sampling_until_a_whole_version_came(engine, tmp_path: Path) -> None:
    """Only the first replica's workers can answer; what goes wrong in another one must not be lost."""
    pid = cores_of(engine)[-1].pid
    with pytest.raises(BroadcastError, match="the sender is gone"):
        await engine.load_weights(1, deferred(cases.tensors_of(cases.make_model(4)), tmp_path, f"half below {pid}"), "keep")
    assert engine.version == -1
    with pytest.raises(GenerationError, match="came only in part"):
        await engine.score([3, 4, 5])
    new = cases.make_model(5)
    await engine.load_weights(2, deferred(cases.tensors_of(new), tmp_path), "keep")
    await assert_holds(engine, new)


async def test_close_ends_every_stream_with_abort_and_leaves_no_process_and_nothing_in_memory(engine: VLLMEngine) -> None:
    """Last: it ends the engine."""
    streams = [engine.submit(request) for request in crowd("late", 200)]
    processes = list(engine.backend.processes)
    assert len(processes) >= REPLICAS * (1 + RANKS)
    shared = {name for process in processes for name in shared_memory_of(process.pid)}
    assert len([name for name in shared if name.startswith("psm_")]) >= REPLICAS, "nothing was looked at"
    sockets = engine.backend.sockets.path
    assert any(path.is_socket() for path in sockets.iterdir()), "vLLM's processes talk by sockets in there"
    if installed_version().release >= (0, 28):
        assert any(sockets.glob("vllm_dist_*")), "its ranks find each other by a file in there"
    await engine.close()
    await engine.close()
    assert {(await cases.collect(stream)).finish_reason for stream in streams} == {"abort"}
    assert all(map(is_gone, processes))
    assert not sockets.exists()
    assert not shared & set(os.listdir("/dev/shm"))
    with pytest.raises(GenerationError, match="closed"):
        engine.submit(cases.make_request("late"))


def shared_memory_of(pid: int) -> set[str]:
    """Names in /dev/shm of what a process has mapped, of what was unlinked meanwhile too."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.partition("/dev/shm/")[2].removesuffix(" (deleted)") for line in lines if "/dev/shm/" in line}
