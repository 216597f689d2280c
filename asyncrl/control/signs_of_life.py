"""Who has been silent for too long: pure bookkeeping of starts and heartbeats.

From its start to its first heartbeat a process has `start_timeout_s` (Python, torch and the model are being loaded); after that
every gap may last `heartbeat_timeout_s`. A process that beats and is not ready yet is not late: preparing may take as long as it
takes (a warm start, say), and the watchdog looks after runs where nothing moves.

Invariant: time during which nobody listened (the controller itself stood still) is not held against anyone.
Called by control/supervisor.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.run import SupervisionConfig
from asyncrl.control.life_events import ProcessSilent, StartTimeout


@dataclass(slots=True)
class _Sign:
    last_s: float
    beaten: bool = False


class SignsOfLife:
    """When each live process was last heard of."""

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._signs: dict[str, _Sign] = {}
        self._last_look_s: float | None = None

    def started(self, name: str, now: float) -> None:
        """Begin to expect something of a new incarnation."""
        self._signs[name] = _Sign(now)

    def beat(self, name: str, now: float) -> None:
        """Note a heartbeat; of processes that nobody started here it is ignored."""
        sign = self._signs.get(name)
        if sign is not None:
            sign.last_s, sign.beaten = now, True

    def gone(self, name: str) -> None:
        """Expect nothing more of it."""
        self._signs.pop(name, None)

    def overdue(self, now: float) -> list[ProcessSilent | StartTimeout]:
        """Return who is late at `now`; call it every `heartbeat_s`."""
        self._forgive(now)
        late: list[ProcessSilent | StartTimeout] = []
        for name, sign in self._signs.items():
            waited_s = now - sign.last_s
            if sign.beaten and waited_s > self._config.heartbeat_timeout_s:
                late.append(ProcessSilent(name, waited_s))
            elif not sign.beaten and waited_s > self._config.start_timeout_s:
                late.append(StartTimeout(name, waited_s))
        return late

    def _forgive(self, now: float) -> None:
        """Move every sign forward by the time we ourselves were away."""
        if self._last_look_s is not None:
            away_s = now - self._last_look_s - self._config.heartbeat_s
            if away_s > 2 * self._config.heartbeat_s:
                for sign in self._signs.values():
                    sign.last_s += away_s
        self._last_look_s = now
