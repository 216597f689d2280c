"""What the `vllm_server` engine needs to be told and what it cannot do. Called by config/load.py."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from asyncrl.config.broadcast import NCCLMedium
from asyncrl.config.generate import VLLMServerEngineConfig
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError

_LOOPBACK = ("localhost", "::1")


def check_vllm_server(config: RunConfig) -> None:
    """Refuse servers that are missing, shared, or out of the weights' reach.

    Raises:
        ConfigError: Naming the field, what is allowed and what to do.
    """
    engine = config.generate.engine
    if not isinstance(engine, VLLMServerEngineConfig):
        return
    _check_urls(config, engine)
    _check_reach(config, engine)
    if config.learner.lora is not None:
        raise ConfigError(
            "learner.lora sends adapters alone, which a vLLM server is not given yet: remove [learner.lora], or use "
            "generate.engine.kind = 'transformers'"
        )
    if config.model.fp32_head:
        raise ConfigError(
            "model.fp32_head = true changes the output layer in the engine too, and a vLLM server computes it in its own "
            "dtype: set model.fp32_head = false, or use generate.engine.kind = 'transformers'"
        )


def is_local(url: str) -> bool:
    """Return whether the server runs on this machine, as far as its address says."""
    host = _split(url).hostname or ""
    return host in _LOOPBACK or host.startswith("127.")


def _check_urls(config: RunConfig, engine: VLLMServerEngineConfig) -> None:
    if not engine.urls:
        raise ConfigError("generate.engine.url is empty: give the server's address, for example url = 'http://127.0.0.1:8000'")
    for url in engine.urls:
        parts = _split(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path not in {"", "/"}:
            raise ConfigError(f"generate.engine.url: {url!r} is no server's address; it looks like http://host:port")
    distinct = len({url.rstrip("/") for url in engine.urls})
    if distinct < max(len(engine.urls), config.generate.num_workers):
        raise ConfigError(
            f"generate.engine.url names {distinct} servers for generate.num_workers = {config.generate.num_workers}: each "
            "generator pauses and updates its server, so each needs its own: name as many, comma-separated, or lower num_workers"
        )


def _check_reach(config: RunConfig, engine: VLLMServerEngineConfig) -> None:
    if engine.shared_folder or isinstance(config.broadcast.medium, NCCLMedium):
        return
    remote = [url for url in engine.urls if not is_local(url)]
    if remote:
        raise ConfigError(
            f"generate.engine.url: {remote[0]} is another machine, and its weights come through files: set "
            "generate.engine.shared_folder to a folder on storage that this machine and the server see under the same path"
        )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise ConfigError(f"generate.engine.url: {url!r} is no server's address: {error}") from error
    return parts
