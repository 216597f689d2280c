"""The other processes of test_medium_memory.py: a learner that publishes, a generator that loads, both of which know their peak.

Run by line_process.py. Everything is done once with a small model first: libraries, threads and sockets are not what is measured.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
import torch

from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.models.layout import copy_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.subscriber import Subscriber
from tests.contract.line_process import orders, say
from tests.contract.media.learners import Learner

TENSOR_BYTES = 4 << 20
NUM_TENSORS = 16
MODEL_BYTES = NUM_TENSORS * TENSOR_BYTES


class Publish(msgspec.Struct):
    """Publish this version; -1: say how much memory it took."""

    version: int


class Peak(msgspec.Struct):
    """Most bytes in memory since the model was there, beyond those there were then."""

    num_bytes: int
    is_right: bool = True
    """Whether the model is the version that was to be loaded."""


def model_of(version: int, num_values: int = TENSOR_BYTES // 4) -> dict[str, torch.Tensor]:
    """A model that is all `version`."""
    return {f"layer.{index}": torch.full((num_values,), float(version)) for index in range(NUM_TENSORS)}


class Memory:
    """What this process has in memory."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._read("VmRSS")

    def peak(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


async def load(subscriber: Subscriber, available: WeightsAvailable, model: dict[str, torch.Tensor]) -> None:
    """Take a version in as the embedded engine does."""
    tensors = await subscriber.fetch(available)
    copy_tensors((tensors[name], tensor) for name, tensor in model.items())
    tensors.check()
    tensors.release()


def warm_up(config: BroadcastConfig, run_folder: Path) -> None:
    """Do all of it with a small model."""
    learner, subscriber = Learner(config, run_folder), Subscriber(config, run_folder)
    for version in range(3):
        small = model_of(version, 4096)
        asyncio.run(load(subscriber, learner.publish(version, small), small))
    subscriber.close()
    learner.close()


def publish(config: BroadcastConfig, run_folder: Path) -> None:
    """Publish what is told, in place, as an optimizer does: a hundredth of the values changes."""
    model = model_of(0)
    memory = Memory()
    learner = Learner(config, run_folder)
    for order in orders(Publish):
        if order.version < 0:
            say(Peak(memory.peak()))
            continue
        for tensor in model.values():
            tensor[::100].fill_(float(order.version))
        say(learner.publish(order.version, model))
    learner.close()


async def subscribe(config: BroadcastConfig, run_folder: Path) -> None:
    """Load what is told."""
    model = model_of(-1)
    memory = Memory()
    subscriber = Subscriber(config, run_folder)
    given = orders(WeightsAvailable)
    while available := await asyncio.to_thread(next, given, None):
        await load(subscriber, available, model)
        peak, version = memory.peak(), available.version
        say(Peak(peak, all(bool((tensor[::100] == version).all() and not tensor[1:100].any()) for tensor in model.values())))
    subscriber.close()


def main() -> None:
    role, config_json, run_folder = sys.argv[1:]
    config = msgspec.json.decode(config_json, type=BroadcastConfig)
    warm_up(config, Path(run_folder) / f"warm-{role}")
    if role == "publish":
        publish(config, Path(run_folder))
    else:
        asyncio.run(subscribe(config, Path(run_folder)))


if __name__ == "__main__":
    main()
