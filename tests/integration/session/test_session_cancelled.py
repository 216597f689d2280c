"""A caller of a session is cancelled at any moment: nothing of the call is left, and the next call works."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncrl
from tests.integration.conftest import NO_EVALUATION, NO_MODEL, assert_balanced

pytestmark = pytest.mark.timeout(300)
PROMPTS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
CALLS = ("generate", "stream", "train_step", "forward_backward", "sync_weights")


async def call(session: asyncrl.Session, what: str) -> None:
    if what == "generate":
        await session.release(await session.generate(PROMPTS[:4]))
    elif what == "stream":
        async with session.stream(PROMPTS) as groups:
            assert len([group async for group in groups]) == len(PROMPTS)
    elif what == "sync_weights":
        await session.sync_weights()
    else:
        async with session.stream(PROMPTS[:4]) as groups:
            batch = [group async for group in groups]
            await getattr(session, what)(batch)
            await session.optim_step()


async def cancelled_after(turns: int, session: asyncrl.Session, what: str) -> None:
    """Make a call and cancel it after so many turns of the event loop, the later ones longer: wherever it stands then."""
    async with asyncio.TaskGroup() as group:
        work = group.create_task(call(session, what))
        for turn in range(turns):
            await asyncio.sleep(0 if turn < 30 else 0.005)
        work.cancel()


async def nothing_is_left(session: asyncrl.Session) -> None:
    with contextlib.suppress(asyncrl.AsyncRLError):  # there may be no gradients
        await session.optim_step()  # of a `forward_backward` that was done before its caller was cancelled
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert sorted(task.get_name() for task in tasks) == ["controller-wait", "rewards", "rewards"]  # those are the run's own
    status = await session.run.status()
    assert_balanced(status)
    assert not any(status.groups[state] for state in ("running", "scoring", "ready", "taken")), status.groups


def test_whatever_is_cancelled_leaves_nothing_and_the_next_call_works(tiny):
    fake = {**NO_MODEL, "token_latency_s": 0.002}
    more = {"model__warm_start": None, "generate__engine": fake, "checkpoint__every_steps": 0}
    config = tiny(num_steps=500, **NO_EVALUATION, **more)
    with asyncio.Runner() as runner:
        session = asyncrl.Session(config, reward=lambda _, text: float(len(text)))
        runner.run(session.__aenter__())
        try:

            @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
            @given(st.lists(st.tuples(st.integers(0, 80), st.sampled_from(CALLS)), min_size=1, max_size=3))
            def cancelled_anywhere(cancelled):
                for turns, what in cancelled:
                    runner.run(cancelled_after(turns, session, what))
                    runner.run(nothing_is_left(session))
                runner.run(call(session, "stream"))

            cancelled_anywhere()
            before = session.version
            runner.run(call(session, "train_step"))
            assert session.version == before + 1
        finally:
            runner.run(session.__aexit__(None, None, None))
