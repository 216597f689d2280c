"""Continuous batching: which request sits in which row, and the decode loop's one step.

A step refills free slots, runs the model once, draws a token a row and sees who is done. Owns every request between submit and
its last token. Synchronous, no threads, no clocks: the thread in engine.py runs it.

Invariants:
- A free slot is refilled before the next step whenever a request waits; requests start in the order they came.
- A prompt's last token is never prefilled but fed by the first step, so that all tokens come from one path.
- Prompt keys and values are shared inside a group only if they were computed under the current weights and nobody has
  overwritten them.
- Where few rows are left, their requests move to the first ones, so that fewer are run.
- A row is free or holds one request. Its position is that of the token it feeds next, -1 while it is free.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, SleepLevel, TokenChunk
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.sampling import SamplingBatch, SamplingRows, sample
from asyncrl.schema.samples import FinishReason
from asyncrl.weights.tensors import ArrivingTensors, MappedTensors


@dataclass(slots=True, eq=False)
class InFlight:
    """A request, and its row once it has one; what it has generated lies in the row."""

    request: EngineRequest
    stop_ids: frozenset[int]
    row: int = -1
    """-1 while it waits for a slot."""


_Donor = tuple[str, tuple[int, ...], int]
"""Group key, prompt and weights epoch of keys and values that may be shared."""


class SlotTable:
    """The rows of a batch, of which the first `num_slots` may hold requests: what each feeds, and what it has generated."""

    def __init__(self, num_slots: int, num_rows: int, max_tokens: int) -> None:
        self.tokens_R: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.positions_R: NDArray[np.int64] = np.full(num_rows, -1, dtype=np.int64)
        self.ordinals_R: NDArray[np.uint64] = np.zeros(num_rows, dtype=np.uint64)
        """How many tokens of its completion each row has."""
        self.sampling = SamplingRows(num_rows)
        self._ids_RT: NDArray[np.int32] = np.zeros((num_rows, max_tokens), dtype=np.int32)
        self._logprobs_RT: NDArray[np.float32] = np.zeros((num_rows, max_tokens), dtype=np.float32)
        self._versions_RT: NDArray[np.int32] = np.zeros((num_rows, max_tokens), dtype=np.int32)
        self._told_R: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self._most_R: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self._stops_RS: NDArray[np.int64] = np.full((num_rows, 1), -1, dtype=np.int64)
        self._occupants: dict[int, InFlight] = {}
        self._free = list(range(num_slots))
        self._donors: dict[int, _Donor] = {}
        self._rows_of: dict[_Donor, int] = {}

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
        if donor_row is None or donor_row in self._occupants:
            row = heapq.heappop(self._free)
        else:
            row = donor_row
            self._free.remove(row)
            heapq.heapify(self._free)
        request, stops = flight.request, sorted(flight.stop_ids)
        flight.row = row
        self._occupants[row] = flight
        self.tokens_R[row], self.positions_R[row] = request.prompt_ids[-1], len(request.prompt_ids) - 1
        self.ordinals_R[row] = self._told_R[row] = 0
        self._most_R[row] = request.sampling.max_new_tokens
        if len(stops) > self._stops_RS.shape[1]:
            self._stops_RS = np.pad(self._stops_RS, ((0, 0), (0, len(stops) - self._stops_RS.shape[1])), constant_values=-1)
        self._stops_RS[row] = -1
        self._stops_RS[row, : len(stops)] = stops
        self.sampling.set(row, request.sampling, request.seed)
        self._donate(row, (request.group_key, request.prompt_ids, weights_epoch))

    def release(self, flight: InFlight) -> None:
        """Take the request's row back; what it left in the cache may still be donated."""
        row = flight.row
        del self._occupants[row]
        self.positions_R[row], self.tokens_R[row] = -1, 0
        self.sampling.clear(row)
        heapq.heappush(self._free, row)
        flight.row = -1

    def advance(self, tokens_R: NDArray[np.int64], logprobs_R: NDArray[np.float32], version: int) -> Sequence[_Ended]:
        """Give every occupied row its next token, which it feeds next; return those that are done, with the reason.

        A logprob that is not finite ends its row without the token.
        """
        rows = np.flatnonzero(self.positions_R >= 0)
        tokens, logprobs, at = tokens_R[rows], logprobs_R[rows], self.ordinals_R[rows].astype(np.int64)
        self._ids_RT[rows, at], self._logprobs_RT[rows, at], self._versions_RT[rows, at] = tokens, logprobs, version
        self.tokens_R[rows] = tokens
        self.positions_R[rows] += 1
        is_broken = ~np.isfinite(logprobs)
        self.ordinals_R[rows] += (~is_broken).astype(np.uint64)
        is_stopped = (tokens[:, None] == self._stops_RS[rows]).any(axis=1)
        is_over = is_broken | is_stopped | (at + 1 >= self._most_R[rows])
        ended = []
        for place in np.flatnonzero(is_over).tolist():
            reason: FinishReason | None = None if is_broken[place] else "stop" if is_stopped[place] else "length"
            ended.append((self._occupants[int(rows[place])], reason))
        return ended

    def move_below(self, limit: int) -> list[tuple[int, int, int]]:
        """Move the requests of rows from `limit` on to free ones below it.

        Returns:
            Source row, target row, and how many places of the cache are to be copied.
        """
        moves = []
        for source in [row for row in self._occupants if row >= limit]:
            target, flight = heapq.heappop(self._free), self._occupants.pop(source)
            assert target < limit, f"there are {len(self._occupants) + 1} requests for {limit} rows"
            heapq.heappush(self._free, source)
            flight.row, self._occupants[target] = target, flight
            moves.append((source, target, int(self.positions_R[source])))
            own: NDArray[Any]
            for own in (
                self.tokens_R, self.positions_R, self.ordinals_R, self._told_R, self._most_R,
                self._ids_RT, self._logprobs_RT, self._versions_RT, self._stops_RS,
            ):  # fmt: skip
                own[target] = own[source]
            self.positions_R[source], self.tokens_R[source] = -1, 0
            self.sampling.move(source, target)
            self._donate(target, self._donors[source])
        return moves

    def take_chunk(self, flight: InFlight, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the tokens of its completion since the last chunk, which may be none."""
        if flight.row < 0:
            return TokenChunk((), (), (), finish_reason)
        row, start, end = flight.row, int(self._told_R[flight.row]), int(self.ordinals_R[flight.row])
        self._told_R[row] = end
        ids, logprobs, versions = (a[row, start:end].tolist() for a in (self._ids_RT, self._logprobs_RT, self._versions_RT))
        return TokenChunk(tuple(ids), tuple(logprobs), tuple(versions), finish_reason)

    def untold(self, least_tokens: int) -> Sequence[InFlight]:
        """Return the requests with at least so many tokens since the last chunk."""
        are_untold_R = (self.positions_R >= 0) & (self.ordinals_R.astype(np.int64) - self._told_R >= least_tokens)
        return [self._occupants[row] for row in np.flatnonzero(are_untold_R).tolist()]

    def fed_ids(self, flight: InFlight) -> tuple[int, ...]:
        """Return prompt and completion so far but for the last token, which is fed next."""
        completion = self._ids_RT[flight.row, : int(self.ordinals_R[flight.row])].tolist()
        return (*flight.request.prompt_ids, *completion)[:-1]

    def donor_row(self, flight: InFlight, weights_epoch: int) -> int | None:
        """Return a row that holds this prompt's keys and values under the current weights."""
        key = flight.request.group_key
        return self._rows_of.get((key, flight.request.prompt_ids, weights_epoch)) if key else None

    def renew_donors(self, weights_epoch: int) -> None:
        """Declare every occupied row computed under `weights_epoch`, after a recompute; free rows are donors no more."""
        self._donors.clear()
        self._rows_of.clear()
        for row, flight in self._occupants.items():
            self._donate(row, (flight.request.group_key, flight.request.prompt_ids, weights_epoch))

    def _donate(self, row: int, donor: _Donor) -> None:
        before = self._donors.get(row)
        if before is not None and self._rows_of.get(before) == row:
            del self._rows_of[before]
        self._donors[row] = donor
        self._rows_of.setdefault(donor, row)


_Ended = tuple[InFlight, "FinishReason | None"]
"""A request and why it is over; None where the model's numbers were not finite."""


@dataclass(frozen=True, slots=True)
class Emission:
    """News of one request."""

    request_id: str
    news: TokenChunk | GenerationError

    @property
    def is_last(self) -> bool:
        """Whether the request is over with this."""
        return isinstance(self.news, GenerationError) or self.news.finish_reason is not None


class SlotDecoder:
    """Continuous batching over a `SlotModel`.

    Example:
        >>> decoder = SlotDecoder(model, num_slots=32)      # doctest: +SKIP
        >>> decoder.submit(InFlight(request, frozenset()))  # doctest: +SKIP
        >>> while decoder.has_work:                         # doctest: +SKIP
        ...     finished = decoder.step()
    """

    def __init__(self, model: SlotModel, num_slots: int) -> None:
        self._model = model
        self._slots = SlotTable(num_slots, model.num_rows, model.max_tokens)
        self._waiting: deque[InFlight] = deque()
        self._by_id: dict[str, InFlight] = {}
        self._sampling: SamplingBatch | None = None
        self._epoch = 0
        self.version = -1
        self._is_torn = False
        """The last load was overtaken half-way, or sleep gave the weights up: no step until a load succeeds."""
        self._is_asleep = False
        self._has_kv = True
        """Running requests' keys and values are in the cache."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._by_id)

    @property
    def can_step(self) -> bool:
        """Whether there are weights to sample with, and memory to do it in."""
        return not self._is_torn and not self._is_asleep

    @property
    def resident(self) -> dict[str, int]:
        """Bytes of weights and KV cache, as far as they are on the device now."""
        return self._model.resident

    def submit(self, flight: InFlight) -> None:
        """Queue a request."""
        self._by_id[flight.request.request_id] = flight
        self._waiting.append(flight)

    def abort(self, request_id: str) -> list[Emission]:
        """End a request, if it is still there, with the tokens it has."""
        flight = self._by_id.get(request_id)
        if flight is None:
            return []
        if flight.row < 0:
            self._waiting.remove(flight)
        return [self._finish(flight, self._slots.take_chunk(flight, "abort"))]

    def abort_all(self) -> list[Emission]:
        """End every request."""
        return [emission for request_id in list(self._by_id) for emission in self.abort(request_id)]

    def step(self) -> list[Emission]:
        """Refill the slots and generate one token in each; return the requests that ended."""
        self._refill()
        slots, model = self._slots, self._model
        rows = np.flatnonzero(slots.positions_R >= 0)
        if not len(rows):
            return []
        num_rows, enough = model.rows_for(int(rows[-1]) + 1), model.rows_for(min(len(rows) + len(rows) // 8, model.num_rows))
        if enough < num_rows:
            model.cache.copy_rows(slots.move_below(enough))
            num_rows, self._sampling = enough, None
        if self._sampling is None or len(self._sampling.seeds_R) != num_rows:
            self._sampling = slots.sampling.on(model.device, num_rows)
        logits_RV = model.decode(slots.tokens_R[:num_rows], slots.positions_R[:num_rows])
        tokens_R, logprobs_R = sample(logits_RV, self._sampling, slots.ordinals_R[:num_rows])
        news = []
        for flight, reason in slots.advance(tokens_R, logprobs_R, self.version):
            if reason is None:
                after = f"under version {self.version}, after {slots.ordinals_R[flight.row]} tokens"
                news.append(self._finish(flight, GenerationError(f"the model gave non-finite logits {after}")))
            else:
                news.append(self._finish(flight, slots.take_chunk(flight, reason)))
        return news

    def chunks(self, least_tokens: int = 1) -> list[Emission]:
        """Return what running requests generated since they were last asked, if it is that much."""
        slots = self._slots
        return [Emission(flight.request.request_id, slots.take_chunk(flight)) for flight in slots.untold(least_tokens)]

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], kv: KVPolicy) -> None:
        """Go on with other weights; raises as `Engine.load_weights`."""
        self._refuse_asleep("load weights")
        was_torn, self._is_torn = self._is_torn, True
        try:
            self._model.load_weights(tensors)
        except GenerationError:  # refused before anything was touched
            self._is_torn = was_torn
            raise
        if isinstance(tensors, MappedTensors):
            tensors.check()
        self._take_up(version, kv)

    def load_arriving(self, version: int, arriving: ArrivingTensors, kv: KVPolicy) -> None:
        """Go on with weights that come one by one; nothing is sampled with half of them. Raises as `Engine.load_weights`."""
        self._refuse_asleep("load weights")
        self._model.weights.refuse_misfit({entry.name: entry.shape for entry in arriving.manifest.entries})
        self._is_torn = True
        self._model.weights.load_arriving(arriving)
        self._take_up(version, kv)

    def _take_up(self, version: int, kv: KVPolicy) -> None:
        """Sample with what was loaded from now on."""
        self._is_torn = False
        self.version = version
        self._epoch += 1
        if kv == "recompute" or not self._has_kv:
            self._recompute()

    def sleep(self, level: SleepLevel, kv: KVPolicy) -> None:
        """Give memory back; nothing steps until `wake`, after level 2 until weights are loaded too."""
        self._has_kv = self._has_kv and kv == "keep"
        self._model.sleep(level, max(int(self._slots.positions_R.max()), 0) if self._has_kv else 0)
        self._is_asleep = True
        self._is_torn |= level == 2

    def wake(self) -> None:
        """Take the memory again; where the weights are still there, requests go on."""
        if not self._is_asleep:
            return
        self._model.wake()
        self._is_asleep = False
        self._epoch += 1
        if not (self._is_torn or self._has_kv):
            self._recompute()

    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Return the logprob of each token after the first under the current weights, temperature 1."""
        self._refuse_asleep("score")
        if self._is_torn:
            raise GenerationError("cannot score: the engine has no whole weights; load some first")
        return self._model.score(token_ids)

    def _refuse_asleep(self, what: str) -> None:
        if self._is_asleep:
            raise GenerationError(f"cannot {what}: the engine is asleep; wake it first")

    def _recompute(self) -> None:
        """Compute running requests' keys and values under the current weights."""
        self._model.prefill((flight.row, self._slots.fed_ids(flight)) for flight in self._slots.occupants)
        self._slots.renew_donors(self._epoch)
        self._has_kv = True

    def _finish(self, flight: InFlight, news: TokenChunk | GenerationError) -> Emission:
        if flight.row >= 0:
            self._slots.release(flight)
            self._sampling = None
        del self._by_id[flight.request.request_id]
        return Emission(flight.request.request_id, news)

    def _refill(self) -> None:
        """Place waiting requests; prefill each distinct prompt once and copy it to the others of its group."""
        if not self._waiting or not self._slots.num_free:
            return
        to_prefill: list[InFlight] = []
        copies: list[tuple[int, int, int]] = []
        while self._waiting and self._slots.num_free:
            flight = self._waiting.popleft()
            source = self._slots.donor_row(flight, self._epoch)
            self._slots.place(flight, self._epoch, source)
            if source is None:
                to_prefill.append(flight)
            elif source != flight.row:
                copies.append((source, flight.row, len(flight.request.prompt_ids) - 1))
        self._model.prefill((flight.row, flight.request.prompt_ids[:-1]) for flight in to_prefill)
        self._model.cache.copy_rows(copies)
        self._sampling = None
