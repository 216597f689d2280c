"""What the engine makes of its calls into vLLM; vLLM's client is played by the test, and not installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config.generate import VLLMEngineConfig
from asyncrl.generate.vllm_engine import VLLMEngine


def _engine_over(call) -> VLLMEngine:
    engine = VLLMEngine(VLLMEngineConfig(data_parallel=2), Path("model"))
    engine._llm = SimpleNamespace(engine_core=SimpleNamespace(core_engines=["first", "second"], _call_utility_async=call))
    return engine


async def test_the_workers_of_every_data_parallel_engine_are_called_and_answer_in_order():
    asked = []

    async def call(*arguments, engine):
        asked.append(arguments)
        return [f"{engine}.0", f"{engine}.1"]

    replies = await _engine_over(call)._in_every_worker("asyncrl_load", "order")
    assert replies == ["first.0", "first.1", "second.0", "second.1"]
    assert asked == 2 * [("collective_rpc", "asyncrl_load", None, ("order",), None)]


async def test_what_one_of_several_vllm_engines_raises_comes_as_it_is_and_not_in_a_group():
    async def call(*_, engine):
        if engine == "second":
            raise ValueError("vLLM's own words")
        return []

    with pytest.raises(ValueError, match=r"^vLLM's own words$") as raised:
        await _engine_over(call)._in_every_worker("asyncrl_load", "order")
    assert raised.value.__suppress_context__
