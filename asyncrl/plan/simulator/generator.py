"""A generator in simulation: sequences decode together, the more the slower, and stand still while weights are swapped.

Progress is counted in decode steps since the start (`work`). A step of n sequences takes
`decode_s + (n - 1) x decode_s_per_sequence` seconds, and a sequence of L tokens that began at work w is done at w + L, whatever
came and went meanwhile: a finish is one entry in a heap, and no token is an event.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass

from asyncrl.buffer.staleness import VersionCounts
from asyncrl.plan.simulator.scenario import Scenario

MOST_MARKS = 8


@dataclass(frozen=True, slots=True)
class Member:
    """One sample to be generated."""

    group_id: int
    index: int
    num_tokens: float


class SimulatedGenerator:
    """State of one generator between two of its events."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        """Begin empty, without weights."""
        self.name = name
        self.version = -1
        self.fetching = -1
        """Version on its way; -1: none."""
        self.announced = -1
        self.life = 0
        """Grows with each death: what was sent to an earlier one never arrives."""
        self.expectation = 0
        """Grows whenever the next finish is reckoned anew: one expected before is void."""
        self.busy_slot_s = 0.0
        """Slots x seconds in which they decoded."""
        self._scenario = scenario
        self._running: list[tuple[float, int, float, Member]] = []
        self._waiting: deque[Member] = deque()
        self._marks: list[tuple[float, int]] = []
        self._num_placed = 0
        self._work = 0.0
        self._at_s = 0.0
        self._held_until_s = 0.0

    @property
    def step_s(self) -> float:
        """Return the seconds of one decode step of the present batch."""
        return self._scenario.decode_s + (len(self._running) - 1) * self._scenario.decode_s_per_sequence

    def go_to(self, now_s: float) -> None:
        """Let time pass, up to which nothing happens here."""
        start_s = max(self._at_s, self._held_until_s)
        if self._running and now_s > start_s:
            self._work += (now_s - start_s) / self.step_s
            self.busy_slot_s += (now_s - start_s) * len(self._running)
        self._at_s = now_s

    def add(self, members: list[Member], prefill_s: float) -> None:
        """Queue samples of one group; call `go_to` first."""
        self._waiting.extend(members)
        self.hold(prefill_s)
        self._fill()

    def hold(self, seconds: float) -> None:
        """Stand still from now on, after whatever holds it already."""
        self._held_until_s = max(self._held_until_s, self._at_s) + seconds

    def set_version(self, version: int) -> None:
        """Sample with other weights from now on; call `go_to` first."""
        self.version = version
        self._marks.append((self._work, version))

    def next_finish_s(self) -> float | None:
        """Return when the next sequence is done if nothing else happens; None where none runs."""
        if not self._running:
            return None
        return max(self._at_s, self._held_until_s) + max(0.0, self._running[0][0] - self._work) * self.step_s

    def take_finished(self) -> list[tuple[Member, VersionCounts]]:
        """Return who is done by now, with the versions of their tokens, and refill; call `go_to` first."""
        done = []
        while self._running and self._running[0][0] <= self._work + 1e-9 * max(1.0, self._work):
            _, _, started, member = heapq.heappop(self._running)
            ended = started + member.num_tokens
            counts: dict[int, int] = {}
            for (since, version), (until, _) in itertools.pairwise([*self._marks, (ended, 0)]):
                tokens = round(min(until, ended) - max(since, started))
                if tokens > 0:
                    counts[version] = counts.get(version, 0) + tokens
            done.append((member, tuple(sorted(counts.items())) or ((self.version, max(1, round(member.num_tokens))),)))
        self._fill()
        if len(self._marks) > MOST_MARKS:  # keep only swaps that a running sequence can have seen
            oldest = min((started for _, _, started, _ in self._running), default=self._work)
            while len(self._marks) > MOST_MARKS and self._marks[1][0] <= oldest:
                self._marks.pop(0)
        return done

    def abort(self, group_id: int) -> int:
        """Stop at a group and return how many members it still had here; call `go_to` first."""
        before = len(self._running) + len(self._waiting)
        self._running = [entry for entry in self._running if entry[3].group_id != group_id]
        heapq.heapify(self._running)
        self._waiting = deque(member for member in self._waiting if member.group_id != group_id)
        num_aborted = before - len(self._running) - len(self._waiting)
        self._fill()
        return num_aborted

    def lose_all(self) -> None:
        """Die: whatever it held is gone."""
        self.life += 1
        self.expectation += 1
        self._running.clear()
        self._waiting.clear()
        self._marks = []
        self.version, self.fetching = -1, -1
        self._held_until_s = 0.0

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._scenario.num_slots:
            member = self._waiting.popleft()
            self._num_placed += 1
            first_token = self._work + self._scenario.sequence_s / self._scenario.decode_s
            heapq.heappush(self._running, (first_token + member.num_tokens, self._num_placed, first_token, member))
