"""A generator's part in the phases of a shared device: its engine sleeps while the learner trains, and wakes with newer weights.

It sleeps at level 2: the weights go with the KV cache, because the next version brings them again, and nothing is sampled before
that is there. What becomes of the keys and values of requests in flight says `generate.kv`, as wherever new weights come in.
Weights that are the learner's own (placement hybrid) stay, and that nobody changed them in a rollout is checked at its end.

Invariants: an answer is given when the memory is given back, or taken and filled; each is also a line of the memory timeline; at
most one order is carried out at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.generate.engine import Engine
from asyncrl.observe.memory import MemoryLine, open_memory
from asyncrl.schema.control import ComponentMove, Phase, PhaseReached, Residence, SetPhase
from asyncrl.weights.lent import LentTensors


class SleepWake:
    """Brings an engine into the phase that is asked for."""

    def __init__(self, config: RunConfig, run_folder: Path, clock: Clock, name: str) -> None:
        """Note where its timeline is written; nothing is where no turns are taken."""
        self._clock, self._name = clock, name
        self._kv = config.generate.kv
        self._lines = open_memory(run_folder, name) if config.placement.takes_turns else None
        self._phase: Phase = "rollout"
        self.is_asleep = False
        self.lacks_weights = False
        """It gave its weights up, and has not been given new ones since."""
        self._shared: LentTensors | None = None

    def took(self, tensors: Mapping[str, object]) -> None:
        """Note what the engine samples with now."""
        self.lacks_weights = False
        self._shared = tensors if isinstance(tensors, LentTensors) and tensors.learner_changes_them else None

    async def sleep(self, engine: Engine, order: SetPhase) -> PhaseReached:
        """Give the device back.

        Raises:
            BroadcastError: The weights are the learner's own, and it has changed them meanwhile.
        """
        before, started_s = _resident(engine), self._clock.now()
        if not self.is_asleep:
            await engine.sleep(2, self._kv)
        if self._shared is not None and not self.is_asleep:
            self._shared.check()
        self.is_asleep = self.lacks_weights = True
        return self._answer(order, before, _resident(engine), started_s)

    async def wake(self, engine: Engine, order: SetPhase, take_weights: Callable[[], Awaitable[None]]) -> PhaseReached:
        """Take the device again, and the newest weights."""
        before, started_s = _resident(engine), self._clock.now()
        await engine.wake()
        self.is_asleep = False
        await take_weights()
        return self._answer(order, before, _resident(engine), started_s)

    def close(self) -> None:
        """Close the timeline."""
        if self._lines is not None:
            self._lines.close()

    def _answer(self, order: SetPhase, before: Mapping[str, int], after: Mapping[str, int], started_s: float) -> PhaseReached:
        """Say what came or went. The engine moves all of it at once, so the time is shared out by size."""
        now = self._clock.now()
        changes = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
        total = max(sum(map(abs, changes.values())), 1)
        away: tuple[Residence, Residence] = ("device", "absent")
        moves = tuple(
            ComponentMove(name, *(away if change < 0 else away[::-1]), abs(change), (now - started_s) * abs(change) / total)
            for name, change in changes.items()
            if change
        )
        peak = max(sum(before.values()), sum(after.values()))
        resident = {key: size for key, size in after.items() if size}
        if self._lines is not None:
            self._lines.write(
                MemoryLine(self._name, order.phase, order.number, started_s, now, moves, resident, peak, ended_phase=self._phase)
            )
        self._phase = order.phase
        return PhaseReached(self._name, order.phase, order.number, moves, resident, peak, now)


def _resident(engine: Engine) -> Mapping[str, int]:
    return dict(getattr(engine, "resident", {}))
