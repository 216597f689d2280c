"""Ways to get the same weights into other processes, measured from the first call to the last subscriber's word that it is live.

`Subscribers` starts processes and speaks to them over pipes. One is told which medium to open (`Open`), then what to take; it
fetches as a generator does and says `Live` when the bytes are verified and in the weights it holds. A way is opened once, then
asked for one hand-over after another, to the first `n` of them. Ours are a publisher here and subscribers there; the others are
what people do without: `torch.save` and `torch.load` through a file in memory, Ray's object store, and bare pyzmq.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig, ZeroMQMedium
from asyncrl.models.layout import copy_tensors, view_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.transport.security import make_keys
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.shm_segments import SHARED_FOLDER, remove_leftover_segments
from asyncrl.weights.subscriber import Subscriber
from benchmarks.samples import local_ray

TIMEOUT_S = 120.0
RAY_STORE_BYTES = 1 << 30


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Subscribe to this run, instead of any before."""

    config: BroadcastConfig
    run_folder: str


class Take(msgspec.Struct, frozen=True, tag="take"):
    """A version was announced."""

    available: WeightsAvailable


class TakeFile(msgspec.Struct, frozen=True, tag="take_file"):
    """`torch.save` wrote this."""

    path: str


class TakeParts(msgspec.Struct, frozen=True, tag="take_parts"):
    """So many bytes will be pushed at this address."""

    address: str
    num_bytes: int


class Live(msgspec.Struct, frozen=True, tag="live"):
    """What was to be taken is in place, or what was to be opened is open."""

    fetch_ms: float = 0.0
    load_ms: float = 0.0


Order = Open | Take | TakeFile | TakeParts


class Subscribers:
    """The processes.

    Example:
        >>> peers = Subscribers(2)  # doctest: +SKIP
        >>> peers.tell([0, 1], Take(available)); peers.wait([0, 1])  # doctest: +SKIP
    """

    def __init__(self, count: int) -> None:
        """Start them."""
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(count)]
        self.processes = [spawn.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        self._pipes = [ours for ours, _ in pipes]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def tell(self, numbers: Iterable[int], order: Order) -> None:
        """Send an order to some of them."""
        for number in numbers:
            self._pipes[number].send_bytes(msgspec.msgpack.encode(order))

    def wait(self, numbers: Iterable[int]) -> list[Live]:
        """Return what each of them says next."""
        return [msgspec.msgpack.decode(self._pipes[number].recv_bytes(), type=Live) for number in numbers]

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(TIMEOUT_S)
            process.kill()
            process.join()


class _Process:
    """What a subscriber process holds."""

    def __init__(self) -> None:
        self._subscriber: Subscriber | None = None
        self._held: dict[str, torch.Tensor] = {}
        self._flat = np.zeros(0, np.uint8)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    async def carry_out(self, order: Order) -> Live:
        """Do as told and say how long what took."""
        started_s = time.perf_counter()
        match order:
            case Open():
                self.close()
                self._subscriber = Subscriber(order.config, Path(order.run_folder))
                return Live()
            case Take(available):
                assert self._subscriber is not None
                if not self._held:
                    flat = torch.zeros(available.manifest.total_bytes, dtype=torch.uint8)
                    self._held = {name: tensor.clone() for name, tensor in view_tensors(flat, available.manifest).items()}
                tensors = await self._subscriber.fetch(available)
                fetched_s = time.perf_counter()
                self._load(tensors)
                tensors.check()
                tensors.release()
            case TakeFile(path):
                loaded = torch.load(path, map_location="cpu", weights_only=True)
                fetched_s = time.perf_counter()
                self._load(loaded)
            case TakeParts(address, num_bytes):
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
                fetched_s = time.perf_counter()
        live_s = time.perf_counter()
        return Live((fetched_s - started_s) * 1e3, (live_s - fetched_s) * 1e3)

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy in, as an engine does (generate/transformers/weight_loader.py)."""
        self._held = self._held or {name: tensor.clone() for name, tensor in tensors.items()}
        copy_tensors((tensor, self._held[name]) for name, tensor in tensors.items())

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
                order: Order = msgspec.msgpack.decode(await asyncio.to_thread(pipe.recv_bytes), type=Order)  # type: ignore[arg-type]
                pipe.send_bytes(msgspec.msgpack.encode(await process.carry_out(order)))
        process.close()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve())


HandOver = Callable[[int], dict[str, float]]
"""Hands the weights to so many subscribers; returns figures of this one time, `live_ms` among them."""


def _slowest(lives: Sequence[Live]) -> dict[str, float]:
    return {"fetch_ms": max(live.fetch_ms for live in lives), "load_ms": max(live.load_ms for live in lives)}


class MediumWay:
    """One of our media."""

    def __init__(self, config: BroadcastConfig, run_folder: Path, peers: Subscribers, *, is_encrypted: bool = False) -> None:
        """Open a publisher; with `is_encrypted`, in a run that has keys."""
        run_folder.mkdir()
        self._open = Open(config, str(run_folder))
        if is_encrypted:
            make_keys(run_folder)
        self._peers = peers
        self._num_open = 0
        self._version = 0
        self._announced: queue.SimpleQueue[WeightsAvailable] = queue.SimpleQueue()
        self._publisher = Publisher(config, run_folder, self._announced.put, SystemClock())

    def publish(self, weights: Mapping[str, torch.Tensor]) -> tuple[WeightsAvailable, float]:
        """Publish the next version; return its announcement and how long the learner was blocked."""
        self._version += 1
        next(iter(weights.values())).view(torch.uint8).view(-1)[0] ^= 1  # a version equal to the one before is not fetched at all
        blocked_ms = self._publisher.publish(self._version, weights)
        return self._announced.get(timeout=TIMEOUT_S), blocked_ms

    def hand_over(self, weights: Mapping[str, torch.Tensor], count: int) -> dict[str, float]:
        """Publish, have the first `count` take it, and wait until it is live there."""
        numbers = range(count)
        if count > self._num_open:
            newcomers = range(self._num_open, count)
            self._peers.tell(newcomers, self._open)
            self._peers.wait(newcomers)
            self._num_open = count
        started_s = time.perf_counter()
        available, blocked_ms = self.publish(weights)
        announced_s = time.perf_counter()
        self._peers.tell(numbers, Take(available))
        lives = self._peers.wait(numbers)
        live_s = time.perf_counter()
        return {
            "live_ms": (live_s - started_s) * 1e3,
            "blocked_ms": blocked_ms,
            "announced_ms": (announced_s - started_s) * 1e3,
            **_slowest(lives),
            "bytes": float(available.update_bytes),
        }

    def close(self) -> None:
        """End the publisher; subscribers let go when they open something else or end."""
        self._publisher.close()


def file_hand_over(weights: Mapping[str, torch.Tensor], count: int, path: Path, peers: Subscribers) -> dict[str, float]:
    """Hand over by `torch.save` and `torch.load`."""
    started_s = time.perf_counter()
    torch.save(dict(weights), path)
    saved_s = time.perf_counter()
    peers.tell(range(count), TakeFile(str(path)))
    lives = peers.wait(range(count))
    live_ms = (time.perf_counter() - started_s) * 1e3
    return {"live_ms": live_ms, "blocked_ms": (saved_s - started_s) * 1e3, **_slowest(lives)}


class BareZeroMQ:
    """The bytes in parts over PUSH and PULL, gathered in one buffer at the other end; nothing is verified or loaded."""

    def __init__(self, num_bytes: int, peers: Subscribers) -> None:
        self._bytes = memoryview(bytearray(num_bytes))
        self._peers = peers
        self._part_bytes = ZeroMQMedium().chunk_bytes
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = 8
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._address = f"tcp://127.0.0.1:{port}"

    def hand_over(self) -> dict[str, float]:
        """Send all parts to the first subscriber process."""
        started_s = time.perf_counter()
        self._peers.tell([0], TakeParts(self._address, len(self._bytes)))
        for start in range(0, len(self._bytes), self._part_bytes):
            self._socket.send(self._bytes[start : start + self._part_bytes], copy=False)
        lives = self._peers.wait([0])
        return {"live_ms": (time.perf_counter() - started_s) * 1e3, "fetch_ms": lives[0].fetch_ms}

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


@contextmanager
def ray_store(weights: Mapping[str, torch.Tensor], most: int) -> Iterator[HandOver | None]:
    """Start Ray with `most` actors that hold weights; yield what hands them over; None where there is no Ray."""
    with local_ray(object_store_memory=RAY_STORE_BYTES) as ray:
        if ray is None:
            yield None
            return

        class Holder:
            """Holds weights, as raw bytes: Ray shares numpy arrays without a copy, and numpy has no bfloat16."""

            def __init__(self) -> None:
                self._held: dict[str, Any] = {}

            def take(self, arrays: dict[str, Any]) -> None:
                for name, array in arrays.items():
                    np.copyto(self._held.setdefault(name, np.zeros_like(array)), array)

        holders = [ray.remote(num_cpus=0)(Holder).remote() for _ in range(most)]

        def hand_over(count: int) -> dict[str, float]:
            started_s = time.perf_counter()
            stored = ray.put({name: tensor.view(torch.uint8).numpy() for name, tensor in weights.items()})
            put_s = time.perf_counter()
            ray.get([holder.take.remote(stored) for holder in holders[:count]], timeout=TIMEOUT_S)
            return {"live_ms": (time.perf_counter() - started_s) * 1e3, "blocked_ms": (put_s - started_s) * 1e3}

        yield hand_over


@contextmanager
def scratch_folder(*, in_memory: bool = False) -> Iterator[Path]:
    """Yield a new folder; in memory, where the system has such a place. Segments of runs in it go with it."""
    base = SHARED_FOLDER if in_memory and SHARED_FOLDER.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", dir=base, ignore_cleanup_errors=True) as name:
        try:
            yield Path(name)
        finally:
            for run_folder in (Path(name), *(path for path in Path(name).iterdir() if path.is_dir())):
                remove_leftover_segments(run_folder)
