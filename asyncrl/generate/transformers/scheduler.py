"""Continuous batching: assigns requests to rows, and runs one step of the decode loop.

A step refills free slots, runs the model once, draws one token per row and finds the finished requests. Owns every request
between submit and its last token. Synchronous, no threads, no clocks: the thread in engine.py runs it.

Invariants of drawing a token:
- Its logprob is that of the final distribution: divided by the temperature, filtered, renormalised.
- A token of probability 0 is never drawn. Temperature 0 is greedy, with logprob 0.
- Row r of the result depends only on row r of the inputs and on (seed, position); every operation works on each row alone.

Invariants of the rows:
- A free slot is refilled before the next step if a request waits; requests start in order of arrival.
- A prompt's last token is never prefilled but fed by the first step, so that one code path samples all tokens.
- Keys and values are shared only if a prefill of the prompt alone computed them under the current weights, and they were not
  overwritten: the whole prompt inside a group, and among all prompts the whole pieces (`SlotModel.piece_tokens`) of a common
  prefix. Sharing changes no bit.
- If few rows are in use, their requests move to the first rows, so that fewer rows are run.
- A row is free or holds one request. Its position is that of the token it feeds next, -1 while it is free.

R rows, V vocabulary, T tokens.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, TokenChunk, check_awake, uniforms
from asyncrl.generate.transformers.model import SlotModel
from asyncrl.schema.samples import FinishReason
from asyncrl.weights.tensors import ArrivingTensors, MappedTensors

DRAW_FIELDS: Final = [("seed", np.uint64), ("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64)]
"""Sampling fields of a row. Temperature 1, top_p 1 and top_k 0 mean no change of the distribution."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of R rows as tensors, at one step."""

    seeds_R: NDArray[np.uint64]  # noqa: N815
    temperatures_R1: torch.Tensor  # noqa: N815
    """float32; 1 for a greedy row."""
    greedy_R: torch.Tensor  # noqa: N815
    any_greedy: bool
    all_unscaled: bool
    """Every temperature is 1, so the division can be skipped."""
    top_k_rows: torch.Tensor
    """int64 [K], the rows with a top-k filter."""
    top_k: tuple[int, ...]
    top_p_rows: torch.Tensor
    """int64 [P], the rows with a top-p filter."""
    top_p_P1: torch.Tensor  # noqa: N815

    @classmethod
    def of(cls, rows_R: NDArray[Any], device: torch.device | str = "cpu") -> SamplingBatch:
        """Copy the fields `DRAW_FIELDS` of a structured array."""
        greedy_R = rows_R["temperature"] == 0
        scales_R = np.where(greedy_R, np.float32(1), rows_R["temperature"])
        k_rows, p_rows = np.flatnonzero(rows_R["top_k"]), np.flatnonzero(rows_R["top_p"] < 1)
        return cls(
            seeds_R=rows_R["seed"].copy(),
            temperatures_R1=torch.from_numpy(scales_R).to(device).unsqueeze(1),
            greedy_R=torch.from_numpy(greedy_R).to(device),
            any_greedy=bool(greedy_R.any()),
            all_unscaled=bool((scales_R == 1).all()),
            top_k_rows=torch.from_numpy(k_rows).to(device),
            top_k=tuple(rows_R["top_k"][k_rows].tolist()),
            top_p_rows=torch.from_numpy(p_rows).to(device),
            top_p_P1=torch.from_numpy(rows_R["top_p"][p_rows]).to(device).unsqueeze(1),
        )


def sample(
    logits_RV: torch.Tensor, batch: SamplingBatch, positions_R: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token per row.

    Args:
        logits_RV: Any float dtype; not modified.
        batch: The rows' sampling parameters and seeds.
        positions_R: Index of the token in its request's completion.

    Returns:
        Token ids and behaviour logprobs [R]. A row of non-finite logits gives a non-finite logprob. Ties at the top-k threshold
        are all kept.
    """
    scores_RV = logits_RV.float()
    if not batch.all_unscaled:
        scores_RV = scores_RV / batch.temperatures_R1
    if len(batch.top_k) or len(batch.top_p_rows):
        scores_RV = scores_RV.clone()
    if len(batch.top_k):
        scores_KV, vocabulary = scores_RV[batch.top_k_rows], scores_RV.shape[-1]
        ranks = torch.tensor([min(k, vocabulary) - 1 for k in batch.top_k], device=scores_KV.device).unsqueeze(1)
        largest = scores_KV.topk(min(max(batch.top_k), vocabulary), dim=-1).values
        scores_RV[batch.top_k_rows] = scores_KV.masked_fill(scores_KV < largest.gather(1, ranks), -torch.inf)
    if len(batch.top_p_rows):
        # Keep the smallest set of most likely tokens whose mass reaches top_p, at least one.
        scores_PV = scores_RV[batch.top_p_rows]
        ascending, order = scores_PV.sort(dim=-1)
        cut = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - batch.top_p_P1
        cut[:, -1] = False
        scores_RV[batch.top_p_rows] = scores_PV.masked_fill(cut.scatter(1, order, cut), -torch.inf)
    logprobs_RV = torch.log_softmax(scores_RV, dim=-1)
    draws_R1 = torch.from_numpy(uniforms(batch.seeds_R, positions_R)).to(logprobs_RV.device).unsqueeze(1)
    cumulative_RV = logprobs_RV.exp().cumsum(dim=-1, dtype=torch.float64)
    targets_R1 = draws_R1 * cumulative_RV[:, -1:]
    tokens_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True).clamp_(max=logprobs_RV.shape[-1] - 1)
    chosen_R = logprobs_RV.gather(1, tokens_R1).squeeze(1)
    if batch.any_greedy:
        best_R, at_R = logprobs_RV.max(dim=-1)
        tokens_R1 = torch.where(batch.greedy_R, at_R, tokens_R1.squeeze(1)).unsqueeze(1)
        chosen_R = torch.where(batch.greedy_R, best_R - best_R, chosen_R)
    return tokens_R1.squeeze(1).cpu().numpy(), chosen_R.cpu().numpy()


_ROW = np.dtype([
    ("token", np.int64), ("position", np.int64), ("ordinal", np.int64), ("told", np.int64), ("most", np.int64), *DRAW_FIELDS
])  # fmt: skip
"""A row: its next token and position; how many tokens its completion has, has sent and may have; its sampling fields."""
_FREE = np.array((0, -1, 0, 0, 0, 0, 1.0, 1.0, 0), dtype=_ROW)


@dataclass(slots=True, eq=False)
class InFlight:
    """A request and its row, if assigned; the row has the generated tokens."""

    request: EngineRequest
    stop_ids: frozenset[int]
    row: int = -1
    """-1 while it waits for a slot."""


_Prompt = tuple[str, tuple[int, ...]]
"""Group key and prompt of shareable keys and values."""
News = tuple[str, TokenChunk | GenerationError]
"""A request's id, and its chunk or error."""


class SlotDecoder:
    """Continuous batching over the first `num_slots` rows of a `SlotModel`.

    Example:
        >>> decoder = SlotDecoder(model, num_slots=32)      # doctest: +SKIP
        >>> decoder.submit(InFlight(request, frozenset()))  # doctest: +SKIP
        >>> while decoder.has_work:                         # doctest: +SKIP
        ...     finished = decoder.step()
    """

    def __init__(self, model: SlotModel, num_slots: int) -> None:
        self.model = model
        self.version = -1
        shape = (model.num_rows, model.max_tokens)
        self._rows_R: NDArray[Any] = np.full(model.num_rows, _FREE, dtype=_ROW)
        self._ids_RT: NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self._logprobs_RT: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)
        self._versions_RT: NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self._stops_S: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """All end tokens of the requests so far."""
        self._waiting: deque[InFlight] = deque()
        self._occupants: dict[int, InFlight] = {}
        self._free = list(range(num_slots))
        self._prompts: dict[int, _Prompt] = {}
        """The prompt whose keys and values each row holds, if computed under the current weights."""
        self._prefixes: dict[bytes, int] = {}
        """By digest: the row that begins with these whole pieces, computed under the current weights."""
        self._sampling: SamplingBatch | None = None
        self.is_torn = False
        """The last load broke off, or sleep freed the weights: no step until a load succeeds."""
        self._is_asleep = False
        self._has_kv = True
        """Whether the cache has the running requests' keys and values."""

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, and weights and memory are available."""
        return bool(self._occupants or self._waiting) and not (self.is_torn or self._is_asleep)

    def submit(self, flight: InFlight) -> None:
        """Queue a request."""
        self._waiting.append(flight)

    def abort(self, request_id: str | None = None) -> list[News]:
        """End an unfinished request with its tokens so far; without an id, end every request."""
        held = (*self._occupants.values(), *self._waiting)
        asked = held if request_id is None else [flight for flight in held if flight.request.request_id == request_id]
        return [
            self._finish(flight, self._take_chunk(flight, "abort") if flight.row >= 0 else TokenChunk((), (), (), "abort"))
            for flight in asked
        ]

    def step(self) -> list[News]:
        """Refill the slots and generate one token in each; return the requests that ended.

        A logprob that is not finite ends its request without the token; its keys and values are cleared.
        """
        self._refill()
        rows_R, model = self._rows_R, self.model
        if not self._occupants:
            return []
        num_running, num_rows = len(self._occupants), model.rows_for(max(self._occupants) + 1)
        enough = model.rows_for(min(num_running + num_running // 8, model.num_rows))
        if enough < num_rows:
            self._move_below(enough)
            num_rows, self._sampling = enough, None
        if self._sampling is None or len(self._sampling.seeds_R) != num_rows:
            self._sampling = SamplingBatch.of(rows_R[:num_rows], model.device)
        logits_RV = model.decode(rows_R["token"][:num_rows], rows_R["position"][:num_rows])
        drawn_R, logprobs_R = sample(logits_RV, self._sampling, rows_R["ordinal"][:num_rows].astype(np.uint64))
        running = np.flatnonzero(rows_R["position"] >= 0)
        tokens, logprobs, at = drawn_R[running], logprobs_R[running], rows_R["ordinal"][running]
        self._ids_RT[running, at], self._logprobs_RT[running, at], self._versions_RT[running, at] = tokens, logprobs, self.version
        is_broken = ~np.isfinite(logprobs)
        is_full = at + 1 >= rows_R["most"][running]
        rows_R["token"][running] = tokens
        rows_R["position"][running] += 1
        rows_R["ordinal"][running] += ~is_broken
        ended = []
        for place in np.flatnonzero(is_broken | is_full | (tokens[:, None] == self._stops_S).any(axis=1)).tolist():
            flight = self._occupants[int(running[place])]
            if is_broken[place]:
                why = f"the model gave non-finite logits under version {self.version}, after {at[place]} tokens"
                ended.append(self._finish(flight, GenerationError(why)))
            elif int(tokens[place]) in flight.stop_ids:
                ended.append(self._finish(flight, self._take_chunk(flight, "stop")))
            elif is_full[place]:
                ended.append(self._finish(flight, self._take_chunk(flight, "length")))
        if is_broken.any():
            # Attention multiplies a masked place by 0, and 0 times NaN is NaN. Idle rows ran with the same weights.
            free = np.flatnonzero(rows_R["position"] < 0).tolist()
            for row in free:
                self._forget_prompt(row)
            model.cache.clear_rows(free)
        return ended

    def chunks(self, least_tokens: int = 1) -> list[News]:
        """Return the tokens of running requests since their last chunk, if there are at least `least_tokens`."""
        is_untold_R = (self._rows_R["position"] >= 0) & (self._rows_R["ordinal"] - self._rows_R["told"] >= least_tokens)
        flights = [self._occupants[row] for row in np.flatnonzero(is_untold_R).tolist()]
        return [(flight.request.request_id, self._take_chunk(flight)) for flight in flights]

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor] | ArrivingTensors, kv: KVPolicy) -> None:
        """Load new weights; nothing is sampled with incomplete ones. Raises as `Engine.load_weights`."""
        check_awake("load weights", is_asleep=self._is_asleep)
        was_torn, self.is_torn = self.is_torn, True
        try:
            self.model.load_weights(tensors)
        except GenerationError:  # refused before any change
            self.is_torn = was_torn
            raise
        if isinstance(tensors, MappedTensors):
            tensors.check()
        self.is_torn, self.version = False, version
        self._prompts.clear()  # computed under other weights: no longer shareable
        self._prefixes.clear()
        if kv == "keep" and self._has_kv:
            return
        # For every running request, all keys and values except the last token's, which is fed next.
        ordinals_R = self._rows_R["ordinal"]
        self.model.prefill(
            (row, (*flight.request.prompt_ids, *self._ids_RT[row, : ordinals_R[row]].tolist())[:-1], 0)
            for row, flight in self._occupants.items()
        )
        for row, flight in self._occupants.items():
            if not ordinals_R[row]:  # computed together with later tokens, a prompt's keys and values differ in the last bits
                self._note_prompt(row, (flight.request.group_key, flight.request.prompt_ids))
        self._has_kv = True

    def sleep(self, kv: KVPolicy) -> None:
        """Free memory; no step until it is awake and weights are loaded."""
        if self._is_asleep:
            return
        self._has_kv = self._has_kv and kv == "keep"
        self.model.sleep(max(int(self._rows_R["position"].max()), 0) if self._has_kv else 0)
        self._is_asleep = self.is_torn = True

    def wake(self) -> None:
        """Allocate the memory again."""
        if self._is_asleep:
            self.model.wake()
            self._is_asleep = False

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token after the first under the current weights, temperature 1."""
        check_awake("score", is_asleep=self._is_asleep)
        if self.is_torn:
            raise GenerationError("cannot score: the engine has no whole weights; load some first")
        return self.model.score(token_ids)

    def _refill(self) -> None:
        """Assign rows to waiting requests; prefill the part of each prompt that no running or just placed request shares."""
        placed: list[InFlight] = []
        waves: list[list[tuple[int, tuple[int, ...], int, int]]] = []
        """Row, tokens to prefill, source row and number of tokens to copy from it; each wave copies from earlier waves."""
        wave_of: dict[int, int] = {}
        while self._waiting and self._free:
            flight = self._waiting.popleft()
            prompt_ids = flight.request.prompt_ids
            prompt = (flight.request.group_key, prompt_ids)
            donor = next((row for row, held in self._prompts.items() if held == prompt), -1) if prompt[0] else -1
            num_shared = len(prompt_ids) - 1
            if donor >= 0 and donor not in self._occupants:
                row = donor
                self._free.remove(row)
                heapq.heapify(self._free)
            else:
                if donor < 0:  # the running row with the most whole pieces in common with the prompt
                    digests = self._digests(prompt_ids)
                    while digests and self._prefixes.get(digests[-1], -1) not in self._occupants:
                        digests.pop()
                    donor = self._prefixes[digests[-1]] if digests else -1
                    num_shared = len(digests) * self.model.piece_tokens
                row = heapq.heappop(self._free)
                wave = wave_of[row] = wave_of.get(donor, -1) + 1
                if wave == len(waves):
                    waves.append([])
                waves[wave].append((row, prompt_ids[:-1], donor, num_shared))
            flight.row, self._occupants[row] = row, flight
            self._note_prompt(row, prompt)
            placed.append(flight)
        if not placed:
            return
        states = []
        for request in (flight.request for flight in placed):
            prompt_ids, params = request.prompt_ids, request.sampling
            draws = (request.seed, params.temperature, params.top_p, params.top_k)
            states.append((prompt_ids[-1], len(prompt_ids) - 1, 0, 0, params.max_new_tokens, *draws))
        self._rows_R[[flight.row for flight in placed]] = np.array(states, dtype=_ROW)
        self._stops_S = np.array(sorted({*self._stops_S.tolist()}.union(*(flight.stop_ids for flight in placed))), dtype=np.int64)
        for wave_rows in waves:
            self.model.cache.copy_rows((donor, row, num_shared) for row, _, donor, num_shared in wave_rows if num_shared)
            self.model.prefill((row, ids, num_shared) for row, ids, _, num_shared in wave_rows)
        self._sampling = None

    def _digests(self, prompt_ids: tuple[int, ...]) -> list[bytes]:
        """Return a digest of the prompt's first whole piece, of its first two, and so on; its last token is never prefilled."""
        piece, state = self.model.piece_tokens, hashlib.blake2b(digest_size=16)
        digests = []
        for end in range(piece, len(prompt_ids), piece):
            state.update(np.array(prompt_ids[end - piece : end], np.int32).tobytes())
            digests.append(state.digest())
        return digests

    def _move_below(self, limit: int) -> None:
        """Move the requests in rows from `limit` on to free rows below it."""
        copies = []
        for source in [row for row in self._occupants if row >= limit]:
            target, flight = heapq.heappop(self._free), self._occupants.pop(source)
            assert target < limit, f"there are {len(self._occupants) + 1} requests for {limit} rows"
            heapq.heappush(self._free, source)
            flight.row, self._occupants[target] = target, flight
            copies.append((source, target, int(self._rows_R["position"][source])))
            own: NDArray[Any]
            for own in (self._rows_R, self._ids_RT, self._logprobs_RT, self._versions_RT):
                own[target] = own[source]
            self._rows_R[source] = _FREE
            if source in self._prompts:
                self._note_prompt(target, self._prompts[source])
            else:
                self._forget_prompt(target)
        self.model.cache.copy_rows(copies)

    def _take_chunk(self, flight: InFlight, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the request's tokens since its last chunk, possibly none."""
        row = flight.row
        start, end = int(self._rows_R["told"][row]), int(self._rows_R["ordinal"][row])
        self._rows_R["told"][row] = end
        parts = (self._ids_RT, self._logprobs_RT, self._versions_RT)
        ids, logprobs, versions = (tuple(part[row, start:end].tolist()) for part in parts)
        return TokenChunk(ids, logprobs, versions, finish_reason)

    def _finish(self, flight: InFlight, news: TokenChunk | GenerationError) -> News:
        """Free the request's row; its keys and values in the cache may still be shared."""
        if flight.row >= 0:
            del self._occupants[flight.row]
            self._rows_R[flight.row] = _FREE
            heapq.heappush(self._free, flight.row)
            flight.row, self._sampling = -1, None
        else:
            self._waiting.remove(flight)
        return flight.request.request_id, news

    def _note_prompt(self, row: int, prompt: _Prompt) -> None:
        """Note the prompt whose keys and values a row holds from now on."""
        self._forget_prompt(row)
        self._prompts[row] = prompt
        for digest in self._digests(prompt[1]):
            if self._prefixes.get(digest, -1) not in self._occupants:
                self._prefixes[digest] = row

    def _forget_prompt(self, row: int) -> None:
        """Note that a row's keys and values are no longer shareable."""
        if self._prompts.pop(row, None) is not None:
            self._prefixes = {digest: other for digest, other in self._prefixes.items() if other != row}
