import asyncio

import pytest

from asyncrl.reward.caller import judge_for
from asyncrl.schema.codec import encode
from asyncrl.schema.samples import Prompt, ScoreRequest


class Silent(Exception):  # noqa: N818 - what a library might raise
    def __str__(self):
        raise KeyError("no words")


RAISED = [Silent(), ValueError("\ud800"), ValueError("word " * 1_000_000), KeyError("x"), asyncio.CancelledError()]


class Over(Exception):  # noqa: N818 - the end of the run
    pass


async def test_whatever_a_caller_s_function_raises_fails_its_sample_in_bounded_text_that_can_be_sent():
    told = []

    async def ask(judged):
        told.extend(judged.answers)
        if not judged.wants:
            encode(judged)
            return []
        if not judged.held:
            texts = tuple(map(str, range(len(RAISED) + 2)))
            indices = tuple(range(len(texts)))
            return [ScoreRequest(1, 0, Prompt("p"), indices, texts, ("stop",) * len(texts), (1,) * len(texts))]
        while not told:
            await asyncio.sleep(0)
        raise Over

    def reward(_prompt, text):
        if int(text) < len(RAISED):
            raise RAISED[int(text)]
        return b"1" if int(text) == len(RAISED) else 0.5

    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(judge_for(ask, reward), 30)
    assert ended.group_contains(Over)
    (answer,) = told
    *failed, scored = answer.scores
    assert all(score.error and len(score.error) < 2000 for score in failed)
    assert (scored.reward, scored.error) == (0.5, "")
