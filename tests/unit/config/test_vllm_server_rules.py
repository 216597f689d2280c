from __future__ import annotations

import re

import msgspec
import pytest

from asyncrl.config.broadcast import BroadcastConfig, NCCLMedium
from asyncrl.config.check import faults_of
from asyncrl.config.generate import GenerateConfig, VLLMServerEngineConfig
from asyncrl.config.learner import LearnerConfig, LoRAConfig, ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.generate.factory import with_own_server

TWO = "http://127.0.0.1:8000, http://localhost:8001"


def config_of(url: str, num_workers: int = 1, *, shared_folder: str = "", **changes) -> RunConfig:
    engine = VLLMServerEngineConfig(url=url, shared_folder=shared_folder)
    return RunConfig(generate=GenerateConfig(num_workers=num_workers, engine=engine), **changes)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of(""), "is empty"),
        (config_of("127.0.0.1:8000"), "no server's address"),
        (config_of("http://127.0.0.1:port"), "no server's address"),
        (config_of("http://127.0.0.1:8000/v1"), "no server's address"),
        (config_of("http://127.0.0.1:8000", 2), "1 servers for generate.num_workers = 2"),
        (config_of("http://127.0.0.1:8000,http://127.0.0.1:8000/", 2), "1 servers"),
        (config_of("http://gpu-1:8000"), "shared_folder"),
        (config_of(TWO, learner=LearnerConfig(lora=LoRAConfig(rank=4))), "lora"),
        (config_of(TWO, model=ScratchModel(fp32_head=True)), "fp32_head"),
    ],
)
def test_what_cannot_work_is_refused(config: RunConfig, expected: str) -> None:
    assert re.search(expected, dict(faults_of(config))["generate.engine"])


@pytest.mark.parametrize(
    "config",
    [
        config_of(TWO, 2),
        config_of("https://gpu-1:8000", shared_folder="/mnt/weights"),
        config_of("http://gpu-1:8000", broadcast=BroadcastConfig(medium=NCCLMedium())),
        RunConfig(),
    ],
)
def test_what_can_work_is_accepted(config: RunConfig) -> None:
    assert "generate.engine" not in dict(faults_of(config))


def test_each_generator_has_the_server_of_its_number() -> None:
    config = config_of(TWO, 2)
    urls = [with_own_server(config, name).generate.engine for name in ("generator-0", "generator-1")]
    assert [msgspec.to_builtins(engine)["url"] for engine in urls] == ["http://127.0.0.1:8000", "http://localhost:8001"]
    with pytest.raises(ConfigError, match="generator-2 is without one"):
        with_own_server(config, "generator-2")
