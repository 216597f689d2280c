"""What the engine is asked for, member by member."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from asyncrl.config.generate import ReplayEngineConfig
from asyncrl.errors import EngineDied
from asyncrl.generate.doubles.fake import FakeEngine
from asyncrl.generate.rollout import Rollout
from asyncrl.generate.tokenizer import ByteCodec, TokenizerCodec
from asyncrl.learner.model.policy import character_tokenizer
from asyncrl.schema.samples import (
    GroupWork,
    PreferenceAnswers,
    Prompt,
    SampleFailure,
    Samples,
    SamplingParams,
    ids_from_bytes,
    logprobs_from_bytes,
)
from tests.virtual_clock import VirtualClock


class Asked(FakeEngine):
    """Remembers requests; answers each with its temperature, in hundredths, as a token."""

    def __init__(self):
        super().__init__(ReplayEngineConfig(), VirtualClock())
        self.requests = []

    def submit(self, request, news=None):
        self.requests.append(request)
        return super().submit(dataclasses.replace(request, answer_ids=(round(100 * request.sampling.temperature),)), news)


async def results_of(engine, codec, work):
    results = []

    async def send(result):
        results.extend(result.members() if isinstance(result, Samples) else [result])

    await engine.start()
    await Rollout(engine, codec, VirtualClock(), "generator-0", send).run_group(work)
    await engine.close()
    return sorted(results, key=lambda result: result.index)


async def test_only_the_greedy_member_is_drawn_at_temperature_0():
    engine = Asked()
    await engine.load_weights(0, {}, "keep")
    sampling = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.9)
    work = GroupWork(1, 1, Prompt("p", text="abc"), (0, 1, 2), sampling, seed=9, greedy_index=2)
    samples = await results_of(engine, ByteCodec(128), work)
    assert [ids_from_bytes(sample.token_ids).tolist() for sample in samples] == [[70], [70], [0]]
    assert {request.sampling.top_p for request in engine.requests} == {0.9}
    assert len({request.seed for request in engine.requests}) == 3


class Dies(FakeEngine):
    """Loses every request, as an engine does whose process is killed."""

    def submit(self, request, news=None):
        stream = super().submit(request, news)
        stream.put(EngineDied("killed"))
        return stream


async def test_members_of_an_engine_that_died_are_not_failed_samples():
    results = []
    work = GroupWork(1, 1, Prompt("p", text="abc"), (0, 1), SamplingParams(max_new_tokens=4), seed=9)

    async def send(result):
        results.append(result)

    with pytest.raises(EngineDied, match="killed"):
        await Rollout(Dies(ReplayEngineConfig(), VirtualClock()), Answers(), VirtualClock(), "generator-0", send).run_group(work)
    assert results == []


class Answers(ByteCodec):
    """Bytes as tokens, and an answer for whoever asks."""

    def __init__(self):
        super().__init__(128)

    def answer(self, prompt, index):
        return (1,)


def preference(chosen, rejected):
    return Prompt("p", text="1+2=", reference_json=msgspec.json.encode(PreferenceAnswers(chosen, rejected)).decode())


async def test_a_file_s_answers_come_back_as_the_samples_of_their_group(tmp_path):
    character_tokenizer("+=0123").save_pretrained(tmp_path)
    engine = FakeEngine(ReplayEngineConfig(max_sequence_tokens=8), VirtualClock())
    await engine.load_weights(5, {}, "keep")
    work = GroupWork(1, 1, preference("3", "12"), (0, 1), SamplingParams(max_new_tokens=4), seed=9)
    chosen, rejected = await results_of(engine, TokenizerCodec(tmp_path, replays=True), work)
    assert [(sample.text, sample.finish_reason, sample.num_tokens) for sample in (chosen, rejected)] == [
        ("3", "stop", 2),
        ("12", "stop", 3),
    ]
    assert ids_from_bytes(rejected.versions).tolist() == [5, 5, 5]
    assert logprobs_from_bytes(rejected.logprobs).tolist() == [0.0, 0.0, 0.0]
    assert chosen.prompt_ids == rejected.prompt_ids


class Unreadable(TokenizerCodec):
    """Has answers that no tokenizer knows."""

    def answer(self, prompt, index):
        return (-1,)


async def test_a_completion_that_the_tokenizer_cannot_read_fails_its_member_and_not_the_generator(tmp_path):
    character_tokenizer("+=0123").save_pretrained(tmp_path)
    engine = FakeEngine(ReplayEngineConfig(), VirtualClock())
    await engine.load_weights(0, {}, "keep")
    work = GroupWork(1, 1, Prompt("p", text="1+2="), (0, 1), SamplingParams(max_new_tokens=4), seed=9)
    for result in await results_of(engine, Unreadable(tmp_path), work):
        assert isinstance(result, SampleFailure)
        assert "cannot be turned into text: OverflowError" in result.reason
