"""How many generators a run wants, from the measured balance of generation and training. Pure.

Invariants: the number stays within its bounds; it changes only after `patience` windows in a row that say the same; it grows by
what the learner's idle share says is missing, at most to twice itself, and shrinks by one; between wanting more and wanting
fewer lies a band in which nothing happens; nothing is decided while the generators that were wanted last are not all there.
Called by control/elastic.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from asyncrl.config.launch import ElasticConfig


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
class Autoscaler:
    """The decision, and the little memory that steadies it.

    Example:
        >>> scaler = Autoscaler(ElasticConfig(max_generators=8, patience=1), wanted=2)
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
