"""Ways to get the same weights into other processes, measured from the first call to the last subscriber's word that it is live.

`Subscribers` starts processes and speaks to them over pipes. One is told which medium to open, then what to take. It fetches as a
generator does and answers when the bytes are verified and in the weights it holds. A way is opened for so many of them, then
asked for one hand-over after another: a publisher here and subscribers there, or bare pyzmq.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import zmq

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig, ZeroMQMedium
from asyncrl.models.layout import copy_tensors, view_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.subscriber import Subscriber
from benchmarks.harness import SPAWN

TIMEOUT_S = 120.0


class Subscribers:
    """The processes. An order is the name of a method of `_Process` and its arguments, and goes to the first `count` of them."""

    def __init__(self, most: int) -> None:
        """Start them."""
        pipes = [SPAWN.Pipe() for _ in range(most)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [SPAWN.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def tell(self, count: int, order: str, *arguments: object) -> None:
        """Send an order."""
        for pipe in self._pipes[:count]:
            pipe.send((order, arguments))

    def wait(self, count: int) -> dict[str, float]:
        """Return how long the slowest took for what they were told."""
        said = [pipe.recv() for pipe in self._pipes[:count]]
        return {name: max(one[name] for one in said) for name in said[0]}

    def close(self) -> None:
        """End them; one that stays is killed as this process ends."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(TIMEOUT_S)


class _Process:
    """What a subscriber process holds. What it is told to do returns how long its parts took."""

    def __init__(self) -> None:
        self._loop, self._leaving = asyncio.Runner(), contextlib.ExitStack()
        self._held: dict[str, torch.Tensor] = {}

    def open(self, config: BroadcastConfig, run_folder: Path) -> dict[str, float]:
        """Subscribe to this run, instead of any before."""
        self._leaving.close()
        self._subscriber = self._leaving.enter_context(contextlib.closing(Subscriber(config, run_folder)))
        return {}

    def take(self, available: WeightsAvailable) -> dict[str, float]:
        """Take a version that was announced."""
        if not self._held:
            flat = torch.zeros(available.manifest.total_bytes, dtype=torch.uint8)
            self._held = {name: tensor.clone() for name, tensor in view_tensors(flat, available.manifest).items()}
        started_s = time.perf_counter()
        tensors = self._loop.run(self._subscriber.fetch(available))
        fetched_s = time.perf_counter()
        copy_tensors((tensor, self._held[name]) for name, tensor in tensors.items())  # as an engine does
        tensors.check()
        tensors.release()
        return {"fetch_ms": (fetched_s - started_s) * 1e3, "load_ms": (time.perf_counter() - fetched_s) * 1e3}

    def open_parts(self, address: str, num_bytes: int) -> dict[str, float]:
        """Connect to where bytes are pushed."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(8)
        self._flat = np.zeros(num_bytes, np.uint8)
        self._socket.connect(address)
        return {}

    def take_parts(self) -> dict[str, float]:
        """Take all of them."""
        arrived = 0
        while arrived < self._flat.size:
            part = np.frombuffer(self._socket.recv(copy=False).buffer, np.uint8)
            self._flat[arrived : arrived + part.size] = part
            arrived += part.size
        return {}


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = _Process()
    with contextlib.suppress(EOFError):
        while True:
            order, arguments = pipe.recv()
            pipe.send(getattr(process, order)(*arguments))


@contextmanager
def medium(
    config: BroadcastConfig, run_folder: Path, weights: Mapping[str, torch.Tensor], peers: Subscribers, count: int
) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield what publishes the next version over one of our media and waits until the first `count` peers have it live."""
    announced: queue.SimpleQueue[WeightsAvailable] = queue.SimpleQueue()
    versions = itertools.count(1)
    with contextlib.closing(Publisher(config, run_folder, announced.put, SystemClock())) as publisher:
        peers.tell(count, "open", config, run_folder)
        peers.wait(count)

        def hand_over() -> dict[str, float]:
            next(iter(weights.values())).view(torch.uint8).view(-1)[0] ^= 1  # a version equal to the last is not fetched at all
            started_s = time.perf_counter()
            blocked_ms = publisher.publish(next(versions), weights)
            available = announced.get(timeout=TIMEOUT_S)
            announced_s = time.perf_counter()
            peers.tell(count, "take", available)
            slowest = peers.wait(count)
            live_ms, announced_ms = (time.perf_counter() - started_s) * 1e3, (announced_s - started_s) * 1e3
            told = {"live_ms": live_ms, "blocked_ms": blocked_ms, "announced_ms": announced_ms}
            return told | slowest | {"bytes": float(available.update_bytes)}

        yield hand_over


@contextmanager
def bare_zeromq(num_bytes: int, peers: Subscribers) -> Iterator[Callable[[], float]]:
    """Yield what pushes the bytes in parts to the first subscriber and returns milliseconds; nothing is verified or loaded."""
    whole, part_bytes = memoryview(bytearray(num_bytes)), ZeroMQMedium().chunk_bytes
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.sndhwm, socket.linger = 8, 0
        peers.tell(1, "open_parts", f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", num_bytes)
        peers.wait(1)

        def hand_over() -> float:
            started_s = time.perf_counter()
            peers.tell(1, "take_parts")
            for start in range(0, num_bytes, part_bytes):
                socket.send(whole[start : start + part_bytes], copy=False)
            peers.wait(1)
            return (time.perf_counter() - started_s) * 1e3

        yield hand_over
