"""An engine without a model that gives back given answers: how a file of preferences is trained by the pipeline of online runs.

The answers are tokenised by the run's own tokenizer. Nothing is drawn, so behaviour logprobs are 0 (no loss on preferences reads
them) and every token carries the version live when it was given back: staleness says how long a pair lay in the buffer.

Invariants: those of generate/engine.py but for sampling; a request waits while the engine is paused or has no version yet, and
is answered at once otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.generate import ReplayEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest, KVPolicy, SleepLevel, TokenChunk, TokenStream, refuse_running


class ReplayEngine:
    """See `asyncrl.generate.engine.Engine`."""

    def __init__(self, config: ReplayEngineConfig) -> None:
        self._config = config
        self._version = -1
        self._is_paused = False
        self._is_asleep = False
        self._is_closed = False
        self._needs_weights = False
        """Slept at level 2, and none came since."""
        self._waiting: dict[str, tuple[EngineRequest, TokenStream]] = {}

    @property
    def version(self) -> int:
        """Version given to the last `load_weights`; -1 before the first."""
        return self._version

    @property
    def num_slots(self) -> int:
        """Requests that may wait at once."""
        return self._config.num_slots

    @property
    def num_running(self) -> int:
        """Requests that wait for a version or for `resume`."""
        return len(self._waiting)

    async def start(self) -> None:
        """Do nothing: there is no model."""

    def submit(self, request: EngineRequest) -> TokenStream:
        """Give the request's answer back; see `Engine.submit`."""
        if self._is_closed:
            raise GenerationError("the engine is closed")
        self._check(request)
        request_id = request.request_id
        stream = TokenStream(on_early_close=lambda: self.abort(request_id))
        self._waiting[request_id] = (request, stream)
        self._give_back()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; see `Engine.abort`."""
        if waiting := self._waiting.pop(request_id, None):
            waiting[1].put(TokenChunk((), (), (), "abort"))

    async def pause(self) -> None:
        """Give nothing back until `resume`."""
        self._is_paused = True

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False
        self._give_back()

    async def sleep(self, level: SleepLevel, kv: KVPolicy = "recompute") -> None:
        """Give nothing back until `wake`, after level 2 until weights come too; see `Engine.sleep`."""
        del kv
        self._is_asleep = True
        self._needs_weights |= level == 2

    async def wake(self) -> None:
        """Go on after `sleep`."""
        self._is_asleep = False
        self._give_back()

    async def load_weights(self, version: int, tensors: Mapping[str, Any], kv: KVPolicy) -> float:
        """Stamp later answers with `version`; the tensors are not looked at and may be missing."""
        del tensors, kv
        if self._is_asleep:
            raise GenerationError("cannot load weights: the engine is asleep; wake it first")
        self._version = version
        self._needs_weights = False
        self._give_back()
        return 0.0

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Raise: there is no model to ask."""
        raise GenerationError(f"the replay engine holds no model and cannot score {len(token_ids)} tokens")

    async def close(self) -> None:
        """Abort what waits."""
        self._is_closed = True
        for request_id in list(self._waiting):
            self.abort(request_id)

    def _give_back(self) -> None:
        if self._is_paused or self._is_asleep or self._needs_weights or self._version < 0:
            return
        while self._waiting:
            request, stream = self._waiting.pop(next(iter(self._waiting)))
            num_tokens = len(request.answer_ids)
            stream.put(TokenChunk(request.answer_ids, (0.0,) * num_tokens, (self._version,) * num_tokens, "stop"))

    def _check(self, request: EngineRequest) -> None:
        prompt, answer, limit = len(request.prompt_ids), len(request.answer_ids), self._config.max_sequence_tokens
        if not prompt or not answer:
            raise GenerationError(
                f"request {request.request_id}: a prompt of {prompt} tokens and an answer of {answer}; need both"
            )
        refuse_running(request, self._waiting)
        if prompt + answer > limit:
            raise GenerationError(
                f"request {request.request_id}: prompt of {prompt} tokens plus answer of {answer} must fit into "
                f"generate.engine.max_sequence_tokens ({limit})"
            )
