"""Continuous batching: which request sits in which row, and the decode loop's one step.

A step refills free slots, runs the model once, draws a token a row and sees who is done. Owns every request between submit and
its last token. Synchronous, no threads, no clocks: the thread in engine.py runs it.

Invariants:
- A free slot is refilled before the next step whenever a request waits; requests start in the order they came.
- A prompt's last token is never prefilled but fed by the first step, so that all tokens come from one path.
- Prompt keys and values are shared inside a group only if they were computed under the current weights and nobody has
  overwritten them.
- A row is free or holds one request. Its position is that of the token it feeds next, -1 while it is free.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, SleepLevel, TokenChunk
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.generate.transformers.sampling import SamplingBatch, sample, sampling_batch
from asyncrl.schema.samples import FinishReason, SamplingParams
from asyncrl.weights.tensors import ArrivingTensors, MappedTensors

_IDLE = SamplingParams(max_new_tokens=1)


@dataclass(slots=True, eq=False)
class InFlight:
    """A request and what has become of it so far."""

    request: EngineRequest
    stop_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    row: int = -1
    """-1 while it waits for a slot."""
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens added since the last chunk; so are `versions`."""
    versions: list[int] = field(default_factory=list)

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.request.prompt_ids, *self.token_ids)

    def add(self, token_id: int, logprob: float, version: int) -> FinishReason | None:
        """Take one more token; return why it was the last one, if it was."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.sampling.max_new_tokens else None

    def take_chunk(self, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the tokens added since the last chunk, which may be none."""
        num_new = len(self.logprobs)
        chunk = TokenChunk(
            token_ids=tuple(self.token_ids[len(self.token_ids) - num_new :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=finish_reason,
        )
        self.logprobs.clear()
        self.versions.clear()
        return chunk


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
        if donor_row is None or donor_row in self._occupants:
            row = heapq.heappop(self._free)
        else:
            row = donor_row
            self._free.remove(row)
            heapq.heapify(self._free)
        flight.row = row
        self._occupants[row] = flight
        ids = flight.all_ids
        self.tokens_R[row] = ids[-1]
        self.positions_R[row] = len(ids) - 1
        self.ordinals_R[row] = len(flight.token_ids)
        self._donors[row] = _Donor(flight.request.group_key, flight.request.prompt_ids, weights_epoch)

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
        self._slots = SlotTable(num_slots, model.num_rows)
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
        return [self._finish(flight, flight.take_chunk("abort"))]

    def abort_all(self) -> list[Emission]:
        """End every request."""
        return [emission for request_id in list(self._by_id) for emission in self.abort(request_id)]

    def step(self) -> list[Emission]:
        """Refill the slots and generate one token in each; return the requests that ended."""
        self._refill()
        flights = self._slots.occupants
        if not flights:
            return []
        logits_RV = self._model.decode(self._slots.tokens_R, self._slots.positions_R)
        if self._sampling is None:
            params, seeds = [_IDLE] * self._model.num_rows, [0] * self._model.num_rows
            for flight in flights:
                params[flight.row], seeds[flight.row] = flight.request.sampling, flight.request.seed
            self._sampling = sampling_batch(params, seeds, self._model.device)
        tokens_R, logprobs_R = sample(logits_RV, self._sampling, self._slots.ordinals_R)
        ended = []
        for flight in flights:
            token_id, logprob = tokens_R[flight.row], logprobs_R[flight.row]
            if not math.isfinite(logprob):
                reason = f"the model gave non-finite logits under version {self.version}, after {len(flight.token_ids)} tokens"
                ended.append(self._finish(flight, GenerationError(reason)))
            elif (finish_reason := flight.add(token_id, logprob, self.version)) is not None:
                ended.append(self._finish(flight, flight.take_chunk(finish_reason)))
            else:
                self._slots.advance(flight, token_id)
        return ended

    def chunks(self) -> list[Emission]:
        """Return what running requests generated since they were last asked."""
        return [Emission(f.request.request_id, f.take_chunk()) for f in self._slots.occupants if f.logprobs]

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
        self._model.prefill((flight.row, flight.all_ids[:-1]) for flight in self._slots.occupants)
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
        to_copy: dict[int, list[InFlight]] = {}
        while self._waiting and self._slots.num_free:
            flight = self._waiting.popleft()
            source = self._slots.donor_row(flight, self._epoch)
            self._slots.place(flight, self._epoch, source)
            if source is None:
                to_prefill.append(flight)
            elif source != flight.row:
                to_copy.setdefault(source, []).append(flight)
        self._model.prefill((flight.row, flight.request.prompt_ids[:-1]) for flight in to_prefill)
        for source, flights in to_copy.items():
            self._model.cache.copy_row(source, [f.row for f in flights], len(flights[0].request.prompt_ids) - 1)
        self._sampling = None
