"""The reward worker: score requests in, scores out, as many samples at once as keep its scoring processes busy.

Samples are scored in child processes (worker_process.py), so that no reward ever runs on an event loop, hangs the worker or takes
it down. Invariants:
- Every request ends in one Scores, of each sample with a reward or with the reason why there is none. A request is acknowledged
  once its Scores are handed over. Only a scoring process that cannot be started ends the worker.
- A sample's process is killed once `timeout_s` has passed since its turn came. A function that a sample makes run out of time or
  memory scores 0 for it and is counted, the other functions score it as ever: a sample that could fail its judge would escape the
  score it earns. So it is where a built-in function's process dies. Where a user's own function ends it, the sample fails.
- What stops a process costs the one sample it was at; the others that it was sent go to its replacement, and a sample that it had
  not begun is blamed for nothing. Where it may be any of several samples (a function had them at once, what ended the process had
  been done before, a function wrote into its socket), they are scored again one by one, and only one that does it again fails.
- A judgement is taken only of a sample that the process has and has not judged yet: no sample gets another's score.

Processes are warm and reused. Cheap rewards are sent several at a time, and the next of them while a process scores the last:
at most about 40 ms of work waits behind one process while others are idle. Async functions are awaited for up to `MOST_TOGETHER`
samples at the same time, and none waits for another: where one runs past `timeout_s`, its process goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Self

from asyncrl.clock import Clock
from asyncrl.config.reward import PythonReward, RewardConfig, reward_names
from asyncrl.config.run import RunConfig
from asyncrl.errors import AsyncRLError, leaves
from asyncrl.reward.inputs import Judgement, RewardInput
from asyncrl.reward.sandbox.bubblewrap import resident_bytes_of_tree
from asyncrl.reward.worker_process import (
    AT_REST,
    MAX_ERROR_CHARS,
    MOST_TOGETHER,
    InvalidJudgements,
    Item,
    Mark,
    PrintedOutput,
    ProcessDied,
    Ready,
    ScoringProcess,
)
from asyncrl.schema.control import Message
from asyncrl.schema.samples import Score, ScoreRequest, Scores
from asyncrl.transport.protocol import Connection, Delivery, Lane
from asyncrl.transport.stage import Stage

MAX_BATCH = 32
"""Cheap samples that are sent at a time."""
LATE_S = 1.0
"""A process of async functions that says nothing for so much longer than `timeout_s` is held up, and killed."""
_BATCH_WORK_S = 0.02
_MOSTLY = 0.9
"""Of `timeout_s`: what a sample must have had of it, so that it is the one which ran out of time."""
_MAX_LOST = 3
"""Processes that may end before they began a sample, or for no reason that is known, until the sample fails."""


@dataclass(slots=True, eq=False)
class _Job:
    """One sample of a request."""

    sample: RewardInput
    done: asyncio.Future[Score]
    number: int = 0
    """Which of the samples it is that its process was sent, from 1; 0: it was not sent yet."""
    skipped: tuple[int, ...] = ()
    over_limit: str = ""
    """What it ran over in the last of the functions that are skipped."""
    is_alone: bool = False
    """It is sent by itself, because a function failed that had it together with others."""
    num_lost: int = 0


@dataclass(slots=True)
class PoolCounts:
    """What a pool did since it opened."""

    scored: int = 0
    failed: int = 0
    replaced: int = 0
    """Processes killed or lost, and started anew."""
    over_limit: int = 0
    """Functions that scored 0 because a sample made them run out of time or memory, or ended their process."""
    busy_s: float = 0.0
    """Sum of the time that judging took, failed samples included."""


class RewardPool:
    """`concurrency` scoring processes behind one queue.

    Example:
        >>> async with RewardPool(config.reward, SystemClock(), "reward-0").open() as pool:
        ...     score = await pool.score(request)
    """

    def __init__(self, config: RewardConfig, clock: Clock, name: str = "reward", output: Path | None = None) -> None:
        """Prepare a pool; nothing is started before it is opened.

        Args:
            config: Which rewards, how many processes, how long one sample may take.
            clock: Stamps the scores. Time limits are real time, whatever the clock.
            name: The worker's, written into each score.
            output: File for what rewards print; None: standard error.
        """
        self.counts = PoolCounts()
        self._output_path = output
        self._config, self._clock, self._name = config, clock, name
        self._waiting: asyncio.Queue[_Job] = asyncio.Queue()  # whoever calls `score` bounds it
        self._processes: set[ScoringProcess] = set()
        self._judges = Ready().judges
        self.capacity = 1
        """Samples that are worth handing in at once, known when the pool is open."""
        self._num_together = 0
        """Samples that all processes have at the same time, where a function is async."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Score samples of one prompt.

        Returns:
            A score of each, in order; where `error` is set there is none, and the error says why.
        """
        started_s, loop = self._clock.now(), asyncio.get_running_loop()
        told = zip(request.indices, request.texts, request.finish_reasons, request.lengths, strict=True)
        jobs = [
            _Job(RewardInput(request.prompt, text, finish_reason, length, index), loop.create_future())
            for index, text, finish_reason, length in told
        ]
        for job in jobs:
            self._waiting.put_nowait(job)
        scores = tuple([await job.done for job in jobs])
        times = started_s, self._clock.now()
        return Scores(request.group_id, request.attempt, scores, self._name, *times, request.purpose)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Start all processes, wait until their rewards are built, and score; at the end kill and reap every process.

        Samples not yet scored are then abandoned.

        Raises:
            ConfigError: The rewards are configured wrongly.
            RewardError: They cannot be built here, or a process could not be replaced, which ended the pool.
        """
        self._output = PrintedOutput(self._output_path)
        try:
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(self._start()) for _ in range(self._config.concurrency)]
            async with asyncio.TaskGroup() as group:
                slots = [group.create_task(self._serve(start.result())) for start in starts]
                try:
                    yield self
                finally:
                    for slot in slots:
                        slot.cancel()
        except BaseException as error:  # noqa: BLE001 - it is raised again
            # Of a group the first of asyncrl's own errors says why.
            raise next((each for each in leaves(error) if isinstance(each, AsyncRLError)), error) from None
        finally:
            for process in self._processes:
                process.kill()
            for process in tuple(self._processes):
                await self._stop(process)
            self._output.close()

    async def _serve(self, process: ScoringProcess) -> None:
        """Keep one scoring process busy, and replace it when it is lost."""
        mean_s = _BATCH_WORK_S
        while True:
            if self._judges == "concurrently":
                jobs = await self._keep_full(process)
                process = await self._replace(process)
            else:
                jobs = deque([await self._waiting.get()])
                self._take_waiting(jobs, MAX_BATCH if self._judges == "several" else _batch_size(mean_s))
            _send(process, jobs)
            while jobs:
                most = _batch_size(mean_s)
                if 1 < most >= len(jobs) and self._judges == "one by one" and jobs[-1].number and not jobs[-1].is_alone:
                    behind = deque[_Job]()
                    self._take_waiting(behind, most)
                    _send(process, behind)
                    jobs += behind
                stopped, is_sure, judgements = "", True, tuple[Judgement, ...]()
                try:
                    async with asyncio.timeout(self._config.timeout_s):
                        judgements = await process.judgements([job.number for job in jobs if job.number])
                except TimeoutError:
                    mark = process.mark
                    is_sure = mark.function != AT_REST and time.monotonic() - mark.since_s > _MOSTLY * self._config.timeout_s
                    stopped = process.ending or ("time" if is_sure else "it said nothing")
                except ProcessDied as died:
                    stopped, is_sure = str(died), not isinstance(died, InvalidJudgements)
                for judgement in judgements:
                    if judgement.out_of_memory:
                        stopped = "memory"
                        break
                    self._finish(jobs.popleft(), judgement)
                    mean_s = max(judgement.seconds, 0.7 * mean_s + 0.3 * judgement.seconds)
                if not stopped:
                    if jobs and not jobs[0].number:
                        _send(process, jobs)
                    continue
                await self._stop(process)
                if (guilty := self._guilty(process.mark, jobs, stopped, is_sure=is_sure)) is not None:
                    jobs.remove(guilty)
                    jobs.appendleft(guilty)  # what was said of those before did not get out: judged again
                    if (failure := self._blame(guilty, process.mark, stopped)) is not None:
                        self._finish(jobs.popleft(), failure)
                process = await self._replace(process)
                _send(process, jobs)

    async def _keep_full(self, process: ScoringProcess) -> deque[_Job]:
        """Have samples scored as they come, at the same time, until the process is lost; return those that it still had.

        Nobody knows which of them it was lost over, so that they go alone from here on.
        """
        sent, has_room = dict[int, _Job](), asyncio.Event()
        clock = asyncio.get_running_loop().time
        heard_s = clock()

        async def feed() -> None:
            nonlocal heard_s
            while True:
                jobs = deque([await self._waiting.get()])
                fair = -(-(self._num_together + self._waiting.qsize() + 1) // self._config.concurrency)
                self._take_waiting(jobs, min(MOST_TOGETHER, fair) - len(sent))
                heard_s = heard_s if sent else clock()
                _send(process, jobs)
                sent.update({job.number: job for job in jobs})
                self._num_together += len(jobs)
                await asyncio.sleep(0)  # the other processes take theirs
                while len(sent) >= MOST_TOGETHER:
                    has_room.clear()
                    await has_room.wait()

        async def watch() -> None:
            nonlocal heard_s
            at = process.mark
            while True:
                if process.mark != at:  # it begins functions, so that none of them holds it up
                    heard_s, at = clock(), process.mark
                if sent and clock() - heard_s > self._config.timeout_s + LATE_S:
                    process.kill()
                    process.hang_up()
                await asyncio.sleep(LATE_S / 4)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(feed()), group.create_task(watch())]
            with contextlib.suppress(ProcessDied):
                while True:
                    judgements = await process.judgements(sent, in_order=False)
                    if any(judgement.out_of_memory for judgement in judgements):
                        break
                    heard_s = clock()
                    for judgement in judgements:
                        self._finish(sent.pop(judgement.number), judgement)
                    self._num_together -= len(judgements)
                    has_room.set()
            for task in tasks:
                task.cancel()
        self._num_together -= len(sent)
        for job in sent.values():
            job.is_alone = True
        return deque(sent.values())

    def _take_waiting(self, jobs: deque[_Job], most: int) -> None:
        while len(jobs) < most and not self._waiting.empty():
            jobs.append(self._waiting.get_nowait())

    def _guilty(self, mark: Mark, jobs: deque[_Job], stopped: str, *, is_sure: bool) -> _Job | None:
        """Return which of a process's jobs stopped it. None: it may be any of those that it had begun, and they go alone now."""
        if stopped == "memory":
            return jobs[0]
        is_sure = is_sure and mark.function != AT_REST
        begun = [job for job in jobs if 0 < job.number <= mark.sample]
        if not begun or (begun[0].is_alone and not is_sure):
            first = (begun or jobs)[0]
            first.num_lost += 1
            for job in jobs if first.num_lost > 1 else ():
                job.is_alone = True
            return first if first.num_lost >= _MAX_LOST else None
        if begun[0].is_alone:
            return begun[0]
        if is_sure and self._judges == "one by one" and begun[-1].number == mark.sample:
            return begun[-1]
        for job in jobs if mark.in_batch else begun:
            job.is_alone = True
        return None

    def _blame(self, job: _Job, mark: Mark, stopped: str) -> Judgement | None:
        """Note what stopped a process at a job; return the judgement that fails that sample, if one does."""
        if job.num_lost >= _MAX_LOST:
            return Judgement(error=f"its scoring process ended {_MAX_LOST} times before it was judged, the last time: {stopped}")
        if job.number != mark.sample or not 0 <= mark.function < len(self._config.functions):
            return Judgement(error=f"its scoring process ended: {stopped}")
        limit = {
            "time": f"ran past reward.timeout_s ({self._config.timeout_s:g} s)",
            "memory": f"ran over reward.process_memory_bytes ({self._config.process_memory_bytes})",
        }.get(stopped, "")
        name = reward_names(self._config)[mark.function]
        if not limit and isinstance(self._config.functions[mark.function], PythonReward):
            return Judgement(error=f"its scoring process died in {name}: {stopped}")
        self.counts.over_limit += 1
        job.skipped = (*job.skipped, mark.function)
        job.over_limit = f"reward {name} {limit or f'ended its process ({stopped})'}"
        return None

    def _finish(self, job: _Job, judgement: Judgement) -> None:
        self.counts.scored += not judgement.error
        self.counts.failed += bool(judgement.error)
        self.counts.busy_s += judgement.seconds
        for function in judgement.late:
            name = reward_names(self._config)[function]
            self.counts.over_limit += 1
            job.over_limit = f"reward {name} ran past reward.timeout_s ({self._config.timeout_s:g} s)"
        score = Score(
            job.sample.index, judgement.reward, judgement.parts, judgement.error[:MAX_ERROR_CHARS],
            error_kind=judgement.kind[:MAX_ERROR_CHARS], trace=judgement.trace, over_limit=job.over_limit,
        )  # fmt: skip
        if not job.done.done():  # cancelled: nobody waits any more
            job.done.set_result(score)

    async def _start(self) -> ScoringProcess:
        process = ScoringProcess(self._config, self._output)
        self._processes.add(process)
        self._judges = (await process.begin()).judges
        self.capacity = self._config.concurrency * (2 * MAX_BATCH if self._judges == "one by one" else MOST_TOGETHER)
        return process

    async def _replace(self, process: ScoringProcess) -> ScoringProcess:
        await self._stop(process)
        self.counts.replaced += 1
        return await self._start()

    async def _stop(self, process: ScoringProcess) -> None:
        process.kill()
        await process.reap()
        self._processes.discard(process)


def _batch_size(mean_s: float) -> int:
    return max(1, min(MAX_BATCH, int(_BATCH_WORK_S / max(mean_s, 1e-9))))


def _send(process: ScoringProcess, jobs: deque[_Job]) -> None:
    """Send the first of the jobs together, up to one that goes alone; that one by itself, once it is the first.

    Nothing is sent behind one that goes alone: where its process ends over the next one while that is being sent, what it said
    of this one would be lost.
    """
    sent = [*takewhile(lambda job: not job.is_alone, jobs)] or [*islice(jobs, 1)]
    for job in jobs:
        job.number = 0
    for number, job in enumerate(sent, process.num_sent + 1):
        job.number = number
    if sent:
        process.send([Item(job.sample, job.skipped) for job in sent], alone=sent[0].is_alone)


class RewardWorker:
    """One worker.

    Args:
        config: Of the run.
        run_folder: Of the run; what rewards print goes to `logs/NAME-printed.log` there.
        connection: To the controller.
        clock: Times scores and heartbeats; time limits are real time.
        name: This process's name, as it said at hello.
    """

    def __init__(self, config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, name: str = "reward-0") -> None:
        self._stage = Stage(connection, clock, name, config.supervision.heartbeat_s, self._report)
        printed = run_folder / "logs" / f"{name}-printed.log"
        printed.parent.mkdir(exist_ok=True)
        self._pool = RewardPool(config.reward, clock, name, printed)
        self._is_ready = False
        self._num_scoring = 0
        """Samples."""
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Serve until Shutdown arrives or the connection closes.

        Raises:
            ConfigError: The rewards are configured wrongly.
            RewardError: They cannot be built here (a missing package, no sandbox).
        """

        async def obey(_: Message) -> None:
            """Do nothing: but for Shutdown, what is said on this lane is for others."""

        await self._stage.run(obey, self._serve_requests())

    async def _serve_requests(self) -> None:
        async with self._pool.open() as pool, asyncio.TaskGroup() as samples:
            self._is_ready = True
            async for request, delivery in self._stage.requests(ScoreRequest):
                self._num_scoring += len(request.indices)
                samples.create_task(self._serve(request, delivery))
                while self._num_scoring >= pool.capacity:
                    self._has_room.clear()
                    await self._has_room.wait()

    async def _serve(self, request: ScoreRequest, delivery: Delivery) -> None:
        try:
            with self._stage.idle.running():
                scores = await self._pool.score(request)
                await self._stage.connection.send(scores, Lane.DATA)
                delivery.ack()
        finally:
            self._num_scoring -= len(request.indices)
            self._has_room.set()

    def _report(self) -> tuple[str, dict[str, float]]:
        counts, waiting_for = self._pool.counts, "" if self._num_scoring else "a sample to score"
        return waiting_for if self._is_ready else "its scoring processes to start", {
            "process/samples_scored": float(counts.scored),
            "process/samples_failed": float(counts.failed),
            "process/samples_scoring": float(self._num_scoring),
            "process/score_s_mean": counts.busy_s / max(counts.scored + counts.failed, 1),
            "process/children_replaced": float(counts.replaced),
            "process/samples_over_limit": float(counts.over_limit),
            "process/resident_bytes": float(resident_bytes_of_tree(os.getpid())),
        }
