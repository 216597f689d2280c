"""The reward worker: it takes score requests, returns scores, and keeps its scoring processes busy.

Samples are scored in child processes (worker_process.py), so that no reward runs on the worker's event loop, hangs the worker or
ends it. Invariants:
- Every request gets one Scores with a reward, or the reason why there is none, for each sample. A request is acknowledged once
  its Scores are handed over. The worker ends only if a scoring process cannot be started.
- A sample's process is killed `timeout_s` after its turn began. If a sample makes a function run out of time or memory, the
  function scores 0 for it and is counted, and the other functions score it as usual: otherwise a sample could escape its score by
  failing its judge. The same applies if a built-in function's process dies. If a user's own function ends the process, the sample
  fails.
- A stopped process costs only the sample that it was judging. Its other samples go to its replacement, and samples that it had
  not begun are not blamed. If several samples may be the cause (a function had them at once, the cause lay before, a function
  wrote into its socket), they are scored again one by one, and only a sample that stops its process again fails.
- A judgement is accepted only for a sample that the process has and has not judged yet: no sample gets another's score.

Processes stay alive and are reused. Samples of cheap rewards are sent several at a time, and the next ones while a process scores
the last: at most about 40 ms of work waits at one process while others are idle. Async functions are awaited for up to
`MOST_TOGETHER` samples at the same time, without waiting for each other: if one exceeds `timeout_s`, its process continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

log = logging.getLogger(__name__)
MAX_BATCH = 32
"""Maximum number of cheap samples that are sent at a time."""
LATE_S = 1.0
"""A process of async functions that does not answer for this much longer than `timeout_s` is blocked, and is killed."""
_BATCH_WORK_S = 0.02
_MOSTLY = 0.9
"""Share of `timeout_s` that a sample must have used to count as the one that ran out of time."""
_MAX_LOST = 3
"""Number of processes that may end before they began a sample, or for an unknown reason, before the sample fails."""


@dataclass(slots=True, eq=False)
class _Job:
    """One sample of a request."""

    sample: RewardInput
    done: asyncio.Future[Score]
    number: int = 0
    """Number of the sample among those sent to its process, from 1; 0: not sent yet."""
    skipped: tuple[int, ...] = ()
    over_limit: str = ""
    """The limit that it exceeded in the last of the skipped functions."""
    is_alone: bool = False
    """It is sent alone, because a function failed with it and other samples together."""
    num_lost: int = 0


@dataclass(slots=True)
class PoolCounts:
    """Counts of a pool since it opened."""

    scored: int = 0
    failed: int = 0
    replaced: int = 0
    """Processes that were killed or lost, and replaced."""
    over_limit: int = 0
    """Functions that scored 0 because a sample made them run out of time or memory, or ended their process."""
    busy_s: float = 0.0
    """Total judging time, failed samples included."""


class RewardPool:
    """`concurrency` scoring processes behind one queue.

    Example:
        >>> async with RewardPool(config.reward, SystemClock(), "reward-0").open() as pool:
        ...     score = await pool.score(request)
    """

    def __init__(self, config: RewardConfig, clock: Clock, name: str = "reward", output: Path | None = None) -> None:
        """Prepare a pool; `open` starts it.

        Args:
            config: The rewards, the number of processes, the time limit of a sample.
            clock: Gives the time stamps of scores. Time limits always use real time.
            name: The worker's name, written into each score.
            output: File for the output of rewards; None: standard error.
        """
        self.counts = PoolCounts()
        self._output_path = output
        self._config, self._clock, self._name = config, clock, name
        self._waiting: asyncio.Queue[_Job] = asyncio.Queue()  # the callers of `score` bound it
        self._processes: set[ScoringProcess] = set()
        self._judges = Ready().judges
        self.capacity = 1
        """Number of samples to hand in at once for full use; known when the pool is open."""
        self._most_several = MAX_BATCH
        """Maximum length of the list that a function of several samples gets."""
        self._num_together = 0
        """Number of samples in all processes at the same time, if a function is async."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Score samples of one prompt.

        Returns:
            A score of each sample, in order; if `error` is set, there is no reward, and the error says why.
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
        """Start all processes, wait until their rewards are built, and score; at exit kill and reap every process.

        Samples that are not scored by then are abandoned.

        Raises:
            ConfigError: The rewards are configured wrongly.
            RewardError: The rewards cannot be built here, or a process could not be replaced, which ended the pool.
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
            # In an exception group, asyncrl's own first error has the reason.
            raise next((each for each in leaves(error) if isinstance(each, AsyncRLError)), error) from None
        finally:
            for process in self._processes:
                process.kill()
            for process in tuple(self._processes):
                await self._stop(process)
            self._output.close()

    async def _serve(self, process: ScoringProcess) -> None:
        """Keep one scoring process busy; replace it if it is lost."""
        mean_s = _BATCH_WORK_S
        while True:
            if self._judges == "concurrently":
                jobs = await self._keep_full(process)
                process = await self._replace(process)
            else:
                jobs = deque([await self._waiting.get()])
                self._take_waiting(jobs, self._most_several if self._judges == "several" else _batch_size(mean_s))
            _send(process, jobs)
            num_late = 0
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
                if stopped == "time" and process.mark.in_batch:
                    num_late = sum(bool(job.number) for job in jobs)
                if (guilty := self._guilty(process.mark, jobs, stopped, is_sure=is_sure)) is not None:
                    num_late = 0  # this sample may have taken the time, and not the length of the list
                    jobs.remove(guilty)
                    jobs.appendleft(guilty)  # the results of earlier samples were lost: they are judged again
                    if (failure := self._blame(guilty, process.mark, stopped)) is not None:
                        self._finish(jobs.popleft(), failure)
                process = await self._replace(process)
                _send(process, jobs)
            if 0 < num_late // 2 < self._most_several:
                self._most_several = num_late // 2
                log.warning(
                    "a list of %d samples ran past reward.timeout_s (%g s), and none of them alone did; lists have at most %d "
                    "samples from now on; raise reward.timeout_s for longer ones",
                    num_late, self._config.timeout_s, self._most_several,
                )  # fmt: skip

    async def _keep_full(self, process: ScoringProcess) -> deque[_Job]:
        """Score samples concurrently as they arrive, until the process is lost; return the samples that it still had.

        The cause is unknown, so these samples are sent alone from now on.
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
                await asyncio.sleep(0)  # let the other processes take samples
                while len(sent) >= MOST_TOGETHER:
                    has_room.clear()
                    await has_room.wait()

        async def watch() -> None:
            nonlocal heard_s
            at = process.mark
            while True:
                if process.mark != at:  # it begins functions, so no function blocks it
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
        """Return the job that stopped a process. None: any of the jobs that it had begun, which are now sent alone."""
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
        """Note what stopped a process at a job; return the judgement if the sample now fails."""
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
        if not job.done.done():  # if cancelled, no caller waits
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
    """Send the first jobs together, up to one that must be sent alone; send such a job by itself when it is the first.

    Nothing is sent after a job that is alone: if the next job ended the process while it is being sent, the answer for this job
    would be lost.
    """
    sent = [*takewhile(lambda job: not job.is_alone, jobs)] or [*islice(jobs, 1)]
    for job in jobs:
        job.number = 0
    for number, job in enumerate(sent, process.num_sent + 1):
        job.number = number
    if sent:
        process.send([Item(job.sample, job.skipped) for job in sent], alone=sent[0].is_alone)


class RewardWorker:
    """One reward worker.

    Args:
        config: The run's config.
        run_folder: The run's folder; the output of rewards goes to `logs/NAME-printed.log` in it.
        connection: The connection to the controller.
        clock: Times scores and heartbeats; time limits use real time.
        name: This process's name, as sent in its hello message.
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
            """Do nothing: on this lane only Shutdown is for this process."""

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
