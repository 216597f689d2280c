"""Hybrid on a GPU: an engine in another process opens the learner's parameters. Not run by the authors unless docs say so."""

import asyncio
import multiprocessing
from pathlib import Path

import msgspec
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.learner_memory import HybridPublisher, HybridSubscriber


def _read(run_folder: str, announced: bytes) -> list[float]:
    """In a process of its own: fetch, and return the first tensor's values."""
    subscriber = HybridSubscriber(Path(run_folder), "cuda:0")
    tensors = asyncio.run(subscriber.fetch(msgspec.msgpack.decode(announced, type=WeightsAvailable)))
    tensors.check()
    values: list[float] = tensors["weight"].flatten().tolist()
    return values


def test_another_process_reads_the_learners_parameters_where_they_lie(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 4, device="cuda:0")
    announced: list[WeightsAvailable] = []
    publisher = HybridPublisher(BroadcastConfig(), tmp_path, announced.append, SystemClock())
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for version in range(2):
                with torch.no_grad():
                    layer.weight.add_(1.0)
                publisher.publish(version, dict(layer.named_parameters()))
                read = pool.apply(_read, (str(tmp_path), msgspec.msgpack.encode(announced[-1])))
                assert read == layer.weight.flatten().tolist()
    finally:
        publisher.close()
