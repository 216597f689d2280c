"""vLLM gives its device memory back and takes it again: nothing is sampled meanwhile, or from weights that are not there."""

import asyncio
from importlib.util import find_spec

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import KVPolicy
from asyncrl.generate.vllm.embedded import EmbeddedVLLM
from asyncrl.generate.vllm.engine import VLLMEngine
from tests.contract.engine_cases import collect, make_model, make_request, reference_score, started

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: see docs/vllm.md"),
]
KV_GIB = 2.0
NUM_TOKENS = 2000


def model_of(seed: int) -> LlamaForCausalLM:
    return make_model(seed, hidden_size=256, head_dim=64, max_position_embeddings=4096, initializer_range=0.06)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def awake(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    model_of(0).save_pretrained(folder)
    config = VLLMEngineConfig(num_slots=4, max_sequence_tokens=4000, kv_cache_gib=KV_GIB, gpu_memory_share=0.3, sleep=True)
    async with started(VLLMEngine(EmbeddedVLLM(config), folder)) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(awake: VLLMEngine):
    await awake.wake()
    await awake.resume()
    await load(awake, 0, "recompute")
    return awake


async def load(engine: VLLMEngine, version: int, kv: KVPolicy = "keep") -> None:
    await engine.load_weights(version, dict(model_of(version).state_dict()), kv)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


async def assert_holds(engine: VLLMEngine, seed: int) -> None:
    ids = list(range(2, 40))
    assert await engine.score(ids) == pytest.approx(reference_score(model_of(seed), ids), abs=1e-2)


async def test_memory_is_given_back_and_requests_go_on_after_it(engine: VLLMEngine) -> None:
    stream = engine.submit(make_request("a", max_new_tokens=NUM_TOKENS))
    first = await anext(stream)
    awake_bytes = free_bytes()
    await engine.sleep()
    assert free_bytes() - awake_bytes > 0.9 * KV_GIB * 2**30
    late = engine.submit(make_request("late", max_new_tokens=5))
    with pytest.raises(GenerationError, match="asleep; wake it first"):
        await load(engine, 1)
    with pytest.raises(GenerationError, match="asleep; wake it first"):
        await engine.score([1, 2, 3])
    await engine.wake()
    waiting = asyncio.ensure_future(anext(late))  # noqa: TID251 - awaited below
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.5)
    with pytest.raises(GenerationError, match="load others first"):
        await engine.score([1, 2, 3])
    await load(engine, 1)
    assert set((await waiting).versions) == {1}
    whole = await collect(stream, first)
    assert len(whole.token_ids) == NUM_TOKENS
    assert whole.versions == sorted(whole.versions)
    assert set(whole.versions) <= {0, 1}
    assert len((await collect(late, await waiting)).token_ids) == 5
    await assert_holds(engine, 1)


async def test_a_paused_engine_stays_paused_over_a_sleep(engine: VLLMEngine) -> None:
    await engine.pause()
    stream = engine.submit(make_request("a"))
    waiting = asyncio.ensure_future(anext(stream))  # noqa: TID251 - awaited below
    await engine.sleep()
    await engine.wake()
    await load(engine, 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.5)
    await assert_holds(engine, 0)
    await engine.resume()
    assert len((await collect(stream, await waiting)).token_ids) == 20
