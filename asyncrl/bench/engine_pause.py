"""How long an engine stands still for new weights: the embedded engine's `load_weights` of a lease, beside one copy of it."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from asyncrl.bench.result import seconds_of
from asyncrl.bench.scratch import scratch_folder
from asyncrl.bench.smollm2 import smollm2_model
from asyncrl.broadcast.publisher import Publisher
from asyncrl.broadcast.subscriber import Subscriber
from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.generate.transformers_engine import TransformersEngine
from asyncrl.schema.weights import WeightsAvailable


def pauses(rounds: int) -> list[tuple[float, float]]:
    """Return, for each round, the milliseconds of the pause and those of one warm copy of the same bytes."""
    transformers_logging.disable_progress_bar()
    with scratch_folder() as folder:
        model = smollm2_model(torch.bfloat16)
        model.save_pretrained(folder / "model")
        return asyncio.run(_measure(folder, dict(model.named_parameters()), rounds))


async def _measure(folder: Path, weights: dict[str, torch.Tensor], rounds: int) -> list[tuple[float, float]]:
    announced: queue.SimpleQueue[WeightsAvailable] = queue.SimpleQueue()
    config = BroadcastConfig()
    publisher, subscriber = Publisher(config, folder, announced.put, SystemClock()), Subscriber(config, folder)
    engine = TransformersEngine(TransformersEngineConfig(dtype="bfloat16", num_slots=1, max_sequence_tokens=64), folder / "model")
    measured: list[tuple[float, float]] = []
    try:
        await engine.start()
        for version in range(1, rounds + 2):
            publisher.publish(version, weights)
            tensors = await subscriber.fetch(await asyncio.to_thread(announced.get))
            pause_ms = await engine.load_weights(version, tensors, "keep")
            tensors.release()
            source = torch.ones_like(tensors.flat)
            target = torch.ones_like(tensors.flat)
            target.copy_(source)
            measured.append((pause_ms, seconds_of(lambda source=source, target=target: target.copy_(source)) * 1e3))  # type: ignore[misc]
    finally:
        await engine.close()
        subscriber.close()
        publisher.close()
    return measured[1:]
