"""Sleep and wake of engines: memory is really given back, nothing is lost, nothing is sampled from weights that are not there."""

import asyncio
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import Engine, EngineRequest
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.scheduler import InFlight, SlotDecoder
from asyncrl.models.adapters import add_adapters
from tests.contract import engine_cases as cases

LARGE_VOCABULARY = 65536
LARGE_BYTES = LARGE_VOCABULARY * 256 * 4
"""Of the large model's embeddings: past what an allocator keeps for itself."""


@pytest.fixture(params=["transformers", "fake"])
async def engine(request: pytest.FixtureRequest, model_folder: Path):
    async with cases.fake_engine() if request.param == "fake" else cases.transformers_engine(model_folder) as made:
        await made.load_weights(0, cases.tensors_of(cases.make_model(0)), "keep")
        yield made


def long_request(name: str, seed: int = 0, max_new_tokens: int = 100) -> EngineRequest:
    return cases.make_request(name, seed, max_new_tokens=max_new_tokens)


async def stays_silent(stream) -> asyncio.Task:
    """Return a task that waits for the stream's next chunk, which does not come though the engine serves another order."""
    waiting = asyncio.get_running_loop().create_task(anext(stream))
    await asyncio.sleep(0)
    return waiting


async def test_nothing_is_sampled_asleep_and_every_request_goes_on_after_it(engine: Engine) -> None:
    streams = [engine.submit(long_request(f"r{i}", i)) for i in range(cases.SLOTS + 2)]
    first = await anext(streams[0])
    await engine.sleep()
    await engine.pause()  # an order of its own, and so a round trip to where tokens are made
    late = engine.submit(long_request("late"))
    waiting = await stays_silent(late)
    await engine.resume()
    await engine.pause()
    assert not waiting.done()
    await engine.resume()
    await engine.wake()
    await engine.pause()
    assert not waiting.done()
    await engine.load_weights(1, cases.tensors_of(cases.make_model(0)), "keep")
    await engine.resume()
    whole = await cases.collect(streams[0], first)
    assert len(whole.token_ids) == 100
    assert whole.versions == sorted(whole.versions)
    for stream in streams[1:]:
        assert len((await cases.collect(stream)).token_ids) == 100
    assert len((await cases.collect(late, await waiting)).token_ids) == 100
    assert engine.num_running == 0


async def test_abort_and_close_work_asleep(engine: Engine) -> None:
    streams = [engine.submit(long_request(f"r{i}", i, max_new_tokens=250)) for i in range(3)]
    await engine.sleep()
    engine.abort("r0")
    assert [chunk async for chunk in streams[0]][-1].finish_reason == "abort"
    await engine.close()
    for stream in streams[1:]:
        assert [chunk async for chunk in stream][-1].finish_reason == "abort"


async def test_asleep_weights_are_refused_and_a_paused_engine_stays_paused_over_it(engine: Engine) -> None:
    await engine.pause()
    waiting = await stays_silent(stream := engine.submit(long_request("a")))
    await engine.sleep()
    for order in (engine.load_weights(1, cases.tensors_of(cases.make_model(1)), "keep"), engine.score([1, 2, 3])):
        with pytest.raises(GenerationError, match="asleep; wake it first"):
            await order
    await engine.wake()
    await engine.load_weights(1, cases.tensors_of(cases.make_model(0)), "keep")
    assert not waiting.done()
    await engine.resume()
    assert len((await cases.collect(stream, await waiting)).token_ids) == 100


# -- with a real model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_requests_go_on_to_the_last_bit_as_in_an_engine_that_stays_awake(model_folder: Path, kv) -> None:
    """With new weights over keys and values of the old ones (`keep`), or over their own."""
    made: dict[bool, dict[str, list[float]]] = {}
    for sleeps in (False, True):
        decoder = SlotDecoder(SlotModel.load(model_folder, cases.config_of()), cases.SLOTS)
        decoder.load_weights(0, cases.tensors_of(cases.make_model(0)), "keep")
        for name, seed, most in (("long", 0, 200), ("short", 1, 40), ("aborted", 2, 200)):
            decoder.submit(InFlight(cases.make_request(name, seed, max_new_tokens=most), frozenset()))
        emissions = [emission for _ in range(70) for emission in decoder.step()]
        if sleeps:
            awake = decoder.model.resident
            decoder.sleep(kv)
            decoder.sleep(kv)
            assert decoder.model.resident == {"engine weights": 0, "KV cache": 0}
        emissions += decoder.abort("aborted")
        if sleeps:
            decoder.wake()
            assert decoder.model.resident == awake
        decoder.load_weights(1, cases.tensors_of(cases.make_model(1)), kv)
        while decoder.has_work:
            emissions += decoder.step()
        made[sleeps] = {request_id: list(news.logprobs) for request_id, news in emissions}
        assert {name: len(logprobs) for name, logprobs in made[sleeps].items()} == {"long": 200, "short": 40, "aborted": 70}
    assert made[True] == made[False]


def test_where_host_memory_has_no_room_for_keys_and_values_nothing_is_given_back(model_folder: Path, monkeypatch) -> None:
    def full(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    decoder = SlotDecoder(SlotModel.load(model_folder, cases.config_of()), cases.SLOTS)
    decoder.load_weights(0, cases.tensors_of(cases.make_model(0)), "keep")
    decoder.submit(InFlight(cases.make_request("a", max_new_tokens=20), frozenset()))
    decoder.step()
    awake = decoder.model.resident
    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(GenerationError, match="no room in host memory"):
        decoder.sleep("keep")
    monkeypatch.undo()
    assert decoder.model.resident == awake
    while decoder.has_work:
        news = decoder.step()
    assert news[0][1].finish_reason == "length"


async def test_sleep_gives_the_memory_back_to_the_system(tmp_path: Path) -> None:
    model = cases.make_model(0, vocab_size=LARGE_VOCABULARY, hidden_size=256, intermediate_size=64)
    model.save_pretrained(tmp_path)
    tensors = cases.tensors_of(model)
    process = psutil.Process()
    async with cases.transformers_engine(tmp_path) as engine:
        await engine.load_weights(0, tensors, "keep")
        awake_bytes = process.memory_info().rss
        await engine.sleep()
        assert awake_bytes - process.memory_info().rss > 0.9 * LARGE_BYTES
        await engine.wake()
        await engine.load_weights(1, tensors, "keep")
        assert awake_bytes - process.memory_info().rss < 0.1 * LARGE_BYTES


def test_the_base_that_adapters_stand_on_keeps_its_values(model_folder: Path) -> None:
    model = SlotModel.load(model_folder, cases.config_of(), lora=LoRAConfig(rank=2))
    before = model.score([3, 9, 27, 11])
    model.sleep()
    model.wake()
    fresh = LlamaForCausalLM.from_pretrained(model_folder)  # the product of fresh adapters is zero: they change nothing
    add_adapters(fresh, LoRAConfig(rank=2), 0)
    model.load_weights({name: weight.detach().clone() for name, weight in fresh.named_parameters() if weight.requires_grad})
    assert model.score([3, 9, 27, 11]) == pytest.approx(before, abs=1e-6)
