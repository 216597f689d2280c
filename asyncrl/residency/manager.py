"""Who moves components: carries plans out, times and logs every move, knows what is where and what the peak of each phase was.

Invariants: a component is moved whole or stays whole where it was; after a move that failed the manager still knows where
everything is, and the next switch plans from there; the phase is noted only once all its needs are met. Used on one thread at a
time (a learner's own). Called by learner/residents.py and whoever else has components.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from asyncrl.clock import Clock
from asyncrl.errors import ResidencyError
from asyncrl.observe.memory import MemoryLine
from asyncrl.residency.component import Component
from asyncrl.residency.device import Device
from asyncrl.residency.plan import Budget, OffloadTo, Part, PhaseNeeds, gib, plan_prefetch, plan_room, plan_switch
from asyncrl.residency.tensors import TensorComponent
from asyncrl.schema.control import ComponentMove, Phase, PhaseReached

log = logging.getLogger(__name__)

Record = Callable[[MemoryLine], None]
MIB = 1 << 20
OWN_SWITCH = -1
"""The number of a switch that no controller asked for."""


class ResidencyManager:
    """A process's components on one device.

    Example:
        >>> import torch
        >>> from asyncrl.clock import SystemClock
        >>> from asyncrl.residency.components import ModuleComponent
        >>> from asyncrl.residency.device import SimulatedDevice
        >>> device = SimulatedDevice()
        >>> policy = ModuleComponent("policy", torch.nn.Linear(4, 4, bias=False), device)
        >>> phases = [PhaseNeeds("rollout", gives_back=True), PhaseNeeds("train", now=("policy",))]
        >>> manager = ResidencyManager("learner", [policy], phases, device, SystemClock())
        >>> [move.after for move in manager.switch("rollout", 0).moves], device.allocated_bytes
        (['host'], 0)
    """

    def __init__(
        self,
        process: str,
        components: Iterable[Component],
        phases: Iterable[PhaseNeeds],
        device: Device,
        clock: Clock,
        *,
        host_bytes: int | None = None,
        offload_to: OffloadTo = "host",
        record: Record | None = None,
    ) -> None:
        """Take over components, each where it is.

        Args:
            process: As it said at hello.
            components: Moved by nobody else from now on.
            phases: What each declares.
            device: Shared with other processes.
            clock: Times moves.
            host_bytes: How much of host memory offloaded components may take; None: no limit.
            offload_to: Where what leaves the device goes first.
            record: Told of every switch and of every move within a phase; None: nobody is.
        """
        self._process = process
        self._components: dict[str, Component] = {component.name: component for component in components}
        self._phases: Mapping[Phase, PhaseNeeds] = {needs.phase: needs for needs in phases}
        self._device, self._clock, self._record = device, clock, record
        self._budget = Budget(device.budget_bytes, host_bytes)
        self._offload_to: OffloadTo = offload_to
        self._phase: Phase | None = None
        self._moved: list[ComponentMove] = []
        """Since the controller was last told."""
        self._peak_bytes = 0
        """Since then, besides what the device measures."""
        device.reset_peak()

    @property
    def phase(self) -> Phase | None:
        """Return the phase that was reached last; None before the first."""
        return self._phase

    @property
    def resident(self) -> dict[str, int]:
        """Return component to bytes on the device."""
        return {part.name: part.num_bytes for part in self._parts() if part.residence == "device"}

    def switch(self, phase: Phase, number: int = OWN_SWITCH) -> PhaseReached:
        """Bring about what a phase needs.

        Args:
            phase: One of those declared.
            number: Of the controller's switch; the process's own switches, within a phase, have none.

        Returns:
            The answer to the controller: all moves since its last switch, what is resident, and the peak of what ended.

        Raises:
            ResidencyError: It cannot be done; everything is whole, some of it moved.
        """
        if phase not in self._phases:
            raise ResidencyError(f"{self._process} knows the phases {', '.join(self._phases)}, not {phase!r}")
        self._look()
        moves = plan_switch(self._parts(), self._phases[phase], self._budget, self._offload_to)
        self._carry_out(moves, phase, number)
        self._phase = phase
        reached = PhaseReached(
            self._process, phase, number, tuple(self._moved), self.resident, self._peak_bytes, self._clock.now()
        )
        if number != OWN_SWITCH:
            self._moved, self._peak_bytes = [], 0
        return reached

    def prefetch(self, phase: Phase) -> None:
        """Bring what a coming phase needs nearer while there is room; cheap where nothing is to be done."""
        needs = self._phases.get(self._phase) if self._phase is not None else None
        if needs is not None:
            moves = plan_prefetch(self._parts(), needs, self._phases[phase], self._budget)
            self._carry_out(moves, needs.phase, OWN_SWITCH)

    def make_room(self, keep: Collection[str]) -> int:
        """Take everything off the device but `keep`, as far as it may leave; return the bytes that left."""
        moves = plan_room(self._parts(), keep, self._budget, self._offload_to)
        self._carry_out(moves, self._phase or "train", OWN_SWITCH)
        self._device.give_back(at_once=True)
        return sum(move.num_bytes for move in moves)

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Let everything be read where it is, to save it, without a byte on the device."""
        with contextlib.ExitStack() as stack:
            for component in self._components.values():
                if isinstance(component, TensorComponent) and component.residence != "absent":
                    stack.enter_context(component.readable())
            yield

    def _look(self) -> None:
        for component in self._components.values():
            component.look()

    def _parts(self) -> list[Part]:
        return [Part(one.name, one.num_bytes, one.residence, one.places) for one in self._components.values()]

    def _carry_out(self, moves: Sequence[ComponentMove], phase: Phase, number: int) -> None:
        """Move one after the other, and say so; a failure is told with what is where."""
        started_s = self._clock.now()
        done: list[ComponentMove] = []
        peak_bytes = max(self._device.peak_bytes, sum(self.resident.values()))
        try:
            done.extend(self._carry_out_one(move) for move in moves)
        except ResidencyError as error:
            held = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in self.resident.items())
            raise type(error)(f"phase {phase!r} was not reached: {error}; on the device: {held or 'nothing'}") from error
        finally:
            self._note(done, phase, number, started_s, peak_bytes)

    def _carry_out_one(self, move: ComponentMove) -> ComponentMove:
        component, started_s = self._components[move.component], self._clock.now()
        component.move(move.after)
        seconds = self._clock.now() - started_s
        return ComponentMove(move.component, move.before, move.after, move.num_bytes, seconds)

    def _note(self, done: Sequence[ComponentMove], phase: Phase, number: int, started_s: float, peak_bytes: int) -> None:
        self._moved += done
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        if not done and number == OWN_SWITCH:
            return
        finished_s, ended = self._clock.now(), self._phase or ""
        line = MemoryLine(self._process, phase, number, started_s, finished_s, tuple(done), self.resident, peak_bytes, ended)
        if self._record is not None:
            self._record(line)
        self._device.reset_peak()
        log.info("phase %s: %s", phase, describe(done, finished_s - started_s, sum(self.resident.values())))


def describe(moves: Sequence[ComponentMove], seconds: float, resident_bytes: int) -> str:
    """Return a switch in one line."""
    if not moves:
        return f"nothing to move, {resident_bytes / MIB:.1f} MiB on the device"
    said = ", ".join(f"{move.component} {move.before} to {move.after}" for move in moves)
    total = sum(move.num_bytes for move in moves)
    return f"{said}: {total / MIB:.1f} MiB in {seconds * 1e3:.1f} ms, {resident_bytes / MIB:.1f} MiB on the device"
