from __future__ import annotations

import asyncio

import pytest

from asyncrl.clock import VirtualClock
from asyncrl.config.generate import FakeEngineConfig
from asyncrl.generate.doubles.fake import FakeEngine
from asyncrl.generate.engine import EngineRequest, TokenChunk
from asyncrl.schema.samples import SamplingParams


def request(name: str, seed: int = 0, max_new_tokens: int = 10, *, ignore_eos: bool = True) -> EngineRequest:
    return EngineRequest(name, (1, 2), SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos), seed)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def collect(stream) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


async def start(clock: VirtualClock, **config) -> FakeEngine:
    engine = FakeEngine(FakeEngineConfig(**{"token_latency_s": 1.0, "num_slots": 2, **config}), clock)
    await engine.start()
    return engine


async def test_tokens_after_a_load_carry_the_new_version_and_the_load_takes_its_time() -> None:
    clock = VirtualClock()
    engine = await start(clock, load_latency_s=5.0)
    stream = engine.submit(request("a"))
    await settle()
    clock.advance(4)
    async with asyncio.TaskGroup() as tasks:
        loading = tasks.create_task(engine.load_weights(3, {}, "keep"))
        await settle()
        clock.advance(5)
    assert loading.result() == pytest.approx(5000)
    await settle()
    clock.advance(6)
    await settle()
    versions = [version for chunk in await collect(stream) for version in chunk.versions]
    assert versions == [-1] * 4 + [3] * 6
    await engine.close()
