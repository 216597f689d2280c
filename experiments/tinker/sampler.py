"""Samples from saved adapters: asyncrl's embedded engine, which holds one version at a time.

A version is a file of tensors that is written once and never changed. Invariant: a request is answered by the version that it
names. The engine takes another one only when nobody samples; requests are served in the order in which they came, so none waits
for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tinker import types
from trainer import with_rank
from wire import Limits, RefusedError, prompt_of, sample_answer

from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.config.run import RunConfig
from asyncrl.errors import EngineDied, GenerationError
from asyncrl.generate.engine import EngineRequest, TokenStream
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.learner.checkpoint_folder import write_folder
from asyncrl.schema.samples import SamplingParams, derive_seed

FILE = "adapters.safetensors"


@dataclass(frozen=True, slots=True)
class Version:
    """What is sampled from."""

    folder: Path | None = None
    """Written by `write_version`; None: the base model."""
    rank: int = 0
    """Of its adapters."""


def write_version(folder: Path, adapters: dict[str, torch.Tensor], rank: int) -> Version:
    """Write adapters for sampling into a folder that is not there: from one that is, somebody may be sampling."""
    assert not folder.exists(), folder
    write_folder(folder, lambda partial: save_file(adapters, partial / FILE, metadata={"rank": str(rank)}))
    return Version(folder, rank)


def find_version(folder: Path) -> Version:
    """Return what `write_version` wrote."""
    with safe_open(folder / FILE, framework="pt") as file:
        return Version(folder, int(file.metadata()["rank"]))


class Sampler:
    """The engine, and whose turn it is."""

    def __init__(self, config: RunConfig, model_folder: Path, limits: Limits) -> None:
        """Note what will be opened when somebody samples."""
        self._config, self._model_folder, self._limits = config, model_folder, limits
        self._engine: TransformersEngine | None = None
        self._held: Version | None = None
        """What it holds; None: nothing whole."""
        self._turn, self._idle = asyncio.Lock(), asyncio.Event()
        self._idle.set()
        self._num_sampling, self._numbers = 0, itertools.count()

    async def sample(self, version: Version, asked: types.SampleRequest) -> bytes:
        """Return the answer to a sample request.

        Raises:
            RefusedError: The request cannot be served, as it is or here.
            GenerationError: The engine cannot serve it.
        """
        prompt, params = tuple(prompt_of(asked)), self._params(asked)
        seed = secrets.randbits(63) if asked.sampling_params.seed is None else asked.sampling_params.seed
        async with self._holding(version) as engine:
            number, streams = str(next(self._numbers)), []
            try:
                for index in range(asked.num_samples):
                    own = EngineRequest(f"{number}.{index}", prompt, params, derive_seed(seed, index), group_key=number)
                    streams.append(engine.submit(own))
                scored = [math.nan, *await engine.score(prompt)] if asked.prompt_logprobs else []
                return sample_answer([await _whole(stream) for stream in streams], scored)
            finally:
                for stream in streams:
                    stream.close()

    async def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            await self._engine.close()

    def _params(self, asked: types.SampleRequest) -> SamplingParams:
        given, limit = asked.sampling_params, self._config.generate.engine.max_sequence_tokens
        if not 0 <= given.temperature < math.inf or not 0 < given.top_p <= 1 or given.top_k < -1:
            raise RefusedError("sampling_params: temperature must be at least 0, top_p over 0 to 1, top_k -1 or more")
        vocabulary, stop = self._limits.vocabulary, None if given.stop is None else list[Any](given.stop)
        if wrong := [one for one in stop or () if isinstance(one, str) or not 0 <= one < vocabulary]:
            raise RefusedError(f"sampling_params: stop {wrong[0]!r:.80} is not supported here; give ids, 0 to {vocabulary - 1}")
        return SamplingParams(
            max_new_tokens=limit - asked.prompt.length if given.max_tokens is None else given.max_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=min(max(given.top_k, 0), vocabulary),
            stop_token_ids=tuple(stop or ()),
            ignore_eos=stop is not None and not stop,
        )

    @asynccontextmanager
    async def _holding(self, version: Version) -> AsyncIterator[TransformersEngine]:
        """Have an engine with that version, and no other, for as long as the context lasts."""
        async with self._turn:  # the first to come is the first to get it
            if version != self._held or self._engine is None:
                await self._idle.wait()
                engine = await self._loaded(version)
            else:
                engine = self._engine
            self._num_sampling += 1
            self._idle.clear()
        try:
            yield engine
        except EngineDied:
            if self._engine is engine:
                self._engine = None
            raise
        finally:
            self._num_sampling -= 1
            if not self._num_sampling:
                self._idle.set()

    async def _loaded(self, version: Version) -> TransformersEngine:
        """Load a version, into a new engine where its adapters are of another rank."""
        held, self._held = self._held, None
        if self._engine is None or held is None or held.rank != version.rank:
            if self._engine is not None:
                await self._engine.close()
            model, lora = self._config.model, with_rank(self._config, version.rank).learner.lora if version.rank else None
            options: dict[str, Any] = {"trust_remote_code": self._config.trusts_code, "fp32_head": model.fp32_head, "lora": lora}
            assert isinstance(self._config.generate.engine, TransformersEngineConfig)
            self._engine = TransformersEngine(self._config.generate.engine, self._model_folder, **options)
            await self._engine.start()
        if version.folder is not None:
            try:
                adapters = await asyncio.to_thread(load_file, version.folder / FILE)
            except OSError as error:
                raise RefusedError(f"sampler weights {version.folder.name!r} are there no more; save newer ones", 410) from error
            await self._engine.load_weights(next(self._numbers), adapters, "recompute")
        self._held = version
        return self._engine


async def _whole(stream: TokenStream) -> tuple[list[int], list[float], str]:
    """Return ids, log-probabilities and the reason of the end."""
    ids: list[int] = []
    logprobs: list[float] = []
    reason = ""
    async for chunk in stream:
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        reason = chunk.finish_reason or ""
    if reason not in {"stop", "length"}:
        raise GenerationError("the engine was closed before the sample was whole; ask again")
    return ids, logprobs, reason
