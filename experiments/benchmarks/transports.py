"""Ways to get the same weights into other processes, measured from the first call to the last subscriber's word that it is live.

A way is opened once, then asked for one hand-over after another, to the first `n` of the subscriber processes. Ours are a
publisher here and subscribers there; the others are what people do without: `torch.save` and `torch.load` through a file in
memory, Ray's object store, and the bytes in parts over bare pyzmq.

Also here: the folders of such a benchmark. They go when it ends, at SIGTERM too; those of one that was killed go when the next
one starts. Weights lie in memory (/dev/shm) that nobody gives back by itself; a folder's name says whose it is.
"""

from __future__ import annotations

import ctypes
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import zmq

from asyncrl.clock import SystemClock
from asyncrl.config.broadcast import BroadcastConfig, ZeroMQMedium
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.transport.security import make_keys
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.shm_segments import SHARED_FOLDER, remove_leftover_segments
from benchmarks.samples import local_ray
from benchmarks.subscribers import TIMEOUT_S, Live, Open, Subscribers, Take, TakeFile, TakeParts

RAY_STORE_BYTES = 1 << 30
_PREFIX = "asyncrl-bench-"
_PR_SET_PDEATHSIG = 1

HandOver = Callable[[int], dict[str, float]]
"""Hands the weights to so many subscribers; returns figures of this one time, `live_ms` among them."""


def slowest(lives: Sequence[Live]) -> dict[str, float]:
    """Return the longest fetch and load."""
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
            **slowest(lives),
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
    return {"live_ms": live_ms, "blocked_ms": (saved_s - started_s) * 1e3, **slowest(lives)}


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
    base = SHARED_FOLDER if in_memory and SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        _remove(folder)


def remove_leftovers() -> list[Path]:
    """Remove the folders of benchmarks that no longer run; return them."""
    found = [path for base in (SHARED_FOLDER, Path(tempfile.gettempdir())) for path in base.glob(f"{_PREFIX}*-*")]
    leftovers = [path for path in found if path.is_dir() and not psutil.pid_exists(_owner(path))]
    for path in leftovers:
        _remove(path)
    return leftovers


def end_tidily() -> None:
    """Let SIGTERM unwind this process, and ask for one when the parent dies."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _remove(folder: Path) -> None:
    """Remove a folder, and what runs in it, or it as a run, left in shared memory."""
    for run_folder in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        remove_leftover_segments(run_folder)
    shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> int:
    """Return the process that made a folder; this one where the name does not say: such is left alone."""
    number = folder.name.removeprefix(_PREFIX).partition("-")[0]
    return int(number) if number.isdecimal() else os.getpid()
