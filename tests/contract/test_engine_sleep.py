"""Sleep and wake of engines: memory is really given back, nothing is lost, nothing is sampled from weights that are not there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.clock import SystemClock
from asyncrl.config.generate import FakeEngineConfig, ReplayEngineConfig, TransformersEngineConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import Engine, EngineRequest
from asyncrl.generate.fake_engine import FakeEngine
from asyncrl.generate.replay_engine import ReplayEngine
from asyncrl.generate.slot_model import SlotModel
from asyncrl.generate.transformers_engine import TransformersEngine
from asyncrl.models.adapters import add_adapters
from asyncrl.schema.samples import SamplingParams

VOCABULARY = 64
SLOTS = 4
MAX_TOKENS = 256
LARGE_VOCABULARY = 65536
LARGE_BYTES = LARGE_VOCABULARY * 256 * 4
"""Of the large model's embeddings: past what an allocator keeps for itself."""


def make_model(seed: int, *, tied: bool = True, vocabulary: int = VOCABULARY, hidden: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def config_of(slots: int = SLOTS) -> TransformersEngineConfig:
    return TransformersEngineConfig(num_slots=slots, max_sequence_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    return folder


@pytest.fixture
async def transformers_engine(model_folder: Path):
    engine = TransformersEngine(config_of(), model_folder)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(params=["transformers", "fake"])
async def engine(request: pytest.FixtureRequest, model_folder: Path):
    made: Engine
    if request.param == "fake":
        fake = FakeEngineConfig(
            num_slots=SLOTS, max_sequence_tokens=MAX_TOKENS, vocabulary_size=VOCABULARY, token_latency_s=0.001
        )
        made = FakeEngine(fake, SystemClock())
    else:
        made = TransformersEngine(config_of(), model_folder)
    await made.start()
    await made.load_weights(0, tensors_of(make_model(0)), "keep")
    yield made
    await made.close()


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def request_of(name: str, seed: int = 0, max_new_tokens: int = 100) -> EngineRequest:
    return EngineRequest(name, (5, 6, 7), SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True), seed)


async def rest_of(stream, *before) -> tuple[list[int], list[float], list[int]]:
    """Return token ids, logprobs and versions of chunks already taken and those that follow."""
    chunks = [*before, *[chunk async for chunk in stream]]
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        [version for chunk in chunks for version in chunk.versions],
    )


def plain_logprobs(model: LlamaForCausalLM, token_ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7, *token_ids]])).logits[0, 2:-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None]).squeeze(1).tolist()


async def stays_silent(stream) -> asyncio.Task:
    """Return a task that waits for the stream's next chunk, which does not come though the engine serves another order."""
    waiting = asyncio.get_running_loop().create_task(anext(stream))
    await asyncio.sleep(0)
    return waiting


@pytest.mark.parametrize("level", [1, 2])
async def test_nothing_is_sampled_asleep_and_every_request_goes_on_after_it(engine: Engine, level) -> None:
    streams = [engine.submit(request_of(f"r{i}", i)) for i in range(SLOTS + 2)]
    first = await anext(streams[0])
    await engine.sleep(level)
    await engine.pause()  # an order of its own, and so a round trip to where tokens are made
    late = engine.submit(request_of("late"))
    waiting = await stays_silent(late)
    await engine.resume()
    await engine.pause()
    assert not waiting.done()
    await engine.resume()
    await engine.wake()
    if level == 2:
        await engine.pause()
        assert not waiting.done()
        await engine.load_weights(1, tensors_of(make_model(0)), "keep")
        await engine.resume()
    token_ids, _, versions = await rest_of(streams[0], first)
    assert len(token_ids) == 100
    assert versions == sorted(versions)
    for stream in streams[1:]:
        assert len((await rest_of(stream))[0]) == 100
    assert len((await rest_of(late, await waiting))[0]) == 100
    assert engine.num_running == 0


async def test_orders_that_need_weights_are_refused_asleep(engine: Engine) -> None:
    await engine.sleep(1)
    with pytest.raises(GenerationError, match="asleep; wake it first"):
        await engine.load_weights(1, tensors_of(make_model(1)), "keep")
    with pytest.raises(GenerationError, match="asleep; wake it first"):
        await engine.score([1, 2, 3])
    await engine.wake()
    await engine.load_weights(1, tensors_of(make_model(1)), "keep")
    assert engine.version == 1


async def test_abort_and_close_work_asleep(engine: Engine) -> None:
    streams = [engine.submit(request_of(f"r{i}", i)) for i in range(3)]
    await engine.sleep(2)
    engine.abort("r0")
    assert [chunk async for chunk in streams[0]][-1].finish_reason == "abort"
    await engine.close()
    for stream in streams[1:]:
        assert [chunk async for chunk in stream][-1].finish_reason == "abort"


async def test_waking_twice_and_sleeping_twice_are_as_once(engine: Engine) -> None:
    await engine.sleep(1)
    await engine.sleep(1)
    await engine.wake()
    await engine.wake()
    assert len((await rest_of(engine.submit(request_of("a"))))[0]) == 100


async def test_a_paused_engine_stays_paused_over_a_sleep(engine: Engine) -> None:
    await engine.pause()
    waiting = await stays_silent(stream := engine.submit(request_of("a")))
    await engine.sleep(1)
    await engine.wake()
    await engine.pause()
    assert not waiting.done()
    await engine.resume()
    assert len((await rest_of(stream, await waiting))[0]) == 100


async def test_the_replay_engine_gives_nothing_back_asleep() -> None:
    engine = ReplayEngine(ReplayEngineConfig())
    await engine.load_weights(0, {}, "keep")
    await engine.sleep(2)
    stream = engine.submit(EngineRequest("a", (1,), SamplingParams(max_new_tokens=2), 0, answer_ids=(2, 3)))
    await engine.wake()
    assert engine.num_running == 1
    await engine.load_weights(1, {}, "keep")
    assert (await anext(stream)).versions == (1, 1)


# -- with a real model ---------------------------------------------------------------------------------------------------


async def test_after_level_1_logprobs_are_those_of_a_plain_forward(transformers_engine) -> None:
    stream = transformers_engine.submit(request_of("a", max_new_tokens=200))
    first = await anext(stream)
    await transformers_engine.sleep(1)
    await transformers_engine.wake()
    token_ids, logprobs, _ = await rest_of(stream, first)
    assert logprobs == pytest.approx(plain_logprobs(make_model(0), token_ids), abs=1e-5)


async def test_after_level_2_logprobs_are_those_of_the_weights_loaded(transformers_engine) -> None:
    await transformers_engine.load_weights(0, tensors_of(make_model(0)), "keep")
    stream = transformers_engine.submit(request_of("a", max_new_tokens=200))
    first = await anext(stream)
    await transformers_engine.sleep(2)
    await transformers_engine.wake()
    with pytest.raises(GenerationError, match="no whole weights"):
        await transformers_engine.score([1, 2])
    new = make_model(1)
    await transformers_engine.load_weights(1, tensors_of(new), "keep")
    token_ids, logprobs, versions = await rest_of(stream, first)
    start = versions.index(1)
    assert logprobs[start:] == pytest.approx(plain_logprobs(new, token_ids)[start:], abs=1e-5)


async def test_level_1_on_a_cpu_frees_the_cache_and_level_2_the_weights_too(transformers_engine) -> None:
    awake = transformers_engine.model_bytes
    weights = sum(tensor.nbytes for tensor in tensors_of(make_model(0)).values())
    await transformers_engine.sleep(1)
    assert transformers_engine.model_bytes == weights
    await transformers_engine.sleep(2)
    assert transformers_engine.model_bytes == 0
    await transformers_engine.wake()
    assert transformers_engine.model_bytes == awake


async def test_level_2_gives_the_memory_back_to_the_system(tmp_path: Path) -> None:
    model = make_model(0, vocabulary=LARGE_VOCABULARY, hidden=256)
    model.save_pretrained(tmp_path)
    tensors = tensors_of(model)
    process = psutil.Process()
    engine = TransformersEngine(config_of(), tmp_path)
    await engine.start()
    await engine.load_weights(0, tensors, "keep")
    awake_bytes = process.memory_info().rss
    await engine.sleep(2)
    assert awake_bytes - process.memory_info().rss > 0.9 * LARGE_BYTES
    await engine.wake()
    await engine.load_weights(1, tensors, "keep")
    assert awake_bytes - process.memory_info().rss < 0.1 * LARGE_BYTES
    await engine.close()


def test_tied_weights_are_tied_after_level_2_as_before(model_folder: Path) -> None:
    model = SlotModel.load(model_folder, config_of())
    model.sleep(2)
    model.wake()
    new = make_model(3)
    model.load_weights(tensors_of(new))
    ids = [3, 9, 27, 11]
    with torch.inference_mode():
        logits = new(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()
    assert model.score(ids) == pytest.approx(expected, abs=1e-5)


def test_level_2_keeps_the_base_that_adapters_stand_on(model_folder: Path) -> None:
    model = SlotModel.load(model_folder, config_of(), lora=LoRAConfig(rank=2))
    before = model.score([3, 9, 27, 11])
    model.sleep(2)
    model.wake()
    model.load_weights(model_adapters(model_folder))
    assert model.score([3, 9, 27, 11]) == pytest.approx(before, abs=1e-6)


def model_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Return fresh adapters' tensors: their product is zero, so they change nothing."""
    model = LlamaForCausalLM.from_pretrained(folder)
    add_adapters(model, LoRAConfig(rank=2), 0)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name in trainable}
