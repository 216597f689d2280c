"""Scores samples in child processes, so that no reward ever runs on an event loop, hangs a worker or takes it down.

Invariants: every `score` returns a Score, with a reward or with the reason why there is none; a sample's process is killed once
`timeout_s` has passed since its turn came; a process that dies, hangs or runs out of memory costs the one sample it was at, and
the others that it was sent go to its replacement. Processes are warm and reused. Cheap rewards are sent several at a time
(`_batch_size`): at most about 20 ms of work waits behind one process while others are idle.

Called by reward/worker.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from asyncrl.clock import Clock
from asyncrl.config.reward import RewardConfig
from asyncrl.errors import AsyncRLError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.scoring_process import ProcessDied, ScoringProcess
from asyncrl.reward.wire import Judgement
from asyncrl.schema.samples import Score, ScoreRequest

MAX_BATCH = 32
MAX_ERROR_CHARS = 2000
"""Of the reason why a sample has no score. It travels, goes into the ledger and is counted by, and a reward may say anything."""
_BATCH_WORK_S = 0.02


@dataclass(slots=True, eq=False)
class _Job:
    request: ScoreRequest
    done: asyncio.Future[Score]
    started_s: float = 0.0


@dataclass(slots=True)
class PoolCounts:
    """What a pool did since it opened."""

    scored: int = 0
    failed: int = 0
    replaced: int = 0
    """Processes killed or lost, and started anew."""
    busy_s: float = 0.0
    """Sum of the time that judging took, failed samples included."""


class RewardPool:
    """`concurrency` scoring processes behind one queue.

    Example:
        >>> async with RewardPool(config.reward, SystemClock(), "reward-0") as pool:
        ...     score = await pool.score(request)
    """

    def __init__(self, config: RewardConfig, clock: Clock, name: str = "reward") -> None:
        """Prepare a pool; nothing is started before it is entered.

        Args:
            config: Which rewards, how many processes, how long one sample may take.
            clock: Stamps the scores. Time limits are real time, whatever the clock.
            name: The worker's, written into each score.
        """
        self.counts = PoolCounts()
        self._config, self._clock, self._name = config, clock, name
        self._waiting: asyncio.Queue[_Job] = asyncio.Queue(self.capacity)
        self._processes: set[ScoringProcess] = set()
        self._tasks = asyncio.TaskGroup()
        self._slots: list[asyncio.Task[None]] = []

    @property
    def capacity(self) -> int:
        """Samples that are worth handing in at once; `score` waits beyond about twice as many."""
        return self._config.concurrency * MAX_BATCH

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the scoring processes now alive."""
        return tuple(process.pid for process in self._processes)

    async def score(self, request: ScoreRequest) -> Score:
        """Score one sample.

        Returns:
            Its score; where `error` is set there is none, and the error says why.
        """
        job = _Job(request, asyncio.get_running_loop().create_future(), self._clock.now())
        await self._waiting.put(job)
        return await job.done

    async def __aenter__(self) -> Self:
        """Start all processes and wait until their rewards are built.

        Raises:
            ConfigError: The rewards are configured wrongly.
            RewardError: They cannot be built here.
        """
        try:
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
        jobs: deque[_Job] = deque()
        mean_s = _BATCH_WORK_S
        while True:
            jobs.append(await self._waiting.get())
            while len(jobs) < _batch_size(mean_s) and not self._waiting.empty():
                jobs.append(self._waiting.get_nowait())
            process.send([_input(job.request) for job in jobs])
            while jobs:
                jobs[0].started_s = self._clock.now()
                judgement, alive = await self._judgement(process)
                self._finish(jobs.popleft(), judgement)
                mean_s = max(judgement.seconds, 0.7 * mean_s + 0.3 * judgement.seconds)
                if not alive:
                    await self._stop(process)
                    process = await self._start()
                    self.counts.replaced += 1
                    process.send([_input(job.request) for job in jobs])

    async def _judgement(self, process: ScoringProcess) -> tuple[Judgement, bool]:
        """Return the judgement of the sample whose turn it is, and whether the process can go on."""
        timeout_s = self._config.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                judgement = await process.judgement()
        except TimeoutError:
            return Judgement(error=f"timed out: not scored within reward.timeout_s ({timeout_s:g} s)", seconds=timeout_s), False
        except ProcessDied as died:
            return Judgement(error=f"its scoring process died: {died}"), False
        return judgement, not judgement.retiring

    def _finish(self, job: _Job, judgement: Judgement) -> None:
        self.counts.scored += not judgement.error
        self.counts.failed += bool(judgement.error)
        self.counts.busy_s += judgement.seconds
        if job.done.done():
            return
        request = job.request
        job.done.set_result(
            Score(
                group_id=request.group_id,
                index=request.index,
                attempt=request.attempt,
                reward=judgement.reward,
                parts=judgement.parts,
                error=judgement.error[:MAX_ERROR_CHARS],
                worker=self._name,
                started_s=job.started_s,
                finished_s=self._clock.now(),
                purpose=request.purpose,
            )
        )

    async def _start(self) -> ScoringProcess:
        process = ScoringProcess()
        self._processes.add(process)
        await process.begin(self._config)
        return process

    async def _stop(self, process: ScoringProcess) -> None:
        process.kill()
        await process.reap()
        self._processes.discard(process)

    async def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
        for process in tuple(self._processes):
            await self._stop(process)


def _batch_size(mean_s: float) -> int:
    return max(1, min(MAX_BATCH, int(_BATCH_WORK_S / max(mean_s, 1e-9))))


def _input(request: ScoreRequest) -> RewardInput:
    return RewardInput(request.prompt, request.text, request.finish_reason, request.num_tokens, request.index)


def _first_cause(error: BaseException) -> BaseException:
    """Return the first of asyncrl's own errors in a group, or what was given."""
    if isinstance(error, BaseExceptionGroup):
        ours, _ = error.split(AsyncRLError)
        while isinstance(ours, BaseExceptionGroup):
            ours = ours.exceptions[0]  # type: ignore[assignment]
        return ours or error
    return error
