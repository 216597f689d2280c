"""The learner's feed: one step's groups are taken, packed and sent while the step before still runs.

Owns which step comes next. Invariants: a batch is sent only once the ledger holds that its groups are taken, so that a restart
sends the very same batch; at most `AHEAD` steps are sent and not done; after a learner restart the feed goes back to the version
it stands at. Where the learner shares its device, one step at most is sent before its turn: the learner has it ready when that
comes, and brings what it lies on nearer while others give the device back.
Called by control/controller.py and control/switching.py; an outside learner takes its groups here too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from asyncrl.buffer.buffer import Buffer, TakenStep, Waiting
from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.control.flow import Flow
from asyncrl.control.process_plan import plan_ranks
from asyncrl.errors import ConnectionClosed, RunError
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.batches import GroupsTaken, StepBatch, StepDone
from asyncrl.transport.channel import Connection

log = logging.getLogger(__name__)

AHEAD = 2
"""The step in hand and the next one, prefetched."""


class LearnerFeed:
    """Steps on their way to the learner."""

    def __init__(self, config: RunConfig, flow: Flow, clock: Clock) -> None:
        self.version = -1
        """The newest version that exists."""
        self.waiting = ""
        """What the next step still needs, in words; empty when nothing is missing."""
        self.waiting_since_s = 0.0
        self.on_taken: Callable[[TakenStep], None] = lambda _: None
        self.on_idle: Callable[[], None] | None = None
        """Called once, when the learner has nothing in hand."""
        self.on_rest: Callable[[], None] = lambda: None
        """Called whenever all has been sent that can be."""
        self._config = config
        self._flow = flow
        self._buffer: Buffer = flow.buffer
        self._clock = clock
        self._ranks = plan_ranks(config)
        self._wake = asyncio.Event()
        self._learner: Connection | None = None
        self._next_step = 0
        self._held = True
        self._has_turn = True
        self._sending = False
        self._incarnation = 0
        self._outside_started_s = 0.0
        self._outside_turn = asyncio.Lock()
        if config.learner.kind == "external":
            state = flow.buffer.state
            self.version = self._next_step = min(state.steps_to_repeat(), default=state.next_step)

    @property
    def idle(self) -> bool:
        """Return whether every step that was sent is done."""
        return not self._sending and self._next_step <= max(self.version, 0)

    @property
    def wants_turn(self) -> bool:
        """Return whether the learner has a step, or is sent one, that waits for its turn."""
        return not self._has_turn and self._next_step > max(self.version, 0)

    @property
    def is_at_rest(self) -> bool:
        """Return whether every step that could be sent is sent and done."""
        return self.idle and not self._wake.is_set()

    def wake(self) -> None:
        """Something has changed: a step may be possible now."""
        self._wake.set()

    def hold(self, held: bool) -> None:
        """Send nothing while held; what was sent is still done."""
        self._held = held
        self.wake()

    def take_turn(self, has_turn: bool) -> None:
        """Send more than the next step only while it is the learner's turn on a device that it shares."""
        self._has_turn = has_turn
        self.wake()

    def learner_ready(self, connection: Connection, version: int) -> None:
        """Start again from the version the learner stands at; later steps that were taken before are replayed."""
        self._learner = connection
        self._incarnation += 1
        self._buffer.learner_restarted(version, self._clock.now())
        self.version = self._next_step = version
        self.wake()

    def learner_dead(self) -> None:
        """Send nothing until a learner is ready again."""
        self._learner = None
        self._incarnation += 1

    def step_done(self, done: StepDone) -> bool:
        """Note a finished step; return False where it was known before."""
        if done.version <= self.version:
            return False
        self.version = done.version
        self._flow.follow(self._buffer.mark_trained(done.step, self._clock.now()))
        self.wake()
        return True

    async def run(self) -> None:
        """Send one step after the other, as they become possible."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._sending = True
            while self._may_send() and await self._send_next():
                pass
            self._sending = False
            if self.on_idle is not None and self.idle and self._learner is not None:
                on_idle, self.on_idle = self.on_idle, None
                on_idle()
            self.on_rest()

    def _may_send(self) -> bool:
        end = min(self.version + (AHEAD if self._has_turn else 1), self._config.num_steps)
        return self._learner is not None and not self._held and self._next_step < end

    async def _send_next(self) -> bool:
        """Take, pack and send the next step; return False when it must wait."""
        learner, incarnation = self._learner, self._incarnation
        assert learner is not None
        batch = await self._pack_next()
        if batch is None:
            return False
        if self._held or incarnation != self._incarnation:
            return True
        self._next_step = batch.step + 1
        try:
            await learner.send(batch)
        except ConnectionClosed:
            log.warning("step %d could not be sent: the learner is gone", batch.step)
        return True

    async def _pack_next(self) -> StepBatch | None:
        taken = await self._take(self._next_step)
        return None if taken is None else await asyncio.to_thread(self._pack, taken)

    def _pack(self, taken: TakenStep) -> StepBatch:
        return pack_step(
            taken.step,
            taken.groups,
            tokens_per_row=taken.params.tokens_per_row,
            temperature=taken.params.temperature,
            mask_below=taken.params.mask_below,
            replay=taken.replay,
            ranks=replace(self._ranks, minibatches=taken.params.minibatches),
            screen=taken.params.screen,
        )

    async def _take(self, step: int) -> TakenStep | None:
        """Take a step's groups and wait until the ledger has that on disk; None when it must wait, with `waiting` set."""
        committed = asyncio.Event()
        taken = self._buffer.take(step, self._clock.now(), committed.set)
        self._flow.follow(taken.instructions)
        if isinstance(taken, Waiting):
            if not self.waiting:
                self.waiting_since_s = self._clock.now()
            self.waiting = taken.reason
            return None
        self.waiting = ""
        await committed.wait()
        self.on_taken(taken)
        return taken

    # -- an outside learner ----------------------------------------------------------------------------------------------

    async def take_outside(self, ending: asyncio.Event) -> GroupsTaken:
        """Take the next step's groups for outside code, waiting until there are enough.

        Raises:
            RunError: The run ended, reached its last step, or the step before is not reported as trained.
        """
        async with self._outside_turn:
            return await self._take_in_turn(ending)

    async def _take_in_turn(self, ending: asyncio.Event) -> GroupsTaken:
        if self._next_step > self.version:
            raise RunError(f"step {self._next_step - 1} is taken and not trained yet; report it with `trained` first")
        if self._next_step >= self._config.num_steps:
            raise RunError(f"all {self._config.num_steps} steps are trained")
        while not ending.is_set():
            if not self._held and (taken := await self._take(self._next_step)) is not None:
                self._next_step = taken.step + 1
                self._outside_started_s = self._clock.now()
                return GroupsTaken(taken.step, taken.groups)
            self._wake.clear()
            await self._wait_for_change()
        raise RunError("the run has ended")

    def outside_step(self, step: int, metrics: dict[str, float], now: float) -> StepDone:
        """Turn an outside learner's report into the learner's own form.

        Raises:
            RunError: That step is not the one in hand.
        """
        if step != self.version or self._next_step != step + 1:
            raise RunError(f"step {step} is not in hand: the newest version is {self.version}, the next step {self._next_step}")
        return StepDone(step, step + 1, metrics, self._outside_started_s, now)

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(0.25):
                await self._wake.wait()
        except TimeoutError:
            return
