"""The other processes of the tests here, run by line_process.py: what argv says, and then order by order.

subscribe          fetches, as a generator does
publish            publishes as fast as it goes, until it is killed
receive            receives where its model would be, as with `nccl`, and can stop in the middle
measured           a learner and a generator, each with a model, which know the peak of their memory
"""

import asyncio
import ctypes
import sys
import time
from pathlib import Path

import msgspec
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig, GlooMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import copy_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.base import ReceiverArguments
from asyncrl.weights.media.collective_member import CollectiveReceiver
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.subscriber import Subscriber
from tests.contract.line_process import orders, say
from tests.contract.media.learners import Learner, tensors_of

TENSOR_BYTES = 4 << 20
NUM_TENSORS = 16
MODEL_BYTES = NUM_TENSORS * TENSOR_BYTES


class Order(msgspec.Struct):
    """Fetch this."""

    config: BroadcastConfig
    run_folder: str
    available: WeightsAvailable


class Fetched(msgspec.Struct):
    """What became of one order."""

    version: int
    values: list[float]
    """Every distinct value among the tensors; one where the version is whole."""
    error: str = ""


async def subscribe() -> None:
    """Carry out every order that comes in, with one subscriber a run, and say what arrived."""
    subscribers: dict[str, Subscriber] = {}
    given = orders(Order)
    while order := await asyncio.to_thread(next, given, None):
        if order.run_folder not in subscribers:
            subscribers[order.run_folder] = Subscriber(order.config, Path(order.run_folder))
        try:
            tensors = await subscribers[order.run_folder].fetch(order.available)
            values = torch.cat([tensor.unique() for tensor in tensors.values()]).unique()
            tensors.check()
            tensors.release()
        except BroadcastError as error:
            say(Fetched(order.available.version, [], str(error)))
            continue
        say(Fetched(order.available.version, values.tolist()))
    for subscriber in subscribers.values():
        subscriber.close()


def publish(config: BroadcastConfig, run_folder: Path, num_values: int, num_versions: int) -> None:
    """Publish versions as fast as it goes; announce each; wait for the end of standard input before closing."""
    publisher = Publisher(config, run_folder, say, SystemClock())
    for version in range(1, num_versions + 1):
        publisher.publish(version, tensors_of(version, num_values))
    sys.stdin.buffer.read()
    publisher.close()


class Receive(msgspec.Struct):
    available: WeightsAvailable
    hold_after: int = -1
    """Wait for a line after this many tensors."""


class Received(msgspec.Struct):
    version: int
    num_tensors: int
    values: list[float]
    took_s: float
    is_held: bool = False
    error: str = ""


def receive(timeout_s: float) -> None:
    """Receive what is ordered, tensor by tensor."""
    receiver = CollectiveReceiver(msgspec.json.encode(ReceiverArguments("", GlooMedium(timeout_s=timeout_s))))
    for order in orders(Receive):
        version, started_s = order.available.version, time.monotonic()
        values: set[float] = set()
        names: list[str] = []
        error = ""
        try:
            for name, tensor in receiver.fetch(order.available, torch.device("cpu")):
                names.append(name)
                values |= set(tensor.unique().tolist())
                if len(names) == order.hold_after:
                    say(Received(version, len(names), sorted(values), 0.0, is_held=True))
                    sys.stdin.buffer.readline()
        except BroadcastError as failure:
            error = str(failure)
        assert len(set(names)) == len(names)
        say(Received(version, len(names), sorted(values), time.monotonic() - started_s, error=error))
    receiver.close()


class Case(msgspec.Struct):
    """Whole versions of a model by this config."""

    config: BroadcastConfig
    run_folder: str


class Peak(msgspec.Struct):
    """Most bytes in memory since the models were there, beyond those there were then."""

    num_bytes: int
    is_right: bool = True
    """Whether each version was loaded as it was published."""


class Memory:
    """What this process has in memory."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what a case before this has freed
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._read("VmRSS")

    def peak(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def publish_and_load(case: Case, folder: Path, num_values: int) -> Peak:
    """Publish some versions in place, as an optimizer does, and take each in as the embedded engine does."""
    trained, loaded = tensors_of(0, num_values, NUM_TENSORS), tensors_of(-1, num_values, NUM_TENSORS)
    are_right = True
    memory = Memory()
    learner, subscriber = Learner(case.config, folder), Subscriber(case.config, folder)
    for version in range(1, 5):
        for tensor in trained.values():
            tensor[::100].fill_(float(version))
        tensors = asyncio.run(subscriber.fetch(learner.publish(version, trained)))
        copy_tensors((tensors[name], tensor) for name, tensor in loaded.items())
        tensors.check()
        tensors.release()
        are_right &= all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())
    peak = Peak(memory.peak(), are_right)
    subscriber.close()
    learner.close()
    return peak


def measured() -> None:
    for case in orders(Case):
        folder = Path(case.run_folder)
        publish_and_load(case, folder / "warm", 4096)  # libraries, threads and sockets are not what is measured
        say(publish_and_load(case, folder, TENSOR_BYTES // 4))


def main() -> None:
    role, *told = sys.argv[1:]
    match role:
        case "subscribe":
            asyncio.run(subscribe())
        case "receive":
            receive(float(told[0]))
        case "publish":
            publish(msgspec.json.decode(told[0], type=BroadcastConfig), Path(told[1]), *map(int, told[2:]))
        case "measured":
            measured()


if __name__ == "__main__":
    main()
