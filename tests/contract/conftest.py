"""vLLM engines that tests share: starting one takes half a minute, so each shape of model has one, made like new."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest_asyncio
from safetensors.torch import load_file

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.config.learner import LoRAConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm.embedded import EmbeddedVLLM
from asyncrl.generate.vllm.engine import VLLMEngine

_HERE = str(Path(__file__).parent)
SLOTS = 4
MAX_TOKENS = 256


async def start_vllm(folder: Path, lora: LoRAConfig | None = None, **config) -> VLLMEngine:
    """Start an engine over a folder, as small as tests need it; `config` is more of its config."""
    settings = VLLMEngineConfig(num_slots=SLOTS, max_sequence_tokens=MAX_TOKENS, kv_cache_gib=0.125, **config)
    engine = VLLMEngine(EmbeddedVLLM(settings), folder, lora=lora)
    sys.path.append(_HERE)  # the workers take it over: vllm_receiver.py is imported there
    try:
        await engine.start()
    finally:
        sys.path.remove(_HERE)
    return engine


class VLLMEngines:
    """One engine for each `config.json`, on the session's event loop."""

    def __init__(self) -> None:
        self._engines: dict[tuple[bytes, LoRAConfig | None], VLLMEngine] = {}

    async def like_new(self, folder: Path, lora: LoRAConfig | None = None) -> VLLMEngine:
        """Return an engine that holds the folder's weights as version -1, with nothing running; start it if need be."""
        shape = (folder / "config.json").read_bytes(), lora
        engine = self._engines.get(shape)
        try:
            if engine is not None:
                await self._reset(engine, folder)
                return engine
        except GenerationError:  # a test ended it
            await engine.close()
        engine = self._engines[shape] = await start_vllm(folder, lora=lora)
        return engine

    async def close(self) -> None:
        """End them all."""
        for engine in self._engines.values():
            await engine.close()

    @staticmethod
    async def _reset(engine: VLLMEngine, folder: Path) -> None:
        await engine.load_weights(-1, load_file(folder / "model.safetensors"), "recompute")
        await engine.resume()
        assert engine.num_running == 0, "a test left requests behind"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engines():
    engines = VLLMEngines()
    yield engines
    await engines.close()
