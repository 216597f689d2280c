"""Which request sits in which row, and what each row feeds next: plain bookkeeping, no tensors.

Invariants:
- A row is free or holds one request. Its position is that of the token it feeds next, -1 while it is free.
- A row is a donor of its prompt's keys and values only while `weights_epoch` is the current one and nobody has overwritten it.

Called by generate/slot_decoder.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.generate.engine import EngineRequest, TokenChunk
from asyncrl.schema.samples import FinishReason


@dataclass(slots=True, eq=False)
class InFlight:
    """A request and what has become of it so far."""

    request: EngineRequest
    stop_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    row: int = -1
    """-1 while it waits for a slot."""
    _logprobs: list[float] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.request.prompt_ids, *self.token_ids)

    def add(self, token_id: int, logprob: float, version: int) -> FinishReason | None:
        """Take one more token; return why it was the last one, if it was."""
        self.token_ids.append(token_id)
        self._logprobs.append(logprob)
        self._versions.append(version)
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.sampling.max_new_tokens else None

    def take_chunk(self, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the tokens added since the last chunk, which may be none."""
        num_new = len(self._logprobs)
        chunk = TokenChunk(
            token_ids=tuple(self.token_ids[len(self.token_ids) - num_new :]),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            finish_reason=finish_reason,
        )
        self._logprobs.clear()
        self._versions.clear()
        return chunk

    @property
    def has_news(self) -> bool:
        """Whether tokens were added since the last chunk."""
        return bool(self._logprobs)


@dataclass(frozen=True, slots=True)
class _Donor:
    group_key: str
    prompt_ids: tuple[int, ...]
    weights_epoch: int


class SlotTable:
    """The rows of a batch, of which the first `num_slots` may hold requests."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self.num_slots = num_slots
        self.tokens_R: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.positions_R: NDArray[np.int64] = np.full(num_rows, -1, dtype=np.int64)
        self.ordinals_R: NDArray[np.uint64] = np.zeros(num_rows, dtype=np.uint64)
        """How many tokens of its completion each row has."""
        self._occupants: dict[int, InFlight] = {}
        self._free = list(range(num_slots))
        self._donors: dict[int, _Donor] = {}

    @property
    def occupants(self) -> Sequence[InFlight]:
        """The requests that have a row, in no particular order."""
        return tuple(self._occupants.values())

    @property
    def num_free(self) -> int:
        """Rows that could take a request."""
        return len(self._free)

    def place(self, flight: InFlight, weights_epoch: int, donor_row: int | None = None) -> None:
        """Give the request a row, about to feed its last token: the donor's own if that is free, else the lowest free one."""
        row = self._take_free(donor_row)
        flight.row = row
        self._occupants[row] = flight
        ids = flight.all_ids
        self.tokens_R[row] = ids[-1]
        self.positions_R[row] = len(ids) - 1
        self.ordinals_R[row] = len(flight.token_ids)
        self._donors[row] = _Donor(flight.request.group_key, flight.request.prompt_ids, weights_epoch)

    def _take_free(self, wanted: int | None) -> int:
        if wanted is None or wanted in self._occupants:
            return heapq.heappop(self._free)
        self._free.remove(wanted)
        heapq.heapify(self._free)
        return wanted

    def release(self, flight: InFlight) -> None:
        """Take the request's row back; what it left in the cache may still be donated."""
        del self._occupants[flight.row]
        self.positions_R[flight.row] = -1
        self.tokens_R[flight.row] = 0
        heapq.heappush(self._free, flight.row)
        flight.row = -1

    def advance(self, flight: InFlight, token_id: int) -> None:
        """Feed `token_id` next in the request's row."""
        self.tokens_R[flight.row] = token_id
        self.positions_R[flight.row] += 1
        self.ordinals_R[flight.row] += np.uint64(1)

    def donor_row(self, flight: InFlight, weights_epoch: int) -> int | None:
        """Return a row that holds this prompt's keys and values under the current weights."""
        if not flight.request.group_key:
            return None
        wanted = _Donor(flight.request.group_key, flight.request.prompt_ids, weights_epoch)
        return next((row for row, donor in self._donors.items() if donor == wanted), None)

    def renew_donors(self, weights_epoch: int) -> None:
        """Declare every occupied row computed under `weights_epoch`, after a recompute; free rows are donors no more."""
        self._donors = {
            row: _Donor(flight.request.group_key, flight.request.prompt_ids, weights_epoch)
            for row, flight in self._occupants.items()
        }
