"""The generator process: it receives groups, sends samples, and takes new weights whenever there are some.

Owns the engine from LoadModel to Shutdown, and four loops over one connection:
- orders (CONTROL): load the model, pause, resume, release a shared device or take it, abort a group, note the newest version,
  shut down;
- groups (DATA): one task per group, at most the channel's window; a group is acknowledged when its last result is sent;
- weights: fetch the newest announced version (versions in between are skipped), swap, probe, report VersionLive;
- heartbeat: what the generator does or waits for, its gauges, and the engine's number of slots if it has changed.

On a shared device the engine sleeps while the learner trains, and wakes with newer weights. Asleep, it frees both weights and
KV cache: the next version brings the weights again, and nothing is sampled before. `generate.kv` decides what happens to the keys
and values of requests in flight, as at any weight swap. With placement hybrid the weights are the learner's own and stay in
memory; the end of each rollout checks that they were not changed during it.

Invariants: every group ends in results, whatever its prompts; only a failing engine or weights that do not fit end the process;
PhaseReached is sent once the memory is released, or taken and filled, and is also a line of the memory timeline.
pipeline.py supplies `fetch_weights`: stages do not import each other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.errors import BroadcastError
from asyncrl.generate.engine import Engine
from asyncrl.generate.rollout import Rollout, request_id_of, start_engine
from asyncrl.observe.steps import MemoryLine, open_memory
from asyncrl.schema import control as msg
from asyncrl.schema.samples import GroupWork, Purpose, ids_from_bytes, logprobs_from_bytes
from asyncrl.schema.weights import VersionLive, WeightsAvailable
from asyncrl.transport.protocol import GOODBYE, Connection, Delivery, Lane
from asyncrl.transport.stage import Stage
from asyncrl.weights.media.base import LentTensors

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FETCH_AGAIN_S, LONGEST_FETCH_AGAIN_S = 1.0, 30.0
"""Waiting time before a failed fetch is tried again, if no other version is announced: the first and the longest."""

NOT_FINITE = 1e9
"""The probe error that is reported if one is not finite: the controller refuses such numbers."""

MOST_ABORTED = 1024
"""How many aborted groups are remembered; more where the channel's window is larger, since so many groups can be on the way."""

FetchWeights = Callable[[WeightsAvailable], Awaitable[Mapping[str, "torch.Tensor"]]]


class GeneratorWorker:
    """One generator's state and loops.

    Args:
        config: The run's config.
        run_folder: The run's folder; on a shared device the memory timeline is written there.
        connection: The connection to the controller.
        clock: Times samples and heartbeats.
        fetch_weights: Returns the tensors of a version, complete and verified; raises BroadcastError when the version is gone.
        name: This process's name, as in its hello message.
    """

    def __init__(
        self, config: RunConfig, run_folder: Path, connection: Connection, clock: Clock, fetch_weights: FetchWeights, name: str
    ) -> None:
        self._config, self._clock, self._fetch_weights, self._name = config, clock, fetch_weights, name
        self._timeline = open_memory(run_folder, name) if config.placement.takes_turns else None
        self._phase: msg.Phase = "rollout"
        """The engine runs in phase `rollout` and is asleep in any other."""
        self._shared: LentTensors | None = None
        """The weights that the engine samples with, if they are the learner's own; else None."""
        self._taking = asyncio.Lock()
        """Held while weights are swapped, or while the engine falls asleep or wakes up: never both at once."""
        self._rollout: Rollout | None = None
        self._is_ready = asyncio.Event()
        self._newest: WeightsAvailable | None = None
        self._weights_news = asyncio.Event()
        self._gate = WeightsGate(is_off=config.generate.in_flight_updates)
        self._work: dict[tuple[Purpose, int], GroupWork] = {}
        self._aborted: deque[int] = deque(maxlen=max(MOST_ABORTED, config.transport.window))
        """Aborted training groups. They never come again, but an abort may arrive before its group."""
        self._told_slots = 0
        self._is_paused = False
        self._is_loading = False
        """The engine is starting, which takes minutes for a large model; this counts as work, not as waiting."""
        self._stage = Stage(connection, clock, name, config.supervision.heartbeat_s, self._report)
        self._connection, self._idle = connection, self._stage.idle

    async def run(self) -> bool:
        """Serve until Shutdown arrives or the connection closes, then close the engine, if there is one.

        Returns:
            Whether Shutdown arrived; if not, the connection closed before.

        Raises:
            GenerationError: The model cannot be loaded, or a version's weights do not fit it.
            ConfigError: The configured engine is not built.
        """
        try:
            await self._stage.run(self._obey, self._serve_groups(), self._follow_weights())
        finally:
            if self._timeline is not None:
                self._timeline.close()
            if self._rollout is not None:
                await self._rollout.engine.close()
        return self._stage.was_told_to_end or self._connection.closed_reason == GOODBYE

    async def _obey(self, order: msg.Message) -> None:
        match order:
            case msg.LoadModel(model_folder=folder):
                await self._load(Path(folder))
            case WeightsAvailable():
                # The last announcement counts, not the largest version: a learner back from a checkpoint starts lower, elsewhere.
                self._newest = order
                self._weights_news.set()
            case msg.Pause() | msg.Resume():
                self._is_paused = isinstance(order, msg.Pause)
                if self._rollout is not None:
                    await (self._rollout.engine.pause() if self._is_paused else self._rollout.engine.resume())
            case msg.SetPhase():
                await self._reach(order)
            case msg.AbortGroup(group_id=group_id):
                self._aborted.append(group_id)
                if (work := self._work.get(("train", group_id))) is not None:
                    self._abort(work)

    def _abort(self, *groups: GroupWork) -> None:
        """Abort the engine's requests of these groups."""
        if self._rollout is not None:
            for request_id in [request_id_of(work, index) for work in groups for index in work.indices]:
                self._rollout.engine.abort(request_id)

    async def _load(self, folder: Path) -> None:
        if self._rollout is None:
            self._is_loading = True
            engine, codec = await start_engine(self._config, folder, self._clock, self._name)
            self._rollout = Rollout(
                engine,
                codec,
                self._clock,
                self._name,
                send=lambda result: self._connection.send(result, Lane.DATA),
                is_aborted=lambda work: work.purpose == "train" and work.group_id in self._aborted,
            )
            if self._is_paused:
                await engine.pause()
            self._is_ready.set()
            used = self._config.generate.model_folder or folder
            log.info("engine ready with %d slots, model from %s", engine.num_slots, used)
        engine = self._rollout.engine
        self._told_slots = engine.num_slots
        await self._stage.tell(msg.EngineReady(self._name, self._told_slots, engine.version))

    async def _reach(self, order: msg.SetPhase) -> None:
        """Release a shared device, or take it again with the newest weights; then report PhaseReached.

        Raises:
            BroadcastError: The weights are the learner's own, and the learner changed them during the rollout.
        """
        assert self._rollout is not None, f"told to {order.phase} before the model was loaded"
        engine = self._rollout.engine
        async with self._taking:
            before, ended, started_s = getattr(engine, "resident", {}), self._phase, self._clock.now()
            self._phase = order.phase
            if order.phase == "rollout":
                await engine.wake()
                if not await self._take_newest(engine):
                    self._weights_news.set()
                self._idle.stand_still(not engine.has_weights)
            else:
                self._idle.stand_still(True)
                if ended == "rollout":
                    await engine.sleep(self._config.generate.kv)
                    if self._shared is not None:
                        self._shared.check()
            reached = self._reached(order, before, getattr(engine, "resident", {}), started_s, ended)
        await self._stage.tell(reached)

    def _reached(
        self, order: msg.SetPhase, before: Mapping[str, int], after: Mapping[str, int], started_s: float, ended: str
    ) -> msg.PhaseReached:
        """Return what was moved. The engine moves everything at once, so each part's time is estimated from its size."""
        now = self._clock.now()
        changes = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
        total = max(sum(map(abs, changes.values())), 1)
        away: tuple[msg.Residence, msg.Residence] = ("device", "absent")
        moves = tuple(
            msg.ComponentMove(name, *(away if change < 0 else away[::-1]), abs(change), (now - started_s) * abs(change) / total)
            for name, change in changes.items()
            if change
        )
        peak = max(sum(before.values()), sum(after.values()))
        resident = {key: size for key, size in after.items() if size}
        if self._timeline is not None:
            self._timeline.write(
                MemoryLine(self._name, order.phase, order.number, started_s, now, moves, resident, peak, ended_phase=ended)
            )
        return msg.PhaseReached(self._name, order.phase, order.number, moves, resident, peak, now)

    async def _serve_groups(self) -> None:
        await self._is_ready.wait()
        async with asyncio.TaskGroup() as groups:
            async for work, delivery in self._stage.requests(GroupWork):
                groups.create_task(self._serve_group(work, delivery), name=f"group-{work.group_id}")

    async def _serve_group(self, work: GroupWork, delivery: Delivery) -> None:
        assert self._rollout is not None
        key = (work.purpose, work.group_id)
        self._work[key] = work
        try:
            async with self._gate.group():
                with self._idle.running():
                    await self._rollout.run_group(work)
        finally:
            if self._work.get(key) is work:
                del self._work[key]
        delivery.ack()

    async def _follow_weights(self) -> None:
        """Take the newest version whenever there is a newer one."""
        await self._is_ready.wait()
        assert self._rollout is not None
        engine = self._rollout.engine
        again_s = FETCH_AGAIN_S
        while True:
            await self._weights_news.wait()
            self._weights_news.clear()
            async with self._taking:
                is_settled = self._phase != "rollout" or await self._take_newest(engine)
            if is_settled:
                again_s = FETCH_AGAIN_S
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._weights_news.wait()
            self._weights_news.set()  # the newest is news again: no other may ever come
            again_s = min(2 * again_s, LONGEST_FETCH_AGAIN_S)

    async def _fetch(self, available: WeightsAvailable) -> Mapping[str, torch.Tensor]:
        """Return a version's tensors; none where the learner has no model."""
        return await self._fetch_weights(available) if available.manifest.total_bytes else {}

    def _missing(self, engine: Engine) -> WeightsAvailable | None:
        """Return the newest version, if the engine does not have it."""
        newest = self._newest
        return None if newest is None or (newest.version <= engine.version and engine.has_weights) else newest

    async def _take_newest(self, engine: Engine) -> bool:
        """Load the newest version, if the engine does not have it; return False if the same version must be tried again."""
        available = self._missing(engine)
        if available is None:
            return True
        may_wait, before_s = not self._config.generate.in_flight_updates, self._clock.now()
        try:
            tensors = await self._fetch(available)
            fetch_ms = (self._clock.now() - before_s) * 1000
            try:
                async with self._gate.swap(engine):
                    # Running groups may have taken long: meanwhile others were announced, and a lease ended.
                    newest = (may_wait and self._missing(engine)) or available
                    if newest is not available:
                        available, before_s = newest, self._clock.now()
                        tensors = await self._fetch(available)
                        fetch_ms = (self._clock.now() - before_s) * 1000
                    elif may_wait and isinstance(tensors, LentTensors):
                        tensors.check()
                    if available.version < engine.version:  # the learner went back to a checkpoint: begun samples restart
                        self._abort(*self._work.values())
                    swap_ms = await engine.load_weights(available.version, tensors, self._config.generate.kv)
            finally:
                self._idle.stand_still(not engine.has_weights)
                if isinstance(tensors, LentTensors):
                    tensors.release()
        except BroadcastError as error:
            log.warning("version %d was not loaded; the newest will be tried next: %s", available.version, error)
            return False
        self._shared = tensors if isinstance(tensors, LentTensors) and tensors.learner_changes_them else None
        live_s = self._clock.now()
        probe, probe_error = available.probe, -1.0  # where there is nothing to compare
        if probe is not None and self._config.generate.engine.has_model:
            theirs = logprobs_from_bytes(probe.logprobs).tolist()
            ours = await engine.score(ids_from_bytes(probe.token_ids).tolist())
            errors = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
            probe_error = max(errors, default=0.0) if all(map(math.isfinite, errors)) else NOT_FINITE
        await self._stage.tell(VersionLive(available.version, self._name, live_s, fetch_ms, swap_ms, probe_error))
        return True

    def _report(self) -> tuple[str, dict[str, float]]:
        engine = self._rollout.engine if self._rollout is not None else None
        num_slots = engine.num_slots if engine is not None else 0
        is_news = self._is_ready.is_set() and num_slots != self._told_slots
        if is_news and self._connection.try_send(msg.EngineRoom(self._name, num_slots), Lane.CONTROL):
            self._told_slots = num_slots
        waiting_for = ""
        if engine is None:
            waiting_for = "" if self._is_loading else "a model to load"
        elif self._phase != "rollout":
            waiting_for = "the device, which the learner uses"
        elif self._is_paused:
            waiting_for = "resume"
        elif self._idle.is_idle and engine.version >= 0 and not engine.has_weights:
            waiting_for = "a version that comes whole"
        elif self._idle.is_idle and self._work:
            waiting_for = "a weight swap to end"
        elif self._idle.is_idle:
            waiting_for = "weights of version 0" if engine.version < 0 else "a group"
        return waiting_for, {
            "process/tokens_generated": float(self._rollout.num_tokens if self._rollout is not None else 0),
            "process/requests_running": float(engine.num_running if engine is not None else 0),
            "process/slots": float(num_slots),
            "process/version": float(engine.version if engine is not None else -1),
        }


class WeightsGate:
    """Lets either groups run or one weight swap, where `in_flight_updates` is off; with `is_off` it never makes anything wait.

    A waiting swap goes before groups that have not started. After a swap that left incomplete weights, new groups wait until a
    swap succeeds: otherwise the next swap would wait for groups that cannot sample.
    """

    def __init__(self, *, is_off: bool) -> None:
        self._is_off = is_off
        self._changed = asyncio.Condition()
        self._num_groups = 0
        self._swap_wanted = False

    @asynccontextmanager
    async def group(self) -> AsyncIterator[None]:
        """Keep swaps waiting while the group runs; first wait for any swap that is requested, running, or to be tried again."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_off or not self._swap_wanted)
            self._num_groups += 1
        try:
            yield
        finally:
            self._num_groups -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def swap(self, engine: Engine) -> AsyncIterator[None]:
        """Keep new groups waiting during the swap; first wait until the running groups are done."""
        self._swap_wanted = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._is_off or self._num_groups == 0)
            yield
        finally:
            self._swap_wanted = not engine.has_weights
            async with self._changed:
                self._changed.notify_all()
