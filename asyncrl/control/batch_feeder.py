"""The learner's side of the controller: batches to send, and checkpoints to request.

Owns which step comes next. Invariants: a batch is sent only after the ledger has recorded its groups as taken, so that a restart
sends exactly the same batch; at most `AHEAD` steps are sent and not done; after a learner restart the feed goes back to the
learner's version. If the learner shares its device, at most one step is sent before the learner's turn, so that it is ready then.
A step on which the learner dies twice is set aside. An outside learner takes its groups here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import zstandard

from asyncrl.buffer.buffer import TakenStep, Waiting
from asyncrl.buffer.ledger.records import StepParams
from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.launch.processes import plan_ranks
from asyncrl.control.peers import Peers
from asyncrl.errors import ConnectionClosed, RunError
from asyncrl.folders import write_whole
from asyncrl.observe.decisions import STEPS_FOLDER
from asyncrl.packing.pack import RankPlan, pack_step
from asyncrl.schema.control import Checkpoint, CheckpointDone
from asyncrl.schema.samples import GroupsTaken, ScoredGroup, StepBatch, StepDone
from asyncrl.schema.status import RELEASED
from asyncrl.transport.protocol import Connection

log = logging.getLogger(__name__)

AHEAD = 2
"""The current step, and the next one, prefetched."""
MOST_DEATHS = 2
"""Number of learner deaths on one step that was never finished; then the step is set aside."""


class BatchFeeder:
    """Sends steps to the learner."""

    def __init__(self, config: RunConfig, dispatcher: Dispatcher, clock: Clock) -> None:
        self.version = -1
        self.next_step = 0
        """The next step to send. The learner may report earlier steps as done: they were sent to it or to an earlier learner."""
        self.learner: Connection | None = None
        """Connection of the learner, once it is ready."""
        self.waiting = ""
        """What the next step still needs, as text; empty if nothing is missing."""
        self.waiting_since_s = 0.0
        self.on_taken: Callable[[TakenStep], None] = lambda _: None
        self.record: Callable[[TakenStep], None] | None = None
        """Records a step, on a thread, before it is sent; None: steps are not recorded."""
        self.woken = asyncio.Event()
        """Set when it may be possible to send a step."""
        self.config = config
        self._dispatcher = dispatcher
        self._buffer = dispatcher.buffer
        self._clock = clock
        self._ranks = plan_ranks(config)
        self._held = True
        self._finishes_taken = False
        self._has_turn = True
        self._sending = False
        self._incarnation = 0
        self._deaths: Counter[int] = Counter()
        """Number of learner deaths, by the step being trained."""
        self._outside_started_s = self._outside_waited_s = 0.0
        self._outside_done_s: float | None = None
        """When the outside learner reported its newest step as trained."""
        self._outside_turn = asyncio.Lock()
        if config.learner.kind != "builtin":
            state = self._buffer.state
            self.version = self.next_step = min(state.steps_to_repeat(), default=state.next_step)

    # -- when a step may go out ------------------------------------------------------------------------------------------

    @property
    def _has_rest_to_send(self) -> bool:
        end = min(self._buffer.state.next_step, self.config.num_steps)  # a resume may have fewer steps than were taken
        return self._finishes_taken and self.learner is not None and self.next_step < end

    @property
    def is_asked(self) -> bool:
        """Return whether an outside learner waits for its next step."""
        return self._outside_turn.locked()

    @property
    def idle(self) -> bool:
        """Return whether every step that was sent, or is still to be sent while draining, is done."""
        return not self._sending and self.next_step <= max(self.version, 0) and not self._has_rest_to_send

    def hold(self, held: bool, *, finish_taken: bool = False) -> None:
        """Take no new step while held; with `finish_taken`, steps taken already are still sent."""
        self._held, self._finishes_taken = held, finish_taken
        self.woken.set()

    def take_turn(self, has_turn: bool) -> None:
        """Send more than the next step only while it is the learner's turn on a device that it shares."""
        self._has_turn = has_turn
        self.woken.set()

    # -- the learner -----------------------------------------------------------------------------------------------------

    def learner_ready(self, connection: Connection, version: int) -> None:
        """Start again from the learner's version; later steps that were taken before are sent again."""
        self._incarnation += 1
        self._buffer.learner_restarted(version, self._clock.now())
        self.learner = connection
        self.version = self.next_step = version
        self.woken.set()

    def learner_dead(self, *, over_checkpoint: bool = False) -> TakenStep | None:
        """Send nothing until a learner is ready again; return the step on which it died, if that must be set aside now.

        Args:
            over_checkpoint: A checkpoint was due, so the learner may not have begun the step; the death does not count for it.
        """
        in_hand = self.version if self.learner is not None and self.next_step > self.version else -1
        self.learner = None
        self._incarnation += 1
        record = self._buffer.state.steps.get(in_hand)
        if over_checkpoint or record is None or record.trained_before:
            return None
        self._deaths = Counter({in_hand: self._deaths[in_hand] + 1})
        if self._deaths[in_hand] < MOST_DEATHS:
            return None
        self._deaths.clear()
        repeat = self._buffer.take(in_hand, self._clock.now())
        assert isinstance(repeat, TakenStep), "a step that is taken waits for nothing"
        return repeat

    def step_done(self, done: StepDone) -> bool:
        """Note a finished step; return False if it was known already."""
        if done.version <= self.version:
            return False
        self.version = done.version
        self._dispatcher.follow(self._buffer.mark_trained(done.step, self._clock.now()))
        self.woken.set()
        return True

    async def send_possible(self) -> None:
        """Take, pack and send steps until the next one must wait."""
        self._sending = True
        try:
            while (learner := self.learner) is not None and (not self._held or self._has_rest_to_send):
                if self.next_step >= min(self.version + (AHEAD if self._has_turn else 1), self.config.num_steps):
                    return
                incarnation, taken = self._incarnation, await self._take(self.next_step)
                if taken is None:
                    return
                batch = await asyncio.to_thread(pack_taken, taken.step, taken.groups, taken.params, self._ranks)
                if self.record is not None:
                    await asyncio.to_thread(self.record, taken)
                if incarnation != self._incarnation or (self._held and not self._finishes_taken):
                    continue
                self.next_step = batch.step + 1
                try:
                    await learner.send(batch)
                except ConnectionClosed:
                    log.warning("step %d could not be sent: the learner is gone", batch.step)
        finally:
            self._sending = False

    async def _take(self, step: int, group_ids: tuple[int, ...] = ()) -> TakenStep | None:
        """Take a step's groups and wait until the ledger has them on disk; return None, with `waiting` set, if it must wait."""
        committed = asyncio.Event()
        taken = self._buffer.take(step, self._clock.now(), committed.set, group_ids)
        self._dispatcher.follow(taken.instructions)
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

    async def take_outside(self, ending: asyncio.Event, group_ids: tuple[int, ...] = ()) -> GroupsTaken:
        """Wait until there are enough groups for outside code's next step, and take them.

        Args:
            ending: Set when the run ends.
            group_ids: Take exactly these, which must be ready; if the step was taken with other groups and is not trained, those
                are set aside. Empty: the buffer's policy chooses.

        Raises:
            RunError: The run ended or reached its last step, the step before is not reported as trained, or a given group cannot
                be trained.
        """
        async with self._outside_turn:
            # A driven learner asks for a step once it has waited for the groups, any other to wait for them.
            idle_from_s, is_again = self._outside_done_s, self.next_step > self.version
            if idle_from_s is not None and not group_ids:
                idle_from_s = self._clock.now()
            while group_ids and self._held and not ending.is_set():  # of a paused run nothing is set aside
                await self._woken()
            if ending.is_set():
                raise RunError("the run has ended")
            if group_ids:
                self.next_step, state = self.version, self._buffer.state
                others = () if (record := state.steps.get(self.version)) is None else record.group_ids
                if others and others != group_ids:
                    if refusal := state.why_not(self.version, group_ids):
                        named = ", ".join(map(str, others))
                        raise RunError(f"{refusal}; groups {named} are taken, and can be trained together")
                    self._buffer.set_aside(self.version, "another batch was trained in its place", self._clock.now())
            elif self.next_step > self.version:
                raise RunError(f"step {self.next_step - 1} is taken and not trained yet; report it with `trained` first")
            if self.next_step >= self.config.num_steps:
                raise RunError(f"all {self.config.num_steps} steps are trained")
            while not ending.is_set():
                if not self._held and (taken := await self._take(self.next_step, group_ids)) is not None:
                    self.next_step = taken.step + 1
                    self._outside_started_s = now = self._clock.now()
                    if not is_again:  # since then it has tried to train the step
                        self._outside_waited_s = 0.0 if idle_from_s is None else now - idle_from_s
                    return GroupsTaken(taken.step, taken.groups, taken.params.mask_below)
                if group_ids and not self._held:
                    reason, self.waiting = self.waiting, ""
                    raise RunError(reason)
                await self._woken()
            raise RunError("the run has ended")

    def release_outside(self, group_ids: Sequence[int]) -> None:
        """Drop the groups of the step that an outside learner has taken and not trained, if all of them are among these."""
        record = None if self._outside_turn.locked() else self._buffer.state.steps.get(self.version)
        if record is not None and not record.trained_before and set(record.group_ids) <= set(group_ids):
            self._buffer.set_aside(self.version, RELEASED, self._clock.now())
            self.next_step = self.version

    async def _woken(self) -> None:
        """Wait until the state may have changed."""
        self.woken.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.25):
                await self.woken.wait()

    def outside_step(self, step: int, metrics: dict[str, float], now: float) -> StepDone:
        """Convert an outside learner's report to a StepDone.

        Raises:
            RunError: The step is not the one that was taken.
        """
        if step != self.version or self.next_step != step + 1:
            raise RunError(f"step {step} is not in hand: the newest version is {self.version}, the next step {self.next_step}")
        self._outside_done_s = now
        return StepDone(step, step + 1, metrics, self._outside_started_s, now, self._outside_waited_s)


def pack_taken(step: int, groups: Sequence[ScoredGroup], params: StepParams, ranks: RankPlan) -> StepBatch:
    """Return a step's batch, packed with the parameters it was taken with."""
    batch = pack_step(
        step, groups, tokens_per_row=params.tokens_per_row, temperature=params.temperature, mask_below=params.mask_below,
        ranks=replace(ranks, minibatches=params.minibatches), screen=params.screen,
    )  # fmt: skip
    return msgspec.structs.replace(batch, settings=params.settings)


class RecordedStep(msgspec.Struct, frozen=True):
    """The groups and parameters of one step, as recorded."""

    step: int
    life: int
    """Number of the controller's start; the recording of that start has the config."""
    groups: tuple[ScoredGroup, ...]
    params: StepParams

    @staticmethod
    def path(folder: Path, step: int) -> Path:
        """Return its file in the folder of a recording."""
        return folder / STEPS_FOLDER / f"step-{step:06}.bin"

    def write(self, folder: Path) -> None:
        """Write it; it replaces an earlier step of that number that was taken but never trained."""
        path = self.path(folder, self.step)
        try:
            path.parent.mkdir(exist_ok=True)
            compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
            write_whole(path, compressor.compress(msgspec.msgpack.encode(self)), onto_disk=False)
        except OSError as error:
            log.error("step %d is not recorded, but the run continues: %s", self.step, error)  # noqa: TRY400


def keep_set_aside(run_folder: Path, taken: TakenStep) -> tuple[str, str]:
    """Write the groups of a step that is given up; return the file's path in the run folder, and in words where they are now."""
    file = f"set_aside/step-{taken.step}-group-{taken.groups[0].group_id}.msgpack"
    path = run_folder / file
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, msgspec.msgpack.encode(taken.groups))
    except OSError as error:
        return file, f"without a copy ({path} cannot be written: {error})"
    return file, f"in {path}"


@dataclass(eq=False)
class Checkpoints:
    """The newest checkpoint, and the calls that wait for the next one."""

    peers: Peers
    folder: str = ""
    """Folder of the newest complete checkpoint."""
    version: int = -1
    due: int = -1
    """Version of the checkpoint that was requested, or that the learner saves by itself, and is not complete yet; -1: none."""
    deaths: Counter[int] = field(default_factory=Counter)
    """Number of learner deaths while a checkpoint was due, by the learner's version at its death."""
    _waiters: list[asyncio.Future[str]] = field(default_factory=list)
    _asked: tuple[Connection, int] | None = None
    """The last request: to which learner, and for which version."""

    def ask(self, version: int, *, again: bool = True) -> bool:
        """Request a checkpoint of the learner's current version, `version` or a little later; False if there is no learner.

        Without `again`, the same learner is not asked twice in a row for the same version.
        """
        learner = self.peers.get("learner")
        if learner is None:
            return False
        if again or self._asked != (learner.connection, version):
            learner.tell(Checkpoint(version))
            self._asked, self.due = (learner.connection, version), version
        return True

    async def wait_for_next(self, version: int) -> str:
        """Request a checkpoint and return its folder once it is complete.

        Raises:
            RunError: There is no learner, or it died meanwhile.
        """
        if not self.ask(version):
            raise RunError("there is no learner that could write a checkpoint now")
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await waiter

    def done(self, message: CheckpointDone) -> int:
        """Note a complete checkpoint; return the version of the oldest one kept (0: none); no earlier step can be repeated."""
        self.folder, self.version, self.due = message.folder, message.version, -1
        for waiter in self._take_waiters():
            waiter.set_result(message.folder)
        numbers = (path.name.removeprefix("step-") for path in Path(message.folder).parent.glob("step-*"))
        return min((int(number) for number in numbers if number.isdigit()), default=0)

    def fail(self, reason: str) -> None:
        """Tell waiting calls that there will be no checkpoint."""
        self.due = -1
        for waiter in self._take_waiters():
            waiter.set_exception(RunError(f"no checkpoint was written: {reason}"))

    def _take_waiters(self) -> list[asyncio.Future[str]]:
        waiting, self._waiters = [waiter for waiter in self._waiters if not waiter.done()], []
        return waiting
