"""A caller is cancelled at any moment: nothing of the call is left, and the next call works, on asyncio's loop as on uvloop's."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import aiohttp
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import asyncrl
from asyncrl.errors import LearnerError
from tests.builders import cancelled_after, until
from tests.integration.conftest import NO_ENGINE, assert_balanced

PROMPTS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
CALLS = ("generate", "stream", "train_step", "forward_backward", "optim_step", "save", "sync_weights", "answers")


async def begin(session: asyncrl.Session, what: str) -> None:
    """Do what must be done before the call."""
    if what == "optim_step":
        await session.forward_backward(await session.generate(PROMPTS[:4]))


async def call(session: asyncrl.Session, what: str) -> None:
    if what == "generate":
        await session.release(await session.generate(PROMPTS[:4]))
    elif what == "stream":
        async with session.stream(PROMPTS) as groups:
            assert len([group async for group in groups]) == len(PROMPTS)
    elif what in {"optim_step", "save", "sync_weights"}:
        await getattr(session, what)()
    elif what == "answers":
        await answer_and_train(session)
    elif what == "endpoint":
        async with asyncrl.Endpoint(session):
            pass
    else:
        async with session.stream(PROMPTS[:4]) as groups:
            batch = [group async for group in groups]
            await getattr(session, what)(batch)
            await session.optim_step()


async def answer_and_train(session: asyncrl.Session) -> None:
    async with asyncrl.Endpoint(session) as endpoint:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
            for _ in range(4):
                async with http.post(f"{endpoint.base_url}/completions", json={"prompt": "1+1=", "n": 2}) as answer:
                    endpoint.reward((await answer.json())["id"], [1.0, 0.0])
        async with contextlib.aclosing(endpoint.batches()) as batches:
            await session.train_step(await anext(batches))


async def cancelled_as_it_leaves(session: asyncrl.Session) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(session.__aexit__(None, None, None))
        while session._is_open:  # it writes its checkpoint
            await asyncio.sleep(0)
        task.cancel()


def held() -> set[object]:
    """The processes that this one has started, and where it listens."""
    own = psutil.Process()
    listening = {one.laddr for one in own.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return {child.pid for child in own.children(recursive=True)} | listening


async def nothing_is_left(session: asyncrl.Session, before: set[object]) -> None:
    """Looked at after each cancelled call; what is on its way out has some seconds."""
    running = {
        "controller-wait",
        "end-of-controller",
        "rewards",
    }  # the run's own, the last in several tasks and at one connection
    await until(lambda: {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}} == running)
    await until(lambda: len(session.run._http.connector._acquired) <= 1 and held() == before)
    assert (session._thread._work_queue.qsize(), session._training.locked()) == (0, False)
    status = await session.run.status()
    assert_balanced(status)
    assert not any(status.groups[state] for state in ("running", "scoring", "ready")), status.groups
    with contextlib.suppress(LearnerError):  # there may be no gradients
        await session.optim_step()  # of a `forward_backward` that was done before its caller was cancelled
    assert (await session.run.status()).groups["taken"] == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_whatever_is_cancelled_leaves_nothing_and_the_next_call_works(tiny, loop):
    factory = pytest.importorskip("uvloop", reason="uvloop, which comes with vLLM").new_event_loop if loop == "uvloop" else None
    config = tiny(num_steps=500, **NO_ENGINE, checkpoint__every_steps=0)
    with asyncio.Runner(loop_factory=factory) as runner:
        none = held()
        session = asyncrl.Session(config, reward=lambda _, text: float(len(text)))
        runner.run(session.__aenter__())
        before = held()
        try:
            # Nothing is tried again: what fails has left the one session in another state.
            @settings(
                max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True,
                phases=[Phase.generate],
            )  # fmt: skip
            @given(st.lists(st.tuples(st.integers(0, 80), st.sampled_from(CALLS)), min_size=1, max_size=3))
            def cancelled_anywhere(cancelled):
                for turns, what in cancelled:
                    runner.run(begin(session, what))
                    version = session.version
                    runner.run(cancelled_after(turns, functools.partial(call, session, what)))
                    runner.run(nothing_is_left(session, before))
                    assert what != "optim_step" or session.version == version + 1
                runner.run(call(session, "stream"))

            for turns in range(12):  # of a call that is short
                runner.run(cancelled_after(turns, functools.partial(call, session, "endpoint")))
                runner.run(nothing_is_left(session, before))
            cancelled_anywhere()
            version = session.version
            for what in ("train_step", "answers"):
                runner.run(call(session, what))
            assert session.version == version + 2
        finally:
            runner.run(cancelled_as_it_leaves(session))
        assert held() == none
        checkpoints = session.run.run_folder / "checkpoints"
        assert all((path / "trainer" / "state.json").exists() for path in checkpoints.iterdir())  # each is whole
