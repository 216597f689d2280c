"""The residency manager: carries plans out, times and logs every move, knows what is where and what the peak of each phase was.

Invariants: a component is moved whole or stays whole where it was. After a move that failed the manager still knows where
everything is, and the next switch plans from there. The phase is noted only once all its needs are met. Used on one thread at a
time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from asyncrl.clock import Clock
from asyncrl.config.run import PlacementConfig
from asyncrl.errors import ResidencyError
from asyncrl.observe.steps import MemoryLine, open_memory
from asyncrl.residency.components import TensorComponent
from asyncrl.residency.device import Device
from asyncrl.residency.plan import GIB, Part, PhaseNeeds, gib, plan_switch
from asyncrl.schema.control import ComponentMove, Phase, PhaseReached

log = logging.getLogger(__name__)

MIB = 1 << 20
OWN_SWITCH = -1
"""The number of a switch that no controller asked for."""


class ResidencyManager:
    """A process's components on one device.

    Example:
        >>> manager = ResidencyManager(placement, run_folder, "learner", components, phases, device, clock)  # doctest: +SKIP
        >>> [(move.component, move.after) for move in manager.switch("rollout", 0).moves]  # doctest: +SKIP
        [('policy', 'host')]
    """

    def __init__(
        self, placement: PlacementConfig, run_folder: Path, process: str, components: Iterable[TensorComponent],
        phases: Iterable[PhaseNeeds], device: Device, clock: Clock,
    ) -> None:  # fmt: skip
        """Take over components, each where it is.

        Args:
            placement: How much of host memory offloaded components may take, and where they go first.
            run_folder: `memory/PROCESS.jsonl` in it gets a line of every switch and of every move within a phase.
            process: As it said at hello.
            components: Moved by nobody else from now on.
            phases: What each declares.
            device: Shared with other processes.
            clock: Times moves.
        """
        self._process = process
        self._components: dict[str, TensorComponent] = {component.name: component for component in components}
        self._phases: Mapping[Phase, PhaseNeeds] = {needs.phase: needs for needs in phases}
        self._device, self._clock, self._timeline = device, clock, open_memory(run_folder, process)
        self._host_bytes, self._offload_to = int(placement.host_memory_gib * GIB) or None, placement.offload_to
        self.phase: Phase | None = None
        """That was reached last; None before the first."""
        self._peak_bytes = 0
        """Since the controller was last told, besides what the device measures."""
        device.reset_peak()

    def close(self) -> None:
        """Close the timeline; what is where stays. Safe to repeat."""
        self._timeline.close()

    @property
    def resident(self) -> dict[str, int]:
        """Return component to bytes on the device."""
        return {one.name: one.num_bytes for one in self._components.values() if one.residence == "device"}

    def switch(self, phase: Phase, number: int = OWN_SWITCH) -> PhaseReached:
        """Bring about what a phase needs.

        Args:
            phase: One of those declared.
            number: Of the controller's switch; the process's own switches, within a phase, have none.

        Returns:
            The answer to the controller: the moves of this switch, what is resident, and the peak since its last one.

        Raises:
            ResidencyError: It cannot be done; everything is whole, some of it moved.
        """
        for component in self._components.values():
            component.look()
        parts = [Part(one.name, one.num_bytes, one.residence) for one in self._components.values()]
        moves = plan_switch(parts, self._phases[phase], self._device.budget_bytes, self._host_bytes, self._offload_to)
        started_s = self._clock.now()
        done: list[ComponentMove] = []
        peak_bytes = max(self._device.peak_bytes, sum(self.resident.values()))
        try:
            for move in moves:
                began_s = self._clock.now()
                self._components[move.component].move(move.after)
                done.append(msgspec.structs.replace(move, seconds=self._clock.now() - began_s))
            if number != OWN_SWITCH and self._phases[phase].gives_back:  # gradients and activations are no components
                self._device.give_back()
        except ResidencyError as error:
            held = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in self.resident.items())
            raise type(error)(f"phase {phase!r} was not reached: {error}; on the device: {held or 'nothing'}") from error
        finally:
            self._peak_bytes = max(self._peak_bytes, peak_bytes)
            if done or number != OWN_SWITCH:
                line = MemoryLine(
                    self._process, phase, number, started_s, self._clock.now(), tuple(done), self.resident, peak_bytes,
                    self.phase or "",
                )  # fmt: skip
                self._timeline.write(line)
                self._device.reset_peak()
                log.info("phase %s: %s", phase, describe(line))
        self.phase = phase
        reached = PhaseReached(self._process, phase, number, tuple(done), self.resident, self._peak_bytes, self._clock.now())
        if number != OWN_SWITCH:
            self._peak_bytes = 0
        return reached

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Let everything be read where it is, to save it, without a byte on the device."""
        with contextlib.ExitStack() as stack:
            for component in self._components.values():
                stack.enter_context(component.readable())
            yield


def describe(line: MemoryLine) -> str:
    """Return a switch in one line."""
    resident = f"{sum(line.resident.values()) / MIB:.1f} MiB on the device"
    if not line.moves:
        return f"nothing to move, {resident}"
    said = ", ".join(f"{move.component} {move.before} to {move.after}" for move in line.moves)
    total = sum(move.num_bytes for move in line.moves)
    return f"{said}: {total / MIB:.1f} MiB in {(line.finished_s - line.started_s) * 1e3:.1f} ms, {resident}"
