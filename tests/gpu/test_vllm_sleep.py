"""vLLM gives its device memory back and takes it again: nothing is sampled meanwhile, or from weights that are not there."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.vllm.embedded import EmbeddedVLLM
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.schema.samples import SamplingParams

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: see docs/vllm.md"),
]
KV_GIB = 2.0
NUM_TOKENS = 2000


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=None,
        initializer_range=0.06,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    config = VLLMEngineConfig(num_slots=4, max_sequence_tokens=4000, kv_cache_gib=KV_GIB, gpu_memory_share=0.3, sleep=True)
    engine = VLLMEngine(EmbeddedVLLM(config), folder)
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: VLLMEngine):
    await started.wake()
    await started.resume()
    await started.load_weights(0, dict(make_model(0).state_dict()), "recompute")
    return started


def request_of(name: str, num_tokens: int = NUM_TOKENS) -> EngineRequest:
    return EngineRequest(name, (5, 6, 7), SamplingParams(max_new_tokens=num_tokens, ignore_eos=True), 0)


async def rest_of(stream) -> tuple[list[int], list[float], list[int]]:
    chunks = [chunk async for chunk in stream]
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        [version for chunk in chunks for version in chunk.versions],
    )


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


async def assert_holds(engine: VLLMEngine, seed: int) -> None:
    ids = list(range(2, 40))
    with torch.inference_mode():
        logits = make_model(seed)(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()
    assert await engine.score(ids) == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("level", [1, 2])
async def test_memory_is_given_back_and_requests_go_on_after_it(engine: VLLMEngine, level) -> None:
    stream = engine.submit(request_of("a"))
    first = await anext(stream)
    awake_bytes = free_bytes()
    await engine.sleep(level)
    assert free_bytes() - awake_bytes > 0.9 * KV_GIB * 2**30
    late = engine.submit(request_of("late", 5))
    with pytest.raises(GenerationError, match="asleep; wake it first"):
        await engine.load_weights(1, dict(make_model(1).state_dict()), "keep")
    with pytest.raises(GenerationError, match="asleep; wake it first"):
        await engine.score([1, 2, 3])
    await engine.wake()
    if level == 2:
        waiting = asyncio.ensure_future(anext(late))  # noqa: TID251 - awaited below
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.5)
        with pytest.raises(GenerationError, match="load others first"):
            await engine.score([1, 2, 3])
        await engine.load_weights(1, dict(make_model(1).state_dict()), "keep")
        assert set((await waiting).versions) == {1}
    token_ids, _, versions = await rest_of(stream)
    assert len(first.token_ids) + len(token_ids) == NUM_TOKENS
    assert versions == sorted(versions)
    assert set(versions) <= ({0, 1} if level == 2 else {0})
    await rest_of(late)
    await assert_holds(engine, 1 if level == 2 else 0)


async def test_a_paused_engine_stays_paused_over_a_sleep(engine: VLLMEngine) -> None:
    await engine.pause()
    stream = engine.submit(request_of("a", 20))
    waiting = asyncio.ensure_future(anext(stream))  # noqa: TID251 - awaited below
    await engine.sleep(1)
    await engine.wake()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.5)
    await assert_holds(engine, 0)
    await engine.resume()
    first = await waiting
    assert len(first.token_ids) + len((await rest_of(stream))[0]) == 20


async def test_sleeping_deeper_and_waking_twice(engine: VLLMEngine) -> None:
    await engine.wake()
    await engine.sleep(1)
    await engine.sleep(1)
    await engine.sleep(2)
    await engine.sleep(1)
    await engine.wake()
    await engine.wake()
    await engine.load_weights(2, dict(make_model(2).state_dict()), "keep")
    await assert_holds(engine, 2)
