"""From config to an engine and to the tokenizer that goes with it: one row a kind, heavy imports only for the kind chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.clock import Clock
from asyncrl.config.generate import FakeEngineConfig, ReplayEngineConfig, VLLMServerEngineConfig
from asyncrl.config.learner import PretrainedModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.generate.engine import Engine
from asyncrl.generate.tokenizer import ByteCodec, PromptCodec, ReplayCodec, TokenizerCodec

_Build = Callable[[Any, RunConfig, Path, Clock], Engine]
"""From the engine's module, the run's config with this generator's engine, the model's folder and a clock."""


def _transformers(module: Any, config: RunConfig, folder: Path, _: Clock) -> Engine:  # noqa: ANN401 - a module
    trust, fp32_head, lora = _trusts(config), config.model.fp32_head, config.learner.lora
    engine: Engine = module.TransformersEngine(
        config.generate.engine, folder, trust_remote_code=trust, fp32_head=fp32_head, lora=lora
    )
    return engine


def _vllm(module: Any, config: RunConfig, folder: Path, _: Clock) -> Engine:  # noqa: ANN401
    backend = module.EmbeddedVLLM(config.generate.engine, fp32_head=config.model.fp32_head)
    engine: Engine = import_module("asyncrl.generate.vllm.engine").VLLMEngine(
        backend, folder, trust_remote_code=_trusts(config), lora=config.learner.lora
    )
    return engine


def _vllm_server(module: Any, config: RunConfig, folder: Path, clock: Clock) -> Engine:  # noqa: ANN401
    backend = module.VLLMServer(config.generate.engine, clock)
    engine: Engine = import_module("asyncrl.generate.vllm.engine").VLLMEngine(backend, folder, trust_remote_code=_trusts(config))
    return engine


def _fake(module: Any, config: RunConfig, _: Path, clock: Clock) -> Engine:  # noqa: ANN401
    engine: Engine = module.FakeEngine(config.generate.engine, clock)
    return engine


def _replay(module: Any, config: RunConfig, *_: object) -> Engine:  # noqa: ANN401
    engine: Engine = module.ReplayEngine(config.generate.engine)
    return engine


_ENGINES: dict[str, tuple[str, _Build]] = {
    "transformers": ("asyncrl.generate.transformers.engine", _transformers),
    "vllm": ("asyncrl.generate.vllm.embedded", _vllm),
    "vllm_server": ("asyncrl.generate.vllm.server", _vllm_server),
    "fake": ("asyncrl.generate.doubles.fake", _fake),
    "replay": ("asyncrl.generate.doubles.replay", _replay),
}


def import_engine(config: RunConfig) -> None:
    """Import the configured engine's module, so that building the engine later does not."""
    import_module(_ENGINES[config.generate.engine.kind][0])


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
    config, folder = with_own_server(config, generator), model_folder_here(config, model_folder)
    settings = config.generate.engine
    module, build = _ENGINES[settings.kind]
    engine = await asyncio.to_thread(lambda: build(import_module(module), config, folder, clock))
    tokenizer = TokenizerCodec(folder, trust_remote_code=_trusts(config))
    codec: PromptCodec = tokenizer
    if isinstance(settings, FakeEngineConfig):
        codec = ByteCodec(settings.vocabulary_size)
    elif isinstance(settings, ReplayEngineConfig):
        codec = ReplayCodec(tokenizer)
    await engine.start()
    return engine, codec


def model_folder_here(config: RunConfig, told: Path) -> Path:
    """Return where this machine has the model that the learner has at `told`.

    Raises:
        GenerationError: It is not there.
    """
    folder = Path(config.generate.model_folder or told)
    if config.generate.engine.needs_folder and not folder.is_dir():
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


def _trusts(config: RunConfig) -> bool:
    return isinstance(config.model, PretrainedModel) and config.model.trust_remote_code
