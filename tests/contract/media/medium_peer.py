"""The other process of test_medium.py and test_medium_relay.py: a publisher or a subscriber that can be killed.

Run by line_process.py; told what to do in argv. Announcements travel over its standard input or output, one JSON object a line,
as the controller would carry them.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.subscriber import Subscriber
from tests.contract.line_process import orders, say
from tests.contract.media.learners import tensors_of


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
    publisher.flush(30)
    sys.stdin.buffer.read()
    publisher.close()


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "subscribe":
        asyncio.run(subscribe())
    else:
        config_json, run_folder, *numbers = arguments
        publish(msgspec.json.decode(config_json, type=BroadcastConfig), Path(run_folder), *map(int, numbers))


if __name__ == "__main__":
    main()
