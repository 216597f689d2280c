"""From config to an engine and to the tokenizer that goes with it: one row a kind, heavy imports only for the kind chosen."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.clock import Clock
from asyncrl.config.generate import (
    FakeEngineConfig,
    ReplayEngineConfig,
    TransformersEngineConfig,
    VLLMEngineConfig,
    VLLMServerEngineConfig,
)
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.generate.engine import Engine
from asyncrl.generate.rollout import ByteCodec, PromptCodec, TokenizerCodec

ENGINE_MODULES = {
    "transformers": "asyncrl.generate.transformers.engine",
    "vllm": "asyncrl.generate.vllm.embedded",
    "vllm_server": "asyncrl.generate.vllm.server",
    "fake": "asyncrl.generate.fake",
    "replay": "asyncrl.generate.fake",
}


def _build(config: RunConfig, folder: Path, clock: Clock) -> Engine:
    """Import what the engine needs, which may take seconds, and make it."""
    settings, lora, trusts = config.generate.engine, config.learner.lora, config.trusts_code
    fp32_head = config.model.fp32_head
    if settings.needs_folder and not folder.is_dir():
        raise GenerationError(
            f"the model's folder {folder} is not on this machine: share it with the learner's, or copy it here and say where "
            "(generate.model_folder; `asyncrl join --model FOLDER`)"
        )
    module: Any = import_module(ENGINE_MODULES[settings.kind])
    engine: Engine
    match settings:
        case FakeEngineConfig() | ReplayEngineConfig():
            engine = module.FakeEngine(settings, clock)
        case TransformersEngineConfig():
            engine = module.TransformersEngine(settings, folder, trust_remote_code=trusts, fp32_head=fp32_head, lora=lora)
        case VLLMEngineConfig() | VLLMServerEngineConfig():
            is_server = isinstance(settings, VLLMServerEngineConfig)
            backend = module.VLLMServer(settings, clock) if is_server else module.EmbeddedVLLM(settings, fp32_head=fp32_head)
            made = import_module("asyncrl.generate.vllm.engine").VLLMEngine
            engine = made(backend, folder, trust_remote_code=trusts, lora=lora)
    return engine


async def start_engine(
    config: RunConfig, model_folder: Path, clock: Clock, generator: str = "generator-0"
) -> tuple[Engine, PromptCodec]:
    """Make the engine configured for this generator and start it.

    Args:
        config: Of the run.
        model_folder: Where the learner has the model.
        clock: Of engines that need one.
        generator: This process's name.

    Raises:
        ConfigError: There is no server for this generator.
        GenerationError: The model is not on this machine, or the engine does not start.
    """
    config, folder = with_own_server(config, generator), Path(config.generate.model_folder or model_folder)
    settings = config.generate.engine
    engine = await asyncio.to_thread(_build, config, folder, clock)
    codec: PromptCodec = TokenizerCodec(folder, trust_remote_code=config.trusts_code, replays=settings.replays)
    if isinstance(settings, FakeEngineConfig):
        codec = ByteCodec(settings.vocabulary_size)
    await engine.start()
    return engine, codec


def with_own_server(config: RunConfig, generator: str) -> RunConfig:
    """Return the config with the one server that is this generator's, by the number at the end of its name."""
    engine = config.generate.engine
    if not isinstance(engine, VLLMServerEngineConfig):
        return config
    number = generator.rpartition("-")[2]
    index = int(number) if number.isdecimal() else 0
    if index >= len(engine.urls):
        raise ConfigError(f"generate.engine.url names {len(engine.urls)} servers; {generator} is without one")
    own = msgspec.structs.replace(engine, url=engine.urls[index])
    return msgspec.structs.replace(config, generate=msgspec.structs.replace(config.generate, engine=own))
