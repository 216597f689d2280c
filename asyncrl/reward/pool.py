"""Scores samples in child processes, so that no reward ever runs on an event loop, hangs a worker or takes it down.

Invariants:
- Every `score` returns a Score of each sample, with a reward or with the reason why there is none.
- A sample's process is killed once `timeout_s` has passed since its turn came. A function that a sample makes run out of time or
  memory scores 0 for it and is counted, the other functions score it as ever: a sample that could fail its judge would escape the
  score it earns. So it is where a built-in function's process dies. Where a user's own function ends it, the sample fails.
- What stops a process costs the one sample it was at; the others that it was sent go to its replacement, and a sample that it had
  not begun is blamed for nothing. Where a function had several samples at once, they are scored again one by one.

Processes are warm and reused. Cheap rewards are sent several at a time, and the next of them while a process scores the last:
at most about 40 ms of work waits behind one process while others are idle. Async functions are awaited for up to `MOST_TOGETHER`
samples at the same time, and none waits for another: where one runs past `timeout_s`, its process goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from asyncrl.clock import Clock
from asyncrl.config.reward import PythonReward, RewardConfig, reward_names
from asyncrl.errors import AsyncRLError, leaves
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.worker_process import Item, Judgement, PrintedOutput, ProcessDied, Ready, ScoringProcess
from asyncrl.schema.samples import Score, ScoreRequest, Scores

log = logging.getLogger(__name__)

MAX_BATCH = 32
"""Cheap samples that are sent at a time."""
MOST_TOGETHER = 128
"""Samples that one process has at a time, where its functions judge several at once or are async."""
LATE_S = 1.0
"""A process of async functions that says nothing for so much longer than `timeout_s` is held up, and killed."""
MAX_ERROR_CHARS = 2000
"""Of the reason why a sample has no score. It travels, goes into the ledger and is counted by, and a reward may say anything."""
_BATCH_WORK_S = 0.02
_MAX_LOST = 3
"""Processes that may die before they began a sample, until the sample fails."""


@dataclass(slots=True, eq=False)
class _Request:
    done: asyncio.Future[None]
    scores: list[Score | None]
    """None where it is still to come."""
    num_open: int


@dataclass(slots=True, eq=False)
class _Job:
    """One sample of a request."""

    request: _Request
    place: int
    sample: RewardInput
    number: int = 0
    """Which of the samples it is that its process was sent, from 1."""
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
        >>> async with RewardPool(config.reward, SystemClock(), "reward-0") as pool:
        ...     score = await pool.score(request)
    """

    def __init__(self, config: RewardConfig, clock: Clock, name: str = "reward", output: Path | None = None) -> None:
        """Prepare a pool; nothing is started before it is entered.

        Args:
            config: Which rewards, how many processes, how long one sample may take.
            clock: Stamps the scores. Time limits are real time, whatever the clock.
            name: The worker's, written into each score.
            output: File for what rewards print; None: standard error.
        """
        self.counts = PoolCounts()
        self._stops: Counter[tuple[str, str]] = Counter()
        self._output_path = output
        self._config, self._clock, self._name = config, clock, name
        self._waiting: asyncio.Queue[_Job] = asyncio.Queue()  # whoever calls `score` bounds it
        self._processes: set[ScoringProcess] = set()
        self._ready = Ready()
        self._tasks = asyncio.TaskGroup()
        self._slots: list[asyncio.Task[None]] = []

    @property
    def capacity(self) -> int:
        """Samples that are worth handing in at once."""
        several = self._ready.takes_several or self._ready.is_concurrent
        return self._config.concurrency * (MOST_TOGETHER if several else 2 * MAX_BATCH)

    async def score(self, request: ScoreRequest) -> Scores:
        """Score samples of one prompt.

        Returns:
            A score of each, in order; where `error` is set there is none, and the error says why.
        """
        started_s, num = self._clock.now(), len(request.indices)
        pending = _Request(asyncio.get_running_loop().create_future(), [None] * num, num)
        told = zip(request.indices, request.texts, request.finish_reasons, request.lengths, strict=True)
        for place, (index, text, finish_reason, length) in enumerate(told):
            self._waiting.put_nowait(_Job(pending, place, RewardInput(request.prompt, text, finish_reason, length, index)))
        await pending.done
        scores = tuple([score for score in pending.scores if score is not None])
        times = started_s, self._clock.now()
        return Scores(request.group_id, request.attempt, scores, self._name, *times, request.purpose)

    async def __aenter__(self) -> Self:
        """Start all processes and wait until their rewards are built.

        Raises:
            ConfigError: The rewards are configured wrongly.
            RewardError: They cannot be built here.
        """
        try:
            self._output = PrintedOutput(self._output_path)
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(self._start()) for _ in range(self._config.concurrency)]
            await self._tasks.__aenter__()
        except BaseExceptionGroup as group:
            await self._kill_all()
            raise _first_cause(group) from None
        except BaseException:
            await self._kill_all()
            raise
        self._slots = [self._tasks.create_task(self._serve(start.result())) for start in starts]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill and reap every process; samples not yet scored are abandoned.

        Raises:
            RewardError: A process could not be replaced, which ended the pool.
        """
        for slot in self._slots:
            slot.cancel()
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            raise _first_cause(group) from None
        finally:
            await self._kill_all()

    async def _serve(self, process: ScoringProcess) -> None:
        """Keep one scoring process busy, and replace it when it is lost."""
        mean_s = _BATCH_WORK_S
        while True:
            if self._ready.is_concurrent:
                jobs = await self._keep_full(process)
                process = await self._replace(process)
            else:
                jobs = deque([await self._waiting.get()])
                self._take_waiting(jobs, MAX_BATCH if self._ready.takes_several else _batch_size(mean_s))
            _send(process, jobs)
            while jobs:
                most = _batch_size(mean_s)
                if 1 < most >= len(jobs) and not self._ready.takes_several:
                    behind = deque[_Job]()
                    self._take_waiting(behind, most)
                    _send(process, behind)
                    jobs += behind
                stopped, judgements = "", tuple[Judgement, ...]()
                try:
                    async with asyncio.timeout(self._config.timeout_s):
                        judgements = await process.judgements(len(jobs))
                except TimeoutError:
                    stopped = "time"
                except ProcessDied as died:
                    stopped = str(died)
                for judgement in judgements:
                    if judgement.out_of_memory:
                        stopped = "memory"
                        break
                    self._finish(jobs.popleft(), judgement)
                    mean_s = max(judgement.seconds, 0.7 * mean_s + 0.3 * judgement.seconds)
                if not stopped:
                    continue
                await self._stop(process)
                at = [job.number for job in jobs]
                if process.mark.sample in at and not process.mark.in_batch:
                    jobs.rotate(-at.index(process.mark.sample))  # what was said of those before did not get out: judged again
                if (failure := self._blame(process, jobs, stopped)) is not None:
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
                self._take_waiting(jobs, MOST_TOGETHER - len(sent))
                heard_s = heard_s if sent else clock()
                _send(process, jobs)
                sent.update({job.number: job for job in jobs})
                while len(sent) >= MOST_TOGETHER:
                    has_room.clear()
                    await has_room.wait()

        async def watch() -> None:
            while True:
                if sent and clock() - heard_s > self._config.timeout_s + LATE_S:
                    process.kill()
                await asyncio.sleep(LATE_S / 4)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(feed()), group.create_task(watch())]
            with contextlib.suppress(ProcessDied):
                while True:
                    judgements = await process.judgements(MOST_TOGETHER)
                    if any(judgement.out_of_memory or judgement.number not in sent for judgement in judgements):
                        break
                    heard_s = clock()
                    for judgement in judgements:
                        self._finish(sent.pop(judgement.number), judgement)
                    has_room.set()
            for task in tasks:
                task.cancel()
        for job in sent.values():
            job.is_alone = True
        return deque(sent.values())

    def _take_waiting(self, jobs: deque[_Job], most: int) -> None:
        while len(jobs) < most and not self._waiting.empty():
            jobs.append(self._waiting.get_nowait())

    def _blame(self, process: ScoringProcess, jobs: deque[_Job], stopped: str) -> Judgement | None:
        """Note what stopped a process at the first of its jobs; return the judgement that fails that sample, if one does."""
        job, mark = jobs[0], process.mark
        if mark.in_batch and mark.sample >= job.number and not job.is_alone:
            for each in jobs:
                each.is_alone = True
            return None
        if mark.sample < job.number or not 0 <= mark.function < len(self._config.functions):
            job.num_lost += 1
            if job.num_lost < _MAX_LOST:
                return None
            return Judgement(error=f"its scoring process ended {_MAX_LOST} times before it was begun, the last time: {stopped}")
        limit = {
            "time": f"ran past reward.timeout_s ({self._config.timeout_s:g} s)",
            "memory": f"ran over reward.process_memory_bytes ({self._config.process_memory_bytes})",
        }.get(stopped, "")
        fails = not limit and isinstance(self._config.functions[mark.function], PythonReward)
        name = reward_names(self._config)[mark.function]
        self._tell(name, limit or f"ended its process ({stopped})", fails=fails)
        if fails:
            return Judgement(error=f"its scoring process died in {name}: {stopped}")
        self.counts.over_limit += 1
        job.skipped = (*job.skipped, mark.function)
        job.over_limit = f"reward {name} {limit or 'ended its process'}"
        return None

    def _tell(self, name: str, what: str, *, fails: bool) -> None:
        """Log the first, second, fourth, ... time that a function does something."""
        self._stops[name, what] += 1
        count = self._stops[name, what]
        if count & (count - 1) == 0:
            done = self.counts.scored + self.counts.failed + 1
            verb = "fail" if fails else "score 0 there"
            log.warning("reward %s: %s on %d of %d samples so far; they %s", name, what, count, done, verb)

    def _finish(self, job: _Job, judgement: Judgement) -> None:
        self.counts.scored += not judgement.error
        self.counts.failed += bool(judgement.error)
        self.counts.busy_s += judgement.seconds
        for function in judgement.late:
            name, limit = reward_names(self._config)[function], f"ran past reward.timeout_s ({self._config.timeout_s:g} s)"
            self._tell(name, limit, fails=False)
            self.counts.over_limit += 1
            job.over_limit = f"reward {name} {limit}"
        request = job.request
        request.scores[job.place] = Score(
            job.sample.index, judgement.reward, judgement.parts, judgement.error[:MAX_ERROR_CHARS],
            error_kind=judgement.kind[:MAX_ERROR_CHARS], trace=judgement.trace, over_limit=job.over_limit,
        )  # fmt: skip
        request.num_open -= 1
        if not request.num_open and not request.done.done():
            request.done.set_result(None)

    async def _start(self) -> ScoringProcess:
        process = ScoringProcess(self._output)
        self._processes.add(process)
        self._ready = await process.begin(self._config)
        return process

    async def _replace(self, process: ScoringProcess) -> ScoringProcess:
        await self._stop(process)
        self.counts.replaced += 1
        return await self._start()

    async def _stop(self, process: ScoringProcess) -> None:
        process.kill()
        await process.reap()
        self._processes.discard(process)

    async def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
        for process in tuple(self._processes):
            await self._stop(process)
        self._output.close()


def _batch_size(mean_s: float) -> int:
    return max(1, min(MAX_BATCH, int(_BATCH_WORK_S / max(mean_s, 1e-9))))


def _send(process: ScoringProcess, jobs: deque[_Job]) -> None:
    """Send jobs, together but for those that go alone."""
    together: list[Item] = []
    for job in jobs:
        job.number = process.num_sent + len(together) + 1
        item = Item(job.sample, job.skipped)
        if job.is_alone:
            if together:
                process.send(together)
                together = []
            process.send([item], alone=True)
        else:
            together.append(item)
    if together:
        process.send(together)


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first of asyncrl's own errors in a group, or the group."""
    return next((each for each in leaves(group) if isinstance(each, AsyncRLError)), group)
