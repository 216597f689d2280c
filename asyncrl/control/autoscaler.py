"""Decides how many generators a run needs: measures the load, requests more or fewer, and ends those that leave.

Invariants of the rule: the number stays within its bounds; it changes only after `patience` windows in a row with the same
result; it grows by the amount that the learner's idle share indicates, at most to twice the number, and shrinks by one; between
the two thresholds nothing changes; nothing is decided until all generators requested before are there.

A generator that leaves gets no more work. It is told to end when it holds nothing, or after `drain_timeout_s` (its groups are
then handed out again). Only the lifecycle starts processes. Generators that joined from outside are not counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.buffer.events import GeneratorLeaving
from asyncrl.config.run import ElasticConfig, RunConfig
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.join import Membership
from asyncrl.control.lifecycle.events import Event, ProcessUnwanted, ProcessWanted
from asyncrl.control.peers import Peers
from asyncrl.observe.machine import Machine, Value
from asyncrl.schema.control import Shutdown

log = logging.getLogger(__name__)


class Window(Value, frozen=True):
    """Event: a window was measured; the instruction is the new number of generators, if it changes."""

    learner_idle: float
    """Share of the window in which the learner had no step to train."""
    slots_used: float
    """Share of the generators' slots that were in use."""
    num_ready: int


class Told(Value, frozen=True):
    """Event: a user set the number of generators."""

    wanted: int


@dataclass
class ScalingRule(Machine[Window | Told, int]):
    """The decision, with the short memory that makes it stable.

    Without waiting, the learner's step would take `1 - idle` of its current time; so `n / (1 - idle)` generators keep it busy, if
    each new one is as fast as the present ones. A learner that idles while slots are free waits for something other than
    generators: rewards, or the staleness bound.

    Example:
        >>> scaler = ScalingRule(ElasticConfig(max_generators=8, patience=1), wanted=2)
        >>> scaler.handle(Window(learner_idle=0.5, slots_used=1.0, num_ready=2), now=0.0)
        [4]
    """

    name = "scaling"

    config: ElasticConfig
    wanted: int
    _agreed: list[int] = field(default_factory=list)

    def _decide(self, event: Window | Told, _: float) -> list[int]:
        if isinstance(event, Told):
            self.wanted = event.wanted
            return []
        config, fewer, verdict = self.config, self.wanted - 1, 0
        if event.num_ready >= self.wanted:
            if event.learner_idle > config.learner_idle_above and event.slots_used >= config.slots_used_below:
                verdict = int(self.wanted < config.max_generators)
            elif event.slots_used < config.slots_used_below and event.learner_idle <= config.learner_idle_above / 2:
                verdict = -int(fewer >= config.min_generators and event.slots_used * self.wanted < fewer)
        if not verdict or (self._agreed and self._agreed[-1] != verdict):
            self._agreed.clear()
        if verdict:
            self._agreed.append(verdict)
        if len(self._agreed) < config.patience:
            return []
        self._agreed.clear()
        enough = math.ceil(self.wanted / max(1.0 - event.learner_idle, 0.5) - 1e-9)
        self.wanted = fewer if verdict < 0 else min(max(enough, self.wanted + 1), config.max_generators)
        return [self.wanted]


@dataclass(eq=False)
class Autoscaler:
    """Keeps the wanted number of generators in one run."""

    config: RunConfig
    """Without `launch.elastic` the number never changes."""
    dispatcher: Dispatcher
    peers: Peers
    membership: Membership
    post: Callable[[Event], None]
    terminate: Callable[[str], None]
    """Ends a process that has no connection yet."""

    def __post_init__(self) -> None:
        elastic, self._wanted = self.config.launch.elastic, self.config.generate.num_workers
        self.scaler = ScalingRule(elastic, self._wanted) if elastic is not None else None
        self._began_s: float | None = None
        self._looks: list[tuple[bool, float]] = []
        """Measurements of the current window: whether the learner was idle, and the share of slots in use."""
        self.leaving: dict[str, float] = {}

    def tick(self, now: float, *, running: bool, learner_idle: bool) -> None:
        """End generators that have finished leaving; measure once, and decide once a window is full.

        Args:
            now: Clock seconds.
            running: Whether the run is in its phase `running`; other phases are not measured.
            learner_idle: Whether the learner is connected and has no step to train.
        """
        for name, since_s in list(self.leaving.items()):
            leaver = self.peers.get(name)
            if leaver is None or not leaver.num_slots:
                self.terminate(name)
            elif self.dispatcher.holds_nothing(name) or now - since_s > self.config.supervision.drain_timeout_s:
                leaver.tell(Shutdown("the run can do without it"))
            else:
                continue
            del self.leaving[name]
        if self.scaler is None:
            return
        if not running or self._began_s is None:
            self._began_s = now if running else None
            self._looks.clear()
        if not running:
            return
        names, pool = {f"generator-{number}" for number in range(self.scaler.wanted)}, self.dispatcher.state.pool
        known = [peer for peer in self.peers.of("generator") if peer.num_slots and peer.name in names]
        ready = [peer for peer in known if not pool.is_leaving(peer.name)]
        slots = sum(peer.num_slots for peer in ready)
        held = sum(min(pool.members_on(peer.name), peer.num_slots) for peer in ready)
        self._looks.append((learner_idle, held / slots if slots else 0.0))
        if now - (self._began_s or now) >= self.scaler.config.decide_every_s:
            idle, used = (sum(values) / len(self._looks) for values in zip(*self._looks, strict=True))
            self._began_s, before = None, self.scaler.wanted
            for wanted in self.scaler.handle(Window(idle, used, len(ready)), now):
                log.info(
                    "the learner is idle for %.0f %% of the time, generators use %.0f %% of their slots: %d -> %d generators",
                    100 * idle, 100 * used, before, wanted,
                )  # fmt: skip
                self.want(wanted, now)

    def want(self, number: int, now: float) -> None:
        """Set the number of generators; if there are too many, those with the highest numbers leave."""
        for added in range(self._wanted, number):
            self.membership.planned[f"generator-{added}"] = "generator"
            self.post(ProcessWanted(f"generator-{added}", "generator"))
        for spare in range(number, self._wanted):
            self.post(ProcessUnwanted(f"generator-{spare}"))
        self._wanted = number
        if self.scaler is not None:
            self.scaler.handle(Told(number), now)

    def leaves(self, name: str, now: float) -> None:
        """Give a generator no new work, and tell it to end when it holds nothing; groups waiting for its window are sent."""
        self.dispatcher.tell(GeneratorLeaving(name))
        self.leaving[name] = now
