"""The other processes of test_collective_faults.py: a member that receives where its model would be, and can stop in the middle.

Reads one order a line, says one line for each thing that happens; between two tensors it waits for a line where told to.
"""

import sys
import time

import msgspec
import torch

from asyncrl.errors import BroadcastError
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.collective_member import CollectiveReceiver
from tests.contract.line_process import orders, say


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


def receive(receiver: CollectiveReceiver, order: Receive) -> Received:
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
    return Received(version, len(names), sorted(values), time.monotonic() - started_s, error=error)


def main() -> None:
    receiver = CollectiveReceiver("gloo", float(sys.argv[1]))
    for order in orders(Receive):
        say(receive(receiver, order))
    receiver.close()


if __name__ == "__main__":
    main()
