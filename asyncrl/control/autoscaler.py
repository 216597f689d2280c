"""How many generators a run wants: measures the balance, decides, asks for more or fewer, and ends those that leave.

Invariants of the rule: the number stays within its bounds; it changes only after `patience` windows in a row that say the same;
it grows by what the learner's idle share says is missing, at most to twice itself, and shrinks by one; between wanting more and
wanting fewer lies a band in which nothing happens; nothing is decided while the generators that were wanted last are not all
there.

A generator that leaves gets no more work and is told to go when it holds none, or after `drain_timeout_s` (what it then holds is
handed out again). The lifecycle alone decides what is started. Generators that joined by themselves are not counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.config.run import ElasticConfig, RunConfig
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.join import Membership
from asyncrl.control.lifecycle.events import Event, ProcessUnwanted, ProcessWanted
from asyncrl.control.peers import Peers
from asyncrl.schema.control import Shutdown

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Balance:
    """What one window saw."""

    learner_idle: float
    """Share of the time in which the learner had nothing in hand."""
    slots_used: float
    """Share of the generators' slots that were in use."""
    generators: int
    """That are ready."""


@dataclass(slots=True)
class ScalingRule:
    """The decision, and the little memory that steadies it.

    Example:
        >>> scaler = ScalingRule(ElasticConfig(max_generators=8, patience=1), wanted=2)
        >>> scaler.decide(Balance(learner_idle=0.5, slots_used=1.0, generators=2))
        4
    """

    config: ElasticConfig
    wanted: int
    _agreed: list[int] = field(default_factory=list)

    def decide(self, balance: Balance) -> int:
        """Take one window in and return how many generators the run wants from now on.

        The learner's step would take `1 - idle` of the time that it takes now, had it never to wait; so `n / (1 - idle)`
        generators keep it busy, as long as each brings as much as those there are.
        """
        verdict = self._verdict(balance) if balance.generators >= self.wanted else 0
        if not verdict or (self._agreed and self._agreed[-1] != verdict):
            self._agreed.clear()
        if verdict:
            self._agreed.append(verdict)
        if len(self._agreed) >= self.config.patience:
            self._agreed.clear()
            self.wanted = self._changed(verdict, balance)
        return self.wanted

    def _verdict(self, balance: Balance) -> int:
        """Return 1 for more, -1 for fewer, 0 for neither.

        A learner that idles while slots are free waits for something else than generators: rewards, or the staleness bound.
        """
        config = self.config
        if balance.learner_idle > config.learner_idle_above and balance.slots_used >= config.slots_used_below:
            return 1 if self.wanted < config.max_generators else 0
        if balance.slots_used < config.slots_used_below and balance.learner_idle <= config.learner_idle_above / 2:
            return -1 if self._would_do(balance) else 0
        return 0

    def _would_do(self, balance: Balance) -> bool:
        """Return whether one generator fewer leaves its slots room."""
        fewer = self.wanted - 1
        return fewer >= self.config.min_generators and balance.slots_used * self.wanted < fewer

    def _changed(self, verdict: int, balance: Balance) -> int:
        if verdict < 0:
            return self.wanted - 1
        enough = math.ceil(self.wanted / max(1.0 - balance.learner_idle, 0.5) - 1e-9)
        return min(max(enough, self.wanted + 1), self.config.max_generators)


@dataclass(slots=True)
class _Window:
    """Sums over the ticks of the window that is being measured."""

    began_s: float
    ticks: int = 0
    idle: float = 0.0
    used: float = 0.0


class Autoscaler:
    """The generators of one run, as many as it wants."""

    def __init__(
        self,
        config: RunConfig,
        dispatcher: Dispatcher,
        peers: Peers,
        membership: Membership,
        post: Callable[[Event], None],
        terminate: Callable[[str], None],
    ) -> None:
        """Begin with as many generators as the config says.

        Args:
            config: The run's; without `launch.elastic` the number never changes.
            dispatcher: Who holds what.
            peers: Who is connected.
            membership: Whose names are let in.
            post: Tells the lifecycle.
            terminate: Ends a process that has no connection yet.
        """
        elastic = config.launch.elastic
        self.scaler = ScalingRule(elastic, config.generate.num_workers) if elastic is not None else None
        self._grace_s = config.supervision.drain_timeout_s
        self._dispatcher = dispatcher
        self._peers = peers
        self._roster = membership
        self._post = post
        self._terminate = terminate
        self._window: _Window | None = None
        self._wanted = {f"generator-{number}" for number in range(config.generate.num_workers)}
        self._leaving: dict[str, float] = {}

    def tick(self, now: float, *, running: bool, learner_idle: bool) -> None:
        """Take one look; decide once a window is full.

        Args:
            now: Clock seconds.
            running: Whether the run is in its phase `running`; nothing else says anything about the balance.
            learner_idle: Whether the learner is there and has nothing in hand.
        """
        self._see_off(now)
        if self.scaler is None:
            return
        if not running:
            self._window = None
            return
        window = self._window = self._window or _Window(now)
        ready = [peer for peer in self._peers.of("generator") if peer.num_slots and peer.name in self._wanted]
        slots = sum(peer.num_slots for peer in ready)
        held = sum(min(self._dispatcher.state.pool.members_on(peer.name), peer.num_slots) for peer in ready)
        window.ticks += 1
        window.idle += learner_idle
        window.used += held / slots if slots else 0.0
        if now - window.began_s >= self.scaler.config.decide_every_s:
            self._window = None
            self._decide(Balance(window.idle / window.ticks, window.used / window.ticks, len(ready)))

    def _decide(self, balance: Balance) -> None:
        assert self.scaler is not None
        before = self.scaler.wanted
        wanted = self.scaler.decide(balance)
        if wanted != before:
            log.info(
                "the learner is idle for %.0f %% of the time, generators use %.0f %% of their slots: %d -> %d generators",
                100 * balance.learner_idle, 100 * balance.slots_used, before, wanted,
            )  # fmt: skip
        for number in range(before, wanted):
            self._roster.expect(f"generator-{number}", "generator")
            self._post(ProcessWanted(f"generator-{number}", "generator"))
        for number in range(wanted, before):
            self._post(ProcessUnwanted(f"generator-{number}"))
        self._wanted = {f"generator-{number}" for number in range(wanted)}

    def leaves(self, name: str, now: float) -> None:
        """Give a generator nothing more, and tell it to go when it holds nothing."""
        self._dispatcher.generator_leaving(name)
        self._leaving[name] = now

    def gone(self, name: str) -> None:
        """Forget a generator that has ended."""
        self._leaving.pop(name, None)

    def _see_off(self, now: float) -> None:
        for name, since_s in list(self._leaving.items()):
            peer = self._peers.get(name)
            if peer is None or not peer.num_slots:
                self._terminate(name)
            elif self._dispatcher.holds_nothing(name) or now - since_s > self._grace_s:
                peer.tell(Shutdown("the run can do without it"))
            else:
                continue
            del self._leaving[name]
