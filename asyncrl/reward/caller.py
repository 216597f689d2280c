"""Rewards by a function of a program that is connected to the run, in place of reward workers (`kind = "caller"`).

The program asks the run what is to be judged and says what came of it, over and over. Invariants: a request stays the run's until
its answer has reached the run, which gives it out again to whoever asks and does not hold it; so a program that is lost loses no
sample, and another may go on. A request that fails in the function ends in Scores with the reason, and fails those samples only.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable

from asyncrl.errors import kind_of, trace_of
from asyncrl.reward.inputs import as_number, shown
from asyncrl.schema.samples import Member, Prompt, Score, ScoreRequest, Scores
from asyncrl.schema.status import Judged

Reward = Callable[[Prompt, str], float | Awaitable[float]]
"""(prompt, completion) to a reward, plain or async."""
Ask = Callable[[Judged], Awaitable[list[ScoreRequest]]]
"""Says what was judged, and returns what else is to be."""


async def judge_for(ask: Ask, function: Reward) -> None:
    """Judge what the run asks for, until `ask` raises: an async function several groups at once."""
    caller, held, done = uuid.uuid4().hex, set[Member](), asyncio.Queue[Scores]()

    async def judge(request: ScoreRequest) -> None:
        scores = [await _score(function, request.prompt, *member) for member in zip(request.indices, request.texts, strict=True)]
        done.put_nowait(Scores(request.group_id, request.attempt, tuple(scores), purpose=request.purpose))

    async def tell() -> None:
        while True:
            answers = [await done.get()]
            answers += [done.get_nowait() for _ in range(done.qsize())]
            await ask(Judged(caller, tuple(answers), wants=False))
            held.difference_update((answer.purpose, answer.group_id, answer.scores[0].index) for answer in answers)

    async with asyncio.TaskGroup() as judging:
        judging.create_task(tell(), name="rewards")
        while True:
            for request in await ask(Judged(caller, held=tuple(held))):
                first = (request.purpose, request.group_id, request.indices[0])
                if first not in held:
                    held.add(first)
                    judging.create_task(judge(request), name="rewards")


async def _score(function: Reward, prompt: Prompt, index: int, text: str) -> Score:
    try:
        given = function(prompt, text)
        reward = as_number(await given if inspect.isawaitable(given) else given)
    except (Exception, asyncio.CancelledError) as error:  # the boundary: whatever a user's function raises
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        said = f"the caller's reward: {type(error).__name__}: {shown(error)}"
        return Score(index, 0.0, error=said, error_kind=kind_of(error), trace=trace_of(error))
    return Score(index, reward, {"caller": reward})
