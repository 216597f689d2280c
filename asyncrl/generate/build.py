"""From config to an engine and to what turns prompts into its tokens: one row a kind, heavy imports only for the kind chosen.

Called by generate/worker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

import msgspec

from asyncrl.clock import Clock
from asyncrl.config.generate import (
    FakeEngineConfig,
    ReplayEngineConfig,
    TransformersEngineConfig,
    VLLMEngineConfig,
    VLLMServerEngineConfig,
)
from asyncrl.config.model import PretrainedModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.generate.engine import Engine
from asyncrl.generate.fake_engine import FakeEngine
from asyncrl.generate.prompt_codec import ByteCodec, PromptCodec, TokenizerCodec
from asyncrl.generate.replay_engine import ReplayCodec, ReplayEngine

Built = tuple[Engine, PromptCodec]


ENGINE_MODULES = {
    "transformers": "asyncrl.generate.transformers_engine",
    "vllm": "asyncrl.generate.vllm_engine",
    "vllm_server": "asyncrl.generate.vllm_server_engine",
}
"""Of engines that bring heavy libraries."""


def import_engine(config: RunConfig) -> None:
    """Import the configured engine's module, so that building the engine later does not."""
    module = ENGINE_MODULES.get(str(config.generate.engine.__struct_config__.tag))
    if module is not None:
        import_module(module)


def build_engine(config: RunConfig, model_folder: Path, clock: Clock) -> Built:
    """Make the configured engine, not yet started; slow, run it on a thread.

    Raises:
        ConfigError: No engine of that kind is built.
        GenerationError: The tokenizer cannot be loaded.
    """
    kind = config.generate.engine.__struct_config__.tag
    if kind not in _BUILDERS:
        raise ConfigError(f"generate.engine.kind {kind!r} is not built yet; built are {sorted(map(str, _BUILDERS))}")
    return _BUILDERS[kind](config, model_folder, clock)


async def start_engine(config: RunConfig, model_folder: Path, clock: Clock, generator: str = "generator-0") -> Built:
    """Make the engine configured for this generator and start it. Raises as `build_engine` and `Engine.start`."""
    folder = model_folder_here(config, model_folder)
    engine, codec = await asyncio.to_thread(build_engine, with_own_server(config, generator), folder, clock)
    await engine.start()
    return engine, codec


def model_folder_here(config: RunConfig, told: Path) -> Path:
    """Return where this machine has the model that the learner has at `told`.

    Raises:
        GenerationError: It is not there.
    """
    folder = Path(config.generate.model_folder or told)
    if not isinstance(config.generate.engine, FakeEngineConfig) and not folder.is_dir():
        raise GenerationError(
            f"the model's folder {folder} is not on this machine: share it with the learner's, or copy it here and say where "
            "(generate.model_folder; `asyncrl join --model FOLDER`)"
        )
    return folder


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


def _transformers(config: RunConfig, model_folder: Path, clock: Clock) -> Built:
    del clock
    module = import_module(ENGINE_MODULES["transformers"])
    trust = isinstance(config.model, PretrainedModel) and config.model.trust_remote_code
    engine_config = cast("TransformersEngineConfig", config.generate.engine)
    engine = module.TransformersEngine(
        engine_config, model_folder, trust_remote_code=trust, fp32_head=config.model.fp32_head, lora=config.learner.lora
    )
    return engine, TokenizerCodec(model_folder, trust_remote_code=trust)


def _fake(config: RunConfig, model_folder: Path, clock: Clock) -> Built:
    del model_folder
    engine_config = cast("FakeEngineConfig", config.generate.engine)
    return FakeEngine(engine_config, clock), ByteCodec(engine_config.vocabulary_size)


def _replay(config: RunConfig, model_folder: Path, clock: Clock) -> Built:
    del clock
    trust = isinstance(config.model, PretrainedModel) and config.model.trust_remote_code
    engine = ReplayEngine(cast("ReplayEngineConfig", config.generate.engine))
    return engine, ReplayCodec(TokenizerCodec(model_folder, trust_remote_code=trust))


def _vllm(config: RunConfig, model_folder: Path, clock: Clock) -> Built:
    del clock
    module = import_module(ENGINE_MODULES["vllm"])
    trust = isinstance(config.model, PretrainedModel) and config.model.trust_remote_code
    engine_config = cast("VLLMEngineConfig", config.generate.engine)
    engine = module.VLLMEngine(
        engine_config, model_folder, trust_remote_code=trust, fp32_head=config.model.fp32_head, lora=config.learner.lora
    )
    return engine, TokenizerCodec(model_folder, trust_remote_code=trust)


def _vllm_server(config: RunConfig, model_folder: Path, clock: Clock) -> Built:
    module = import_module(ENGINE_MODULES["vllm_server"])
    trust = isinstance(config.model, PretrainedModel) and config.model.trust_remote_code
    engine_config = cast("VLLMServerEngineConfig", config.generate.engine)
    engine = module.VLLMServerEngine(engine_config, model_folder, clock, trust_remote_code=trust)
    return engine, TokenizerCodec(model_folder, trust_remote_code=trust)


_BUILDERS: dict[object, Callable[[RunConfig, Path, Clock], Built]] = {
    "transformers": _transformers,
    "fake": _fake,
    "replay": _replay,
    "vllm": _vllm,
    "vllm_server": _vllm_server,
}
