"""Generators that join and leave while the run goes on: measures the balance, asks for more or fewer, sees those off that go.

Owns the window that is being measured and the list of generators that are leaving. Invariants: a generator that leaves gets no
more work and is told to go when it holds none, or after `drain_timeout_s` (what it then holds is handed out again); the lifecycle
alone decides what is started; guests (roster.py) are nobody's to count. Called by control/controller.py on its event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.config.run import RunConfig
from asyncrl.control.autoscale import Autoscaler, Balance
from asyncrl.control.flow import Flow
from asyncrl.control.life_events import Event, ProcessUnwanted, ProcessWanted
from asyncrl.control.peers import Peers
from asyncrl.control.roster import Roster
from asyncrl.schema.control import Shutdown

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Window:
    """Sums over the ticks of the window that is being measured."""

    began_s: float
    ticks: int = 0
    idle: float = 0.0
    used: float = 0.0


class Elastic:
    """The generators of one run, as many as it wants."""

    def __init__(
        self,
        config: RunConfig,
        flow: Flow,
        peers: Peers,
        roster: Roster,
        post: Callable[[Event], None],
        terminate: Callable[[str], None],
    ) -> None:
        """Begin with as many generators as the config says.

        Args:
            config: The run's; without `launch.elastic` the number never changes.
            flow: Who holds what.
            peers: Who is connected.
            roster: Whose names are let in.
            post: Tells the lifecycle.
            terminate: Ends a process that has no connection yet.
        """
        elastic = config.launch.elastic
        self.scaler = Autoscaler(elastic, config.generate.num_workers) if elastic is not None else None
        self._grace_s = config.supervision.drain_timeout_s
        self._flow = flow
        self._peers = peers
        self._roster = roster
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
        held = sum(min(self._flow.admission.members_on(peer.name), peer.num_slots) for peer in ready)
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
        self._flow.generator_leaving(name)
        self._leaving[name] = now

    def gone(self, name: str) -> None:
        """Forget a generator that has ended."""
        self._leaving.pop(name, None)

    def _see_off(self, now: float) -> None:
        for name, since_s in list(self._leaving.items()):
            peer = self._peers.get(name)
            if peer is None or not peer.num_slots:
                self._terminate(name)
            elif self._flow.holds_nothing(name) or now - since_s > self._grace_s:
                peer.tell(Shutdown("the run can do without it"))
            else:
                continue
            del self._leaving[name]
