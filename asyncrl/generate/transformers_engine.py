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
from asyncrl.errors import EngineDied
from asyncrl.generate.decode_thread import DecodeThread
from asyncrl.generate.engine import EngineRequest, KVPolicy, SleepLevel
from asyncrl.generate.request_rules import RequestRules
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
        self._rules = RequestRules(0, config.max_sequence_tokens)
        self._resident: dict[str, int] = {}
        self._receiver: Receiver | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sample now; -1 before the first `load_weights`."""
        return self._version

    @property
    def num_slots(self) -> int:
        """Most requests that run at once. Raises EngineDied once the decode thread is dead."""
        if self._thread.fault is not None:
            raise EngineDied(str(self._thread.fault))
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
        try:
            await self._thread.start()
        except BaseException:
            await self.close()
            raise

    def submit(self, request: EngineRequest) -> TokenStream:
        """Start a request; see `Engine.submit`."""
        self._rules.check(request, self._streams)
        request_id, stop_ids = request.request_id, self._rules.stop_ids(request)
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

    async def sleep(self, level: SleepLevel, kv: KVPolicy = "recompute") -> None:
        """Give memory back; see `Engine.sleep`. On a CPU level 1 leaves the weights where they are."""

        def fall_asleep(decoder: SlotDecoder) -> None:
            decoder.sleep(level, kv)
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
        ids = self._rules.scorable(token_ids)
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
        self._rules = RequestRules(model.vocabulary_size, self._config.max_sequence_tokens, model.end_ids)
        self._resident = model.resident
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
