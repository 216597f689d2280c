"""What the engine is asked for, member by member; the engine that gives back a file's answers, and the codec that knows them.

That a file's answers come back as samples that are trained is seen in tests/integration/run/test_data_path.py.
"""

import asyncio
import dataclasses

import msgspec
import pytest

from asyncrl.config.generate import ReplayEngineConfig
from asyncrl.errors import EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.fake import FakeEngine
from asyncrl.generate.rollout import ByteCodec, Rollout, TokenizerCodec
from asyncrl.learner.model.policy import character_tokenizer
from asyncrl.schema.samples import GroupWork, PreferenceAnswers, Prompt, SampleFailure, Samples, SamplingParams, ids_from_bytes
from tests.virtual_clock import VirtualClock

SAMPLING = SamplingParams(max_new_tokens=4)


class Asked(FakeEngine):
    """Remembers requests; answers each with its temperature, in hundredths, as a token."""

    def __init__(self):
        super().__init__(ReplayEngineConfig(), VirtualClock())
        self.requests = []

    def submit(self, request, news=None):
        self.requests.append(request)
        return super().submit(dataclasses.replace(request, answer_ids=(round(100 * request.sampling.temperature),)), news)


class Dies(FakeEngine):
    """Loses every request, as an engine does whose process is killed."""

    def submit(self, request, news=None):
        stream = super().submit(dataclasses.replace(request, answer_ids=(1,)), news)
        stream.put(EngineDied("killed"))
        return stream


async def run(engine, codec, prompt, results, members=(0, 1), **work):
    async def send(result):
        results.extend(result.members() if isinstance(result, Samples) else [result])

    await engine.start()
    await engine.load_weights(5, {}, "keep")
    try:
        group = GroupWork(1, 1, prompt, members, **{"sampling": SAMPLING, "seed": 9} | work)
        await Rollout(engine, codec, VirtualClock(), "generator-0", send).run_group(group)
    finally:
        await engine.close()
    results.sort(key=lambda result: result.index)


async def test_only_the_greedy_member_is_drawn_at_temperature_0():
    engine, samples = Asked(), []
    sampling = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.9)
    await run(engine, ByteCodec(128), Prompt("p", text="abc"), samples, (0, 1, 2), sampling=sampling, greedy_index=2)
    assert [ids_from_bytes(sample.token_ids).tolist() for sample in samples] == [[70], [70], [0]]
    assert {request.sampling.top_p for request in engine.requests} == {0.9}
    assert len({request.seed for request in engine.requests}) == 3


async def test_members_of_an_engine_that_died_are_not_failed_samples():
    results = []
    with pytest.raises(EngineDied, match="killed"):
        await run(Dies(ReplayEngineConfig(), VirtualClock()), ByteCodec(128), Prompt("p", text="abc"), results)
    assert results == []


@pytest.fixture
def codec(tmp_path):
    character_tokenizer("+=0123").save_pretrained(tmp_path)
    return TokenizerCodec(tmp_path, replays=True)


async def test_the_tokenizer_s_end_stops_a_completion_whatever_the_model_s_files_say(codec):
    engine = Asked()
    await run(engine, codec, preference(), [], (0,), sampling=SamplingParams(max_new_tokens=4, stop_token_ids=(3,)))
    assert [request.sampling.stop_token_ids for request in engine.requests] == [(3, 1)]


def preference(chosen="3", rejected="12"):
    return Prompt("p", text="1+2=", reference_json=msgspec.json.encode(PreferenceAnswers(chosen, rejected)).decode())


class Unreadable(TokenizerCodec):
    """Has answers that no tokenizer knows."""

    def answer(self, prompt, index):
        return (-1,)


@pytest.mark.parametrize(("folder", "reason"), [(".", "turned into text: OverflowError"), ("gone", "cannot load a tokenizer")])
async def test_what_no_tokenizer_can_read_fails_its_members_and_not_the_generator(codec, tmp_path, folder, reason):
    results = []
    codec = Unreadable(tmp_path / folder)
    await run(FakeEngine(ReplayEngineConfig(), VirtualClock()), codec, Prompt("p", text="1+2="), results)
    assert len(results) == 2
    for result in results:
        assert isinstance(result, SampleFailure)
        assert reason in result.reason


@pytest.mark.parametrize(("prompt", "index", "reason"), [
    (Prompt("p", text="1+2="), 0, "no chosen and rejected answer"), (preference(), 2, "but none 2"),
    (preference(chosen="hello"), 0, "cannot be tokenised"),
])  # fmt: skip
def test_what_has_no_answer_fails_with_the_reason(codec, prompt, index, reason):
    with pytest.raises(GenerationError, match=reason):
        codec.answer(prompt, index)


async def test_nothing_comes_back_before_the_first_version():
    engine = FakeEngine(ReplayEngineConfig(), VirtualClock())
    await engine.start()
    stream = engine.submit(EngineRequest("a", (5, 6), SAMPLING, seed=0, answer_ids=(7, 8, 1)))
    for _ in range(5):
        await asyncio.sleep(0)
    await engine.load_weights(1, {}, "keep")
    assert [(chunk.versions, tuple(chunk.logprobs)) async for chunk in stream] == [((1, 1, 1), (0.0, 0.0, 0.0))]
    await engine.close()
