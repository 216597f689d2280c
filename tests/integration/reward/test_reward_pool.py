"""The pool of scoring processes and the worker around it, with real processes."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from asyncrl.clock import SystemClock
from asyncrl.config.reward import AnswerMatchReward, FormatCheckReward, PythonReward, RewardConfig
from asyncrl.config.run import RunConfig, SupervisionConfig
from asyncrl.reward.worker import RewardPool, RewardWorker
from asyncrl.reward.worker_process import MAX_PRINTED_BYTES
from asyncrl.schema.control import Heartbeat, Shutdown
from asyncrl.schema.samples import Prompt, Score, ScoreRequest
from tests.builders import Controller, cancelled_after, channel_of, until
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


def pool_of(*functions, output=None, **options):
    config = RewardConfig(**{"functions": functions, "concurrency": 1, **options})
    return RewardPool(config, SystemClock(), "reward-9", output).open()


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


WRITTEN = [f"write {what}" for what in ("junk", "a length", "judgements", "one twice", "a function")]
FORGED = ["forge a number", "forge nan", "forge seconds", "forge parts", "write gigabytes"]
HARMS = [*WRITTEN, "cut files", "come back twice", "close files", "hog"]
STUCK = ["wait for more", "die and leave a child", "hang"]
"""Noticed at the time limit only; the others must not need one."""
SIDE_BY_SIDE = 4
"""Pools: most of the time of an act is a process that starts, or one that says nothing until its time limit."""
ASYNC_HARMS = ["forge a number", "forge nan", "cut files", "come back twice", "close files"]


@pytest.mark.parametrize(("function", "acts", "timeout_s"), [
    (ON_DEMAND, FORGED + HARMS, 120.0), (LATER, ASYNC_HARMS, 120.0), pytest.param(ON_DEMAND, STUCK, 2.0, marks=pytest.mark.timed),
], ids=["sync", "async", "stuck"])  # fmt: skip
async def test_whatever_two_samples_do_to_their_process_no_other_has_another_s_score_or_is_blamed(function, acts, timeout_s):
    async def harmed_by(acts) -> None:
        async with pool_of(function, timeout_s=timeout_s, process_memory_bytes=1 << 30) as pool:
            await all_scores(pool, ["1"] * 6)
            for how in acts:
                scores = await all_scores(pool, [how if number in {9, 40} else str(number) for number in range(60)])
                others = [(n, score) for n, score in enumerate(scores) if n not in {9, 40}]
                wrong = [score for n, score in others if score.error or score.reward != n or score.over_limit]
                assert not wrong, how
                for bad in (scores[9], scores[40]):
                    is_told = bad.error.startswith("its scoring process ") or bad.over_limit
                    assert how not in FORGED + STUCK or is_told, how

    async with asyncio.TaskGroup() as pools:
        for first in range(SIDE_BY_SIDE):
            pools.create_task(harmed_by(acts[first::SIDE_BY_SIDE]))


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
@both
async def test_as_many_samples_fail_as_kill_their_process_among_hundreds(function, concurrency):
    """Async ones whose process was lost go alone, and what comes behind them must not be taken for their answers."""
    killers = {100, 101, 250, 399}
    async with pool_of(function, concurrency=concurrency) as pool:
        scores = await all_scores(pool, ["die" if number in killers else str(number) for number in range(400)])
        assert {number for number, score in enumerate(scores) if score.error} == killers
        assert all(score.reward == number for number, score in enumerate(scores) if number not in killers)
        assert (pool.counts.failed, pool.counts.over_limit) == (4, 0)


def named(name: str, weight: float = 1.0, of: str = "") -> PythonReward:
    return PythonReward(path=f"scoring_functions:{of or name}", weight=weight, name=name)


HOG = {"process_memory_bytes": 1 << 30}
ENDS = ["KeyError", "exit status 3", "returned 0 numbers for 1 samples", "killed by SIGKILL"]
ONCE = {"over_limit": {1}, "failed": {0}, "replaced": range(1, 99)}
FATES = {
    "a plain function may run an event loop of its own": ((ON_DEMAND,), {}, ["run a loop"] * 3, [1.0] * 3, {}),
    "also beside an async one": ((ON_DEMAND, named("slowly")), {}, ["run a loop"] * 3, [3.0] * 3, {}),
    "a process that ends while a child of it holds its socket is not taken for a slow one":
        ((ON_DEMAND,), {"timeout_s": 5.0}, ["die and leave a child"], ["exit status 3"], {"over_limit": {0}}),
    # An async one has all its samples' time limits in its hands: lost, its samples go alone, and it is lost again.
    "what hangs is killed at the time limit, scores 0 and is counted":
        ((LATER,), {"timeout_s": 3.0}, ["backtrack", "fine"], [0.0, 1.0], ONCE | {"replaced": range(2, 99)}),
    # Else a sample would escape a penalty by making its judge hang.
    "the other functions still count where one ran out of time":
        ((FormatCheckReward(pattern="hang|fine", weight=0.5), ON_DEMAND, named("length", -1.0)), {"timeout_s": 2.0},
         ["hang", "fine"], [0.5 + 0.0 - 4.0, 0.5 + 1.0 - 4.0], ONCE),
    "a sample that fills the memory scores 0, which it cannot escape by a failure":
        ((ON_DEMAND,), HOG, ["hog", "fine"], [0.0, 1.0], ONCE),
    "so does an async one": ((LATER,), HOG, ["hog", "fine"], [0.0, 1.0], ONCE),
    "also where it does so in a task group": ((LATER,), HOG, ["hog in a group", "fine"], [0.0, 1.0], ONCE),
    "a sample that fails in a batch, or ends the process, costs that sample only":
        ((named("score_batch"),), {}, ["46", "raise", "46", "die", "46", "sizes", "kill"],
         [1.0, ENDS[0], 1.0, ENDS[1], 1.0, *ENDS[2:]], {"over_limit": {0}}),
    "a slow function beside an async one is not taken for a hanging one":
        ((SLOW, LATER), {"timeout_s": 5.0}, ["fine"] * 75, [2.0] * 75, {"replaced": {0}}),
    "those that wait for a judge that is gone each run out of time, and their process goes on":
        ((named("never", 2.0), LATER, named("too", 4.0, of="never")), {"timeout_s": 1.5}, ["fine"] * 20, [1.0] * 20,
         {"replaced": {0}, "over_limit": {40}}),
    "the time limit is one for a sample's functions together where they are async too":
        ((named("a_second"), named("two", 2.0, of="a_second")), {"timeout_s": 1.6}, ["x"] * 3, [1.0] * 3, {"over_limit": {3}}),
}  # fmt: skip


@pytest.mark.timed
@pytest.mark.parametrize(("functions", "options", "texts", "expected", "counts"), FATES.values(), ids=FATES)
async def test_each_sample_has_the_score_or_the_error_that_it_earned(functions, options, texts, expected, counts):
    async with pool_of(*functions, **options) as pool:
        for score, wanted in zip(await all_scores(pool, texts), expected, strict=True):
            assert wanted in score.error if isinstance(wanted, str) else (score.error, score.reward) == ("", wanted)
        for name, allowed in counts.items():
            assert getattr(pool.counts, name) in allowed


@pytest.mark.timed
async def test_a_process_whose_socket_is_still_held_after_it_was_killed_is_replaced(tmp_path):
    pids = tmp_path / "pids"
    try:
        async with pool_of(named("leaves_a_daemon"), named("slowly"), timeout_s=1.0) as pool:
            (score,) = await asyncio.wait_for(all_scores(pool, [str(pids)]), 30)
            assert "exit status 3" in score.error
    finally:
        for pid in pids.read_text().split():
            os.kill(int(pid), 9)


@pytest.mark.timed
async def test_a_program_that_a_reward_waits_for_ends_with_it(tmp_path):
    pids = tmp_path / "pids"
    async with pool_of(named("waits_for_a_program"), timeout_s=1.0) as pool:
        (score,) = await asyncio.wait_for(all_scores(pool, [str(pids)]), 30)
        assert "ran past reward.timeout_s" in score.over_limit
    (pid,) = map(int, pids.read_text().split())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


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
    async with pool_of(ON_DEMAND, output=tmp_path / "printed.log") as pool:
        scores = await all_scores(pool, ["noise", "flood", "fine", "flood"])
    assert [score.reward for score in scores] == [1.0] * 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * MAX_PRINTED_BYTES


async def test_async_samples_wait_for_no_other_and_what_never_answers_scores_0_without_its_process_being_replaced():
    async with pool_of(LATER, timeout_s=9.0) as pool, asyncio.timeout(300), asyncio.TaskGroup() as group:
        slow = [group.create_task(pool.score(request(text))) for text in ("never", "never gives up", "6.0")]
        for _ in range(5):
            assert [score.reward for score in await all_scores(pool, ["0.01"] * 40)] == [1.0] * 40
        assert not any(task.done() for task in slow)
        *never, late = [score for task in slow for score in (await task).scores]
        limit = "reward demand ran past reward.timeout_s (9 s)"
        assert [(score.reward, score.error, score.over_limit) for score in never] == [(0.0, "", limit)] * 2
        assert late.reward == 1.0
        assert (pool.counts.replaced, pool.counts.over_limit) == (0, 2)


async def test_a_sample_that_cancels_its_own_task_fails_though_others_are_answered_all_the_time():
    async with pool_of(LATER, timeout_s=5.0) as pool, asyncio.timeout(300), asyncio.TaskGroup() as group:
        odd = group.create_task(pool.score(request("cancel own")))
        for _ in range(10):
            await all_scores(pool, ["fine"] * 5)
        assert odd.done()
        assert odd.result().scores[0].error == "demand: CancelledError: "
        assert pool.counts.replaced == 0


@pytest.mark.parametrize(("functions", "concurrency", "count", "most_s"), [
    ((SLOW, LATER), 4, 40, 3.5), ((named("judge"),), 1, 40, 15.0), ((named("in_a_thread"),), 1, 100, 40.0),
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
    slow = [named(f"slow{number}", of="takes_its_time") for number in range(4)]
    async with pool_of(named("slow_batch"), ON_DEMAND, *slow, timeout_s=1.0) as pool:
        await all_scores(pool, ["fine"])
        scores = await all_scores(pool, ["fine"] * 6)
        assert [score.reward for score in scores] == [6.0] * 6
        assert pool.counts.over_limit == 0


@pytest.mark.timed
async def test_lists_that_take_too_long_get_shorter_and_stay_so_unless_a_sample_was_the_cause(caplog):
    async with pool_of(named("hangs_with_more_than_four"), timeout_s=1.5) as pool:
        for samples, rewards in {
            ("hang", "fine"): [0.0, 1.0],
            ("fine",) * 100: [1.0] * (32 + 16 + 8) + [4.0] * 44,
            ("fine", "hang"): [1.0, 0.0],
            ("fine",) * 8: [4.0] * 8,
        }.items():
            assert [score.reward for score in await all_scores(pool, samples)] == rewards
        assert (pool.counts.replaced, pool.counts.over_limit) == (2 + 3 + 2, 2), "32, 16 and 8 are too many"
    assert [message.partition(" samples ")[0] for message in caplog.messages] == [f"a list of {n}" for n in (32, 16, 8)]


@pytest.mark.timed
async def test_a_pool_that_was_held_up_does_not_blame_the_sample_that_its_process_is_at():
    async with pool_of(ON_DEMAND, SLOW, timeout_s=1.0) as pool, asyncio.TaskGroup() as group:
        scoring = group.create_task(all_scores(pool, list(map(str, range(25)))))
        await until(lambda: pool.counts.scored >= 3)
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
    config = RewardConfig(functions=(PythonReward(path="time:sleep"),), concurrency=1)
    async with RewardPool(config, SystemClock()).open() as pool:
        print(*(process.pid for process in pool._processes), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    scoring = psutil.Process(int(await owner.stdout.readline()))
    owner.kill()
    await owner.communicate()
    await asyncio.to_thread(assert_gone, {scoring})


SCORING = """
import sys
from asyncrl.config.reward import CodeExecReward
from asyncrl.reward.sandbox.bubblewrap import open_sandbox
from asyncrl.reward.sandbox.code_exec import CodeTest, run_tests

code = f"import time; open({sys.argv[1]!r}, 'w').close(); time.sleep(600)"
run_tests(open_sandbox(CodeExecReward(sandbox="none", wall_s=600)), code, [CodeTest(stdout="")])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_sleeping_program_without_a_sandbox_ends_with_its_driver_and_that_with_the_scoring_process(tmp_path):
    begun = tmp_path / "begun"
    scoring = subprocess.Popen([sys.executable, "-c", SCORING, str(begun)])
    try:
        while not begun.exists():
            time.sleep(0.01)
        below = set(psutil.Process(scoring.pid).children(recursive=True))
        assert len(below) == 2
    finally:
        scoring.kill()
        scoring.wait()
    assert_gone(below)


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
