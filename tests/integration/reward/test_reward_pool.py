"""The pool of scoring processes and the worker around it, with real processes."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.reward import AnswerMatchReward, FormatCheckReward, PythonReward, RewardConfig
from asyncrl.config.run import RunConfig, SupervisionConfig
from asyncrl.reward.worker import RewardPool, RewardWorker
from asyncrl.reward.worker_process import MAX_PRINTED_BYTES
from asyncrl.schema.control import Heartbeat, Shutdown
from asyncrl.schema.samples import Prompt, Score, ScoreRequest
from tests.builders import Controller, cancelled_after, channel_of
from tests.integration.conftest import assert_gone

ON_DEMAND = PythonReward(path="scoring_functions:on_demand", name="demand")
LATER = PythonReward(path="scoring_functions:on_demand_later", name="demand")
SLOW = PythonReward(path="scoring_functions:takes_its_time", name="slow")
both = pytest.mark.parametrize("function", [ON_DEMAND, LATER], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def user_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def request(text: str, index: int = 0, answer: str = "46") -> ScoreRequest:
    return ScoreRequest(7, 1, Prompt("p", answer=answer), (index,), (text,), ("stop",), (3,), "eval")


def pool_of(*functions, **options) -> RewardPool:
    return RewardPool(RewardConfig(**{"functions": functions, "concurrency": 1, **options}), SystemClock(), "reward-9")


async def all_scores(pool: RewardPool, texts: list[str]) -> list[Score]:
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        tasks = [group.create_task(pool.score(request(text, index))) for index, text in enumerate(texts)]
    return [score for task in tasks for score in task.result().scores]


@both
async def test_whatever_is_raised_fails_its_sample_and_ends_no_process(function):
    """Also an error without words, one that is no UTF-8, one of asyncio's own, one of megabytes."""
    async with pool_of(function) as pool:
        acts = ["raise", "raise silent", "raise surrogate", "raise cancelled", "exit", "raise at length"]
        *raised, fine = await all_scores(pool, [*acts, "fine"])
        assert raised[0].error == "demand: KeyError: 'no such thing'"
        kinds = ["Silent", "ValueError", "CancelledError", "SystemExit", "ValueError"]
        assert [score.error.split(":")[1].strip() for score in raised[1:]] == kinds
        assert max(len(score.error) for score in raised) < 2000
        assert (fine.error, fine.reward) == ("", 1.0)
        assert (pool.counts.scored, pool.counts.failed, pool.counts.replaced) == (1, len(acts), 0)
        empty = await asyncio.wait_for(pool.score(ScoreRequest(7, 1, Prompt("p"), (), (), (), ())), 60)
        assert empty.scores == ()


NUMBER = PythonReward(path="scoring_functions:on_demand_or_plain_number", name="demand")
NUMBER_LATER = PythonReward(path="scoring_functions:on_demand_or_number", name="demand")
numbers = pytest.mark.parametrize("function", [NUMBER, NUMBER_LATER], ids=["sync", "async"])
WRITTEN = [f"write {what}" for what in ("junk", "a length", "judgements", "one twice", "a function")]
FORGED = ["forge a number", "forge nan", "forge seconds", "forge parts", "write gigabytes", "wait for more"]
HARMS = [*WRITTEN, "cut files", "come back twice", "die and leave a child", "close files", "hog", "hang"]
ASYNC_HARMS = ["forge a number", "forge nan", "cut files", "come back twice", "close files"]


@pytest.mark.parametrize(("function", "acts"), [(NUMBER, FORGED + HARMS), (NUMBER_LATER, ASYNC_HARMS)], ids=["sync", "async"])
async def test_whatever_a_function_does_to_its_process_no_other_sample_has_another_s_score_or_is_blamed(function, acts):
    async with pool_of(function, timeout_s=2.0, process_memory_bytes=1 << 30) as pool:
        await all_scores(pool, ["1"] * 6)
        for how in acts:
            scores = await all_scores(pool, [how if number in {9, 40} else str(number) for number in range(60)])
            others = [(n, score) for n, score in enumerate(scores) if n not in {9, 40}]
            wrong = [score for n, score in others if score.error or score.reward != n or score.over_limit]
            assert not wrong, how
            for bad in (scores[9], scores[40]):
                assert how not in FORGED or bad.error.startswith("its scoring process ") or bad.over_limit, how


async def test_nothing_is_sent_behind_a_sample_that_goes_alone():
    """Else what a process has said would be lost where it ends over the next sample as that is being sent."""
    texts = [*["unread"] * 3, "cut files", *["unread"] * 3]
    async with pool_of(ON_DEMAND) as pool:
        for tried in range(1, 11):  # where the machine is slow, they are not sent together, and so do not all go alone
            await all_scores(pool, ["fine"] * 10)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(pool.score(request(text, n, "4" * 100_000))) for n, text in enumerate(texts)]
            scores = [score for task in tasks for score in task.result().scores]
            assert [score.index for score in scores if score.error] == [3]
            assert pool.counts.failed == tried
            if not any(score.reward for score in scores):
                return
    pytest.fail(f"so much was sent behind each: {[score.reward for score in scores]}")


@pytest.mark.parametrize("concurrency", [1, 2])
@numbers
async def test_as_many_samples_fail_as_kill_their_process_among_hundreds_and_the_log_says_so(function, concurrency, caplog):
    """Async ones whose process was lost go alone, and what comes behind them must not be taken for their answers."""
    killers = {100, 101, 250, 399}
    async with pool_of(function, concurrency=concurrency) as pool:
        scores = await all_scores(pool, ["die" if number in killers else str(number) for number in range(400)])
        assert {number for number, score in enumerate(scores) if score.error} == killers
        assert all(score.reward == number for number, score in enumerate(scores) if number not in killers)
        assert (pool.counts.failed, pool.counts.over_limit) == (4, 0)
    assert "reward demand: ended its process (exit status 3) on " in caplog.text


async def test_a_plain_function_may_run_an_event_loop_of_its_own():
    beside = PythonReward(path="scoring_functions:slowly", name="slow")
    for functions in ((ON_DEMAND,), (ON_DEMAND, beside)):
        async with pool_of(*functions) as pool:
            assert not any(score.error for score in await all_scores(pool, ["run a loop"] * 3))


async def test_a_process_that_ends_while_a_child_of_it_holds_its_socket_is_not_taken_for_a_slow_one():
    async with pool_of(ON_DEMAND, timeout_s=5.0) as pool:
        assert "exit status 3" in (await all_scores(pool, ["die and leave a child"]))[0].error
        assert pool.counts.over_limit == 0


@pytest.mark.timed
async def test_what_hangs_is_killed_at_the_time_limit_and_scores_0_and_is_counted():
    """An async one; a sync one is in the test of other functions that still count."""
    async with pool_of(LATER, timeout_s=3.0) as pool:
        hung, fine = await all_scores(pool, ["backtrack", "fine"])
        assert (hung.error, hung.reward, hung.parts) == ("", 0.0, {"demand": 0.0})
        assert fine.reward == 1.0
        # An async one has all its samples' time limits in its hands: lost, its samples go alone, and it is lost again.
        assert pool.counts.replaced >= 2  # once more, where it began late
        assert (pool.counts.over_limit, pool.counts.failed) == (1, 0)


@pytest.mark.parametrize(("function", "how"), [(ON_DEMAND, "hog"), (LATER, "hog"), (LATER, "hog in a group")])
async def test_a_sample_that_fills_the_memory_scores_0_which_it_cannot_escape_by_a_failure(function, how):
    async with pool_of(function, process_memory_bytes=1 << 30) as pool:
        hog, fine = await all_scores(pool, [how, "fine"])
        assert (hog.error, hog.reward, fine.reward) == ("", 0.0, 1.0)
        assert pool.counts.over_limit == 1


@pytest.mark.timed
async def test_the_other_functions_still_count_where_one_ran_out_of_time():
    """Else a sample would escape a penalty by making its judge hang."""
    functions = (
        FormatCheckReward(pattern="hang|fine", weight=0.5),
        ON_DEMAND,
        PythonReward(path="scoring_functions:length", weight=-1.0, name="long"),
    )
    async with pool_of(*functions, timeout_s=2.0) as pool:
        hung, fine = await all_scores(pool, ["hang", "fine"])
        assert pool.counts.replaced >= 1
        assert (pool.counts.over_limit, pool.counts.failed) == (1, 0)
    assert (hung.error, hung.reward) == ("", -3.5)
    assert hung.parts == {"format_check": 1.0, "demand": 0.0, "long": 4.0}
    assert fine.reward == -2.5


async def test_a_process_killed_between_samples_costs_none_of_them():
    async with pool_of(ON_DEMAND) as pool:
        await all_scores(pool, ["fine"])
        for _ in range(3):
            os.kill(next(iter(pool._processes)).pid, 9)
            scores = await all_scores(pool, ["fine"] * 5)
            assert [(score.error, score.reward) for score in scores] == [("", 1.0)] * 5
        assert pool.counts.failed == 0


async def test_closing_at_any_moment_around_a_time_out_does_not_raise():
    for loop_turns in (0, 1, 2, 3, 5, 8, 13, 21):
        async with pool_of(ON_DEMAND, timeout_s=0.5) as pool, asyncio.TaskGroup() as group:
            hung = group.create_task(pool.score(request("hang")))
            while not (pool.counts.over_limit or hung.done()):
                await asyncio.sleep(0.01)
            for _ in range(loop_turns):
                await asyncio.sleep(0)
            hung.cancel()


async def test_what_rewards_print_is_bounded(tmp_path):
    output = tmp_path / "printed.log"
    config = RewardConfig(functions=(ON_DEMAND,), concurrency=1)
    async with RewardPool(config, SystemClock(), "reward-9", output) as pool:
        scores = await all_scores(pool, ["noise", "flood", "fine", "flood"])
    assert [score.reward for score in scores] == [1.0] * 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * MAX_PRINTED_BYTES


BATCHED = PythonReward(path="scoring_functions:score_batch", name="batch")


async def test_a_batch_with_a_sample_that_fails_or_ends_the_process_costs_that_sample_only():
    async with pool_of(BATCHED) as pool:
        scores = await all_scores(pool, ["46", "raise", "46", "die", "46", "sizes", "kill"])
        assert [score.reward for score in scores if not score.error] == [1.0, 1.0, 1.0]
        assert "KeyError" in scores[1].error
        assert "exit status 3" in scores[3].error
        assert "killed by SIGKILL" in scores[6].error
        assert "returned 0 numbers for 1 samples" in scores[5].error


async def test_async_samples_wait_for_no_other_and_what_never_answers_scores_0_without_its_process_being_replaced():
    async with pool_of(LATER, timeout_s=9.0) as pool, asyncio.timeout(300), asyncio.TaskGroup() as group:
        slow = [group.create_task(pool.score(request(text))) for text in ("never", "never gives up", "6")]
        for _ in range(5):
            assert [score.reward for score in await all_scores(pool, ["0.01"] * 40)] == [1.0] * 40
        assert not any(task.done() for task in slow)
        *never, late = [score for task in slow for score in (await task).scores]
        limit = "reward demand ran past reward.timeout_s (9 s)"
        assert [(score.reward, score.error, score.over_limit) for score in never] == [(0.0, "", limit)] * 2
        assert late.reward == 1.0
        assert (pool.counts.replaced, pool.counts.over_limit) == (0, 2)


async def test_a_slow_function_beside_an_async_one_is_not_taken_for_a_hanging_one():
    async with pool_of(SLOW, LATER, timeout_s=5.0) as pool:
        scores = await all_scores(pool, ["fine"] * 75)
        assert [score.reward for score in scores] == [2.0] * 75
        assert pool.counts.replaced == 0


@pytest.mark.timed
async def test_functions_that_wait_for_a_judge_that_is_gone_each_run_out_of_time_and_their_process_goes_on():
    never = PythonReward(path="scoring_functions:never", name="never")
    async with pool_of(never, LATER, PythonReward(path="scoring_functions:never", name="too"), timeout_s=1.5) as pool:
        scores = await all_scores(pool, ["fine"] * 20)
        assert [score.parts for score in scores] == [{"never": 0.0, "demand": 1.0, "too": 0.0}] * 20
        assert (pool.counts.replaced, pool.counts.over_limit) == (0, 40)


@pytest.mark.timed
async def test_the_time_limit_is_one_for_a_sample_s_functions_together_where_they_are_async_too():
    second = [PythonReward(path="scoring_functions:a_second", name=name) for name in ("one", "two")]
    async with pool_of(*second, timeout_s=1.6) as pool:
        assert [score.parts for score in await all_scores(pool, ["x"] * 3)] == [{"one": 1.0, "two": 0.0}] * 3


async def test_a_sample_that_cancels_its_own_task_fails_though_others_are_answered_all_the_time():
    async with pool_of(LATER, timeout_s=5.0) as pool, asyncio.timeout(300), asyncio.TaskGroup() as group:
        odd = group.create_task(pool.score(request("cancel own")))
        for _ in range(10):
            await all_scores(pool, ["fine"] * 5)
        assert odd.done()
        assert odd.result().scores[0].error == "demand: CancelledError: "
        assert pool.counts.replaced == 0


@pytest.mark.parametrize(("functions", "concurrency", "count", "most_s"), [
    ((SLOW, LATER), 4, 40, 3.5), ((PythonReward(path="scoring_functions:judge", name="mine"),), 1, 40, 15.0),
    ((PythonReward(path="scoring_functions:in_a_thread", name="mine"),), 1, 100, 40.0),
], ids=["shared out among processes", "an object with an async call", "in threads"])  # fmt: skip
@pytest.mark.timed
async def test_async_samples_do_not_wait_for_each_other(functions, concurrency, count, most_s):
    async with pool_of(*functions, concurrency=concurrency, timeout_s=60.0) as pool:
        started_s = time.monotonic()
        scores = await all_scores(pool, ["fine"] * count)
        assert time.monotonic() - started_s < most_s
        assert [score.reward for score in scores] == [float(len(functions))] * count


@pytest.mark.timed
async def test_the_time_that_a_batch_took_is_not_the_first_sample_s():
    functions = (PythonReward(path="scoring_functions:slow_batch", name="batch"), ON_DEMAND)
    async with pool_of(*functions, *[msgspec.structs.replace(SLOW, name=f"slow{n}") for n in range(4)], timeout_s=1.0) as pool:
        await all_scores(pool, ["fine"])
        scores = await all_scores(pool, ["fine"] * 6)
        assert [score.reward for score in scores] == [6.0] * 6
        assert pool.counts.over_limit == 0


@pytest.mark.timed
async def test_a_pool_that_was_held_up_does_not_blame_the_sample_that_its_process_is_at():
    async with pool_of(NUMBER, SLOW, timeout_s=1.0) as pool, asyncio.TaskGroup() as group:
        scoring = group.create_task(all_scores(pool, list(map(str, range(25)))))
        while pool.counts.scored < 3:
            await asyncio.sleep(0.01)
        time.sleep(1.5)  # noqa: ASYNC251 - it is the loop that stands still
        assert [(score.reward, score.over_limit) for score in await scoring] == [(n + 1.0, "") for n in range(25)]


async def test_a_start_cancelled_at_any_point_leaves_no_process():
    """Of the pool, or of a process in the place of one that was lost."""
    before = children()

    async def opened() -> None:
        async with pool_of(AnswerMatchReward(), concurrency=2):
            await asyncio.Event().wait()

    for loop_turns in range(20):
        await cancelled_after(loop_turns, opened)
        assert children() == before


async def test_scoring_processes_die_with_a_killed_worker():
    code = """
import asyncio, os, sys
from asyncrl.clock import SystemClock
from asyncrl.config.reward import PythonReward, RewardConfig
from asyncrl.reward.worker import RewardPool
from asyncrl.schema.samples import Prompt, ScoreRequest
async def main():
    async with RewardPool(RewardConfig(functions=(PythonReward(path="time:sleep"),), concurrency=1), SystemClock()) as pool:
        print(*(process.pid for process in pool._processes), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    scoring = psutil.Process(int(await owner.stdout.readline()))
    owner.kill()
    await owner.communicate()
    await asyncio.to_thread(assert_gone, {scoring})


def children() -> set[int]:
    """Process ids of what this process has started and not reaped."""
    return {child.pid for child in psutil.Process().children()}


# -- the worker ----------------------------------------------------------------------------------------------------------


def run_config(*functions, **options) -> RunConfig:
    reward = RewardConfig(**{"functions": functions, "concurrency": 1, **options})
    return RunConfig(reward=reward, supervision=SupervisionConfig(heartbeat_s=0.05))


@asynccontextmanager
async def worker_of(config, tmp_path):
    async with asyncio.timeout(60), channel_of("reward", "reward-0") as (near, far), asyncio.TaskGroup() as group:
        worker = group.create_task(RewardWorker(config, tmp_path, near, SystemClock()).run())
        yield Controller(far)
        await worker


async def test_worker_scores_acknowledges_beats_and_shuts_down(tmp_path):
    async with worker_of(run_config(ON_DEMAND), tmp_path) as desk:
        assert (await desk.report(Heartbeat)).waiting_for == "its scoring processes to start"
        await desk.report(Heartbeat, lambda beat: beat.waiting_for == "a sample to score")
        for index, text in enumerate(["fine", "raise", "die", "fine"]):
            await desk.connection.send(request(text, index))
        answers = await desk.answers(4)
        scores = {score.index: score for answer in answers for score in answer.scores}
        assert sorted(scores) == [0, 1, 2, 3]
        assert [bool(scores[index].error) for index in range(4)] == [False, True, True, False]
        assert all(answer.worker == "reward-0" and answer.purpose == "eval" for answer in answers)
        assert await desk.connection.flush(30)
        beat = await desk.report(Heartbeat, lambda beat: beat.gauges["process/samples_scored"] == 2)
        assert beat.gauges["process/samples_failed"] == 2
        assert beat.gauges["process/resident_bytes"] > 0
        await desk.order(Shutdown("done"))


async def test_worker_ends_when_the_controller_is_gone(tmp_path):
    async with worker_of(run_config(ON_DEMAND), tmp_path) as desk:
        await desk.connection.send(request("hang"))
        await desk.report(Heartbeat, lambda beat: beat.gauges["process/samples_scoring"] == 1)
        await desk.connection.close()
