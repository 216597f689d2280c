"""The embedded engine: continuous batching in slots over any transformers causal LM, on any machine.

The asyncio face of it: checks requests, keeps their streams, hands everything else over to the decode thread. What the engine
promises stands in generate/engine.py; how it keeps it: generate/decode_thread.py (one thread, token boundaries),
generate/slot_decoder.py (slots, refill, versions), generate/slot_model.py and slot_cache.py (forwards of fixed shape),
generate/sampling.py (draws from (seed, position)).

Called by generate/rollout.py and generate/worker.py.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import EngineDied, GenerationError
from asyncrl.generate.decode_thread import DecodeThread
from asyncrl.generate.engine import EngineRequest, KVPolicy, SleepLevel
from asyncrl.generate.slot_decoder import Emission, SlotDecoder
from asyncrl.generate.slot_model import SlotModel
from asyncrl.generate.slots import InFlight
from asyncrl.generate.token_stream import TokenStream
from asyncrl.models.deferred import ArrivingTensors, DeferredTensors, Receiver, make_receiver


class TransformersEngine:
    """See `asyncrl.generate.engine.Engine`.

    Example:
        >>> engine = TransformersEngine(TransformersEngineConfig(), Path("model"))  # doctest: +SKIP
        >>> await engine.start()                                                    # doctest: +SKIP
        >>> async for chunk in engine.submit(request): ...                          # doctest: +SKIP
    """

    def __init__(
        self,
        config: TransformersEngineConfig,
        model_folder: Path,
        *,
        trust_remote_code: bool = False,
        fp32_head: bool = False,
        lora: LoRAConfig | None = None,
    ) -> None:
        """Note what `start` will load; see `SlotModel.load`."""
        self._config = config
        self._load = partial(
            SlotModel.load, model_folder, config, trust_remote_code=trust_remote_code, fp32_head=fp32_head, lora=lora
        )
        self._thread = DecodeThread(self._make_decoder, self._hear, self._lose_all)
        self._streams: dict[str, weakref.ref[TokenStream]] = {}
        self._version = -1
        self._vocabulary_size = 0
        self._end_ids: frozenset[int] = frozenset()
        self._resident: dict[str, int] = {}
        self._receiver: Receiver | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sample now; -1 before the first `load_weights`."""
        return self._version

    @property
    def num_slots(self) -> int:
        """Most requests that run at once."""
        return self._config.num_slots

    @property
    def num_running(self) -> int:
        """Requests submitted and not finished."""
        return len(self._streams)

    @property
    def model_bytes(self) -> int:
        """Bytes of weights and KV cache, as far as they are on the device now."""
        return sum(self._resident.values())

    @property
    def resident(self) -> Mapping[str, int]:
        """The same by component."""
        return self._resident

    async def start(self) -> None:
        """Load the model; see `Engine.start`."""
        await self._thread.start()

    def submit(self, request: EngineRequest) -> TokenStream:
        """Start a request; see `Engine.submit`."""
        self._check(request)
        stop_ids = frozenset(request.sampling.stop_token_ids)
        if request.sampling.ignore_eos:
            stop_ids = frozenset()
        else:
            stop_ids |= self._end_ids
        request_id = request.request_id
        stream = TokenStream(on_early_close=lambda: self.abort(request_id))
        handed_over = self._thread.post(lambda decoder: decoder.submit(InFlight(request, stop_ids)))
        if handed_over.done():
            handed_over.result()
        self._streams[request_id] = weakref.ref(stream)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        if request_id in self._streams:
            self._thread.post(lambda decoder: self._thread.tell(decoder.abort(request_id)))

    async def pause(self) -> None:
        """Stop at a token boundary; see `Engine.pause`."""
        await self._thread.set_paused(True)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._thread.set_paused(False)

    async def sleep(self, level: SleepLevel) -> None:
        """Give memory back; see `Engine.sleep`. On a CPU level 1 leaves the weights where they are."""

        def fall_asleep(decoder: SlotDecoder) -> None:
            decoder.sleep(level)
            self._resident = decoder.resident

        await self._thread.call(fall_asleep)

    async def wake(self) -> None:
        """Take it again after `sleep`."""

        def wake_up(decoder: SlotDecoder) -> None:
            decoder.wake()
            self._resident = decoder.resident

        await self._thread.call(wake_up)

    async def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor], kv: KVPolicy) -> float:
        """Replace the weights between two tokens; see `Engine.load_weights`."""
        arriving = await self._begin(tensors) if isinstance(tensors, DeferredTensors) else None

        def swap(decoder: SlotDecoder) -> float:
            started_s = perf_counter()
            if arriving is None:
                decoder.load_weights(version, tensors, kv)
            else:
                with closing(arriving):
                    decoder.load_arriving(version, arriving, kv)
            self._version, self._resident = version, decoder.resident
            return (perf_counter() - started_s) * 1000

        return await self._thread.call(swap)

    async def _begin(self, deferred: DeferredTensors) -> ArrivingTensors:
        """Wait, generating, until a version that ends here begins to arrive."""
        if self._receiver is None:
            self._receiver = make_receiver(deferred.receiver, deferred.arguments)
        device = torch.device(self._config.device)
        return await asyncio.to_thread(ArrivingTensors, self._receiver, deferred.available, device)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the probe's logprobs; see `Engine.score`."""
        ids = tuple(int(token) for token in token_ids)
        self._check_ids(ids, "score")
        if len(ids) > self._config.max_sequence_tokens:
            raise GenerationError(
                f"cannot score {len(ids)} tokens: generate.engine.max_sequence_tokens is {self._config.max_sequence_tokens}"
            )
        return await self._thread.call(lambda decoder: decoder.score(ids))

    async def close(self) -> None:
        """Abort everything and end the decode thread."""
        await self._thread.close()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _make_decoder(self) -> SlotDecoder:
        torch.set_num_threads(self._config.num_threads)
        model = self._load()
        self._vocabulary_size, self._end_ids, self._resident = model.vocabulary_size, model.end_ids, model.resident
        return SlotDecoder(model, self._config.num_slots)

    def _hear(self, news: list[Emission]) -> None:
        for emission in news:
            reference = self._streams.get(emission.request_id)
            stream = reference() if reference is not None else None
            if emission.is_last:
                self._streams.pop(emission.request_id, None)
            if stream is not None:
                stream.put(emission.news)

    def _lose_all(self, fault: EngineDied) -> None:
        self._hear([Emission(request_id, EngineDied(str(fault))) for request_id in list(self._streams)])

    def _check(self, request: EngineRequest) -> None:
        self._check_ids(request.prompt_ids, f"request {request.request_id}")
        if request.request_id in self._streams:
            raise GenerationError(f"request {request.request_id} is running already; request ids must be unique")
        prompt, response, limit = len(request.prompt_ids), request.sampling.max_new_tokens, self._config.max_sequence_tokens
        if response < 1:
            raise GenerationError(f"request {request.request_id}: max_new_tokens must be at least 1, got {response}")
        if prompt + response > limit:
            raise GenerationError(
                f"request {request.request_id}: prompt of {prompt} tokens plus max_new_tokens {response} is {prompt + response}, "
                f"over generate.engine.max_sequence_tokens ({limit}); shorten the prompt, ask for fewer tokens or raise the limit"
            )

    def _check_ids(self, token_ids: Sequence[int], what: str) -> None:
        if not token_ids:
            raise GenerationError(f"{what}: there are no prompt tokens; give at least one (a beginning-of-sequence token, say)")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocabulary_size:
            wrong = low if low < 0 else high
            raise GenerationError(
                f"{what}: token id {wrong} is outside the vocabulary: allowed are 0 to {self._vocabulary_size - 1}"
            )
