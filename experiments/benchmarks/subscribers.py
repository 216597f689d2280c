"""Ways to get the same weights into other processes, measured from the first call to the last subscriber's word that it is live.

`Subscribers` starts processes and speaks to them over pipes. One is told which medium to open, then what to take; it fetches as a
generator does and answers when the bytes are verified and in the weights it holds. A way is opened once, then asked for one
hand-over after another, to the first `n` of them: a publisher here and subscribers there, or bare pyzmq.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from asyncrl.transport.security import make_keys
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.shm_segments import remove_leftover_segments
from asyncrl.weights.subscriber import Subscriber

TIMEOUT_S = 120.0


class Subscribers:
    """The processes. An order is the name of a method of `_Process` and its arguments."""

    def __init__(self, count: int) -> None:
        """Start them."""
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(count)]
        self.processes = [spawn.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        self._pipes = [ours for ours, _ in pipes]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def tell(self, numbers: Iterable[int], order: str, *arguments: object) -> None:
        """Send an order to some of them."""
        for number in numbers:
            self._pipes[number].send((order, arguments))

    def wait(self, numbers: Iterable[int]) -> dict[str, float]:
        """Return how long the slowest of them took for what they were told."""
        said = [self._pipes[number].recv() for number in numbers]
        return {name: max((one[name] for one in said), default=0.0) for name in ("fetch_ms", "load_ms")}

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(TIMEOUT_S)
            process.kill()
            process.join()


class _Process:
    """What a subscriber process holds. What it is told to do returns when all was fetched."""

    def __init__(self) -> None:
        self._subscriber: Subscriber | None = None
        self._held: dict[str, torch.Tensor] = {}
        self._flat = np.zeros(0, np.uint8)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    async def open(self, config: BroadcastConfig, run_folder: Path) -> float:
        """Subscribe to this run, instead of any before."""
        self.close()
        self._subscriber = Subscriber(config, run_folder)
        return time.perf_counter()

    async def take(self, available: WeightsAvailable) -> float:
        """Take a version that was announced."""
        assert self._subscriber is not None
        if not self._held:
            flat = torch.zeros(available.manifest.total_bytes, dtype=torch.uint8)
            self._held = {name: tensor.clone() for name, tensor in view_tensors(flat, available.manifest).items()}
        tensors = await self._subscriber.fetch(available)
        fetched_s = time.perf_counter()
        copy_tensors((tensor, self._held[name]) for name, tensor in tensors.items())  # as an engine does
        tensors.check()
        tensors.release()
        return fetched_s

    async def take_parts(self, address: str, num_bytes: int) -> float:
        """Take so many bytes that are pushed at this address."""
        if address not in self._sockets:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
            socket.rcvhwm = 8
            socket.connect(address)
            self._sockets[address] = socket
        if self._flat.size != num_bytes:
            self._flat = np.zeros(num_bytes, np.uint8)
        arrived = 0
        while arrived < num_bytes:
            part = np.frombuffer(self._sockets[address].recv(copy=False).buffer, np.uint8)
            self._flat[arrived : arrived + part.size] = part
            arrived += part.size
        return time.perf_counter()

    def close(self) -> None:
        """Leave the run."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = None


def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        process = _Process()
        with contextlib.suppress(EOFError):
            while True:
                order, arguments = await asyncio.to_thread(pipe.recv)
                started_s = time.perf_counter()
                fetched_s = await getattr(process, order)(*arguments)
                pipe.send({"fetch_ms": (fetched_s - started_s) * 1e3, "load_ms": (time.perf_counter() - fetched_s) * 1e3})
        process.close()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve())


class MediumWay:
    """One of our media."""

    def __init__(self, config: BroadcastConfig, run_folder: Path, peers: Subscribers, *, is_encrypted: bool = False) -> None:
        """Open a publisher; with `is_encrypted`, in a run that has keys."""
        run_folder.mkdir()
        if is_encrypted:
            make_keys(run_folder)
        self._config, self._run_folder, self._peers = config, run_folder, peers
        self._num_open = self._version = 0
        self._announced: queue.SimpleQueue[WeightsAvailable] = queue.SimpleQueue()
        self._publisher = Publisher(config, run_folder, self._announced.put, SystemClock())

    def hand_over(self, weights: Mapping[str, torch.Tensor], count: int) -> dict[str, float]:
        """Publish the next version, have the first `count` take it, and wait until it is live there."""
        newcomers = range(self._num_open, count)
        self._peers.tell(newcomers, "open", self._config, self._run_folder)
        self._peers.wait(newcomers)
        self._num_open, self._version = max(self._num_open, count), self._version + 1
        next(iter(weights.values())).view(torch.uint8).view(-1)[0] ^= 1  # a version equal to the one before is not fetched at all
        started_s = time.perf_counter()
        blocked_ms = self._publisher.publish(self._version, weights)
        available = self._announced.get(timeout=TIMEOUT_S)
        announced_s = time.perf_counter()
        self._peers.tell(range(count), "take", available)
        slowest = self._peers.wait(range(count))
        live_ms, announced_ms = (time.perf_counter() - started_s) * 1e3, (announced_s - started_s) * 1e3
        told = {"live_ms": live_ms, "blocked_ms": blocked_ms, "announced_ms": announced_ms}
        return told | slowest | {"bytes": float(available.update_bytes)}

    def close(self) -> None:
        """End the publisher; subscribers let go when they open something else or end."""
        self._publisher.close()


@contextmanager
def bare_zeromq(num_bytes: int, peers: Subscribers) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield what sends the bytes in parts over PUSH and PULL to the first subscriber; nothing is verified or loaded."""
    whole, part_bytes = memoryview(bytearray(num_bytes)), ZeroMQMedium().chunk_bytes
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.sndhwm, socket.linger = 8, 0
        address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

        def hand_over() -> dict[str, float]:
            started_s = time.perf_counter()
            peers.tell([0], "take_parts", address, num_bytes)
            for start in range(0, num_bytes, part_bytes):
                socket.send(whole[start : start + part_bytes], copy=False)
            fetch_ms = peers.wait([0])["fetch_ms"]
            return {"live_ms": (time.perf_counter() - started_s) * 1e3, "fetch_ms": fetch_ms}

        yield hand_over


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder. Segments of runs in it go with it."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", ignore_cleanup_errors=True) as name:
        try:
            yield Path(name)
        finally:
            for run_folder in (Path(name), *(path for path in Path(name).iterdir() if path.is_dir())):
                remove_leftover_segments(run_folder)
