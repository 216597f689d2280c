"""The engine without a model, and the codec that knows what it gives back."""

from __future__ import annotations

import msgspec
import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.generate import ReplayEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.doubles.fake import FakeEngine
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.tokenizer import TokenizerCodec
from asyncrl.learner.model.policy import character_tokenizer
from asyncrl.schema.samples import PreferenceAnswers, Prompt, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=4)
EOS = 1


def request(name="r", prompt=(5, 6), answer=(7, 8, EOS)):
    return EngineRequest(name, prompt, SAMPLING, seed=0, answer_ids=answer)


async def all_of(stream):
    return [chunk async for chunk in stream]


async def test_nothing_comes_back_before_the_first_version_or_while_paused():
    engine = FakeEngine(ReplayEngineConfig(), SystemClock())
    await engine.start()
    first = engine.submit(request("a"))
    assert (engine.version, engine.num_running) == (-1, 1)
    await engine.pause()
    await engine.load_weights(0, {}, "keep")
    second = engine.submit(request("b"))
    assert engine.num_running == 2
    await engine.load_weights(1, {}, "keep")
    await engine.resume()
    assert [chunk.versions for stream in (first, second) for chunk in await all_of(stream)] == [(1, 1, 1)] * 2
    with pytest.raises(GenerationError, match="holds no model"):
        await engine.score([1, 2])
    await engine.close()


@pytest.fixture
def codec(tmp_path):
    character_tokenizer("+=0123").save_pretrained(tmp_path)
    return TokenizerCodec(tmp_path, replays=True)


def preference(chosen="3", rejected="12"):
    return Prompt("p", text="1+2=", reference_json=msgspec.json.encode(PreferenceAnswers(chosen, rejected)).decode())


@pytest.mark.parametrize(
    ("prompt", "index", "reason"),
    [
        (Prompt("p", text="1+2="), 0, "no chosen and rejected answer"),
        (preference(), 2, "but none 2"),
        (preference(chosen="hello"), 0, "cannot be tokenised"),
    ],
)
def test_what_has_no_answer_fails_with_the_reason(codec, prompt, index, reason):
    with pytest.raises(GenerationError, match=reason):
        codec.answer(prompt, index)
