"""Subscriber processes of the broadcast benchmark: they fetch as a generator does, and load into weights they hold.

`Subscribers` starts them and speaks to them over pipes. A process
is told which medium to open (`Open`), then what to take; it says `Live` when the bytes are verified and in the weights it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq

from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.models.layout import copy_tensors, view_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.subscriber import Subscriber

TIMEOUT_S = 120.0


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
        self._context = zmq.Context()
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
                    socket = self._sockets[address] = self._context.socket(zmq.PULL)
                    socket.rcvhwm = 8
                    socket.connect(address)
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

    def end(self) -> None:
        """Close everything."""
        self.close()
        self._context.destroy(linger=0)


def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        process = _Process()
        with contextlib.suppress(EOFError):
            while True:
                order: Order = msgspec.msgpack.decode(await asyncio.to_thread(pipe.recv_bytes), type=Order)  # type: ignore[arg-type]
                pipe.send_bytes(msgspec.msgpack.encode(await process.carry_out(order)))
        process.end()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve())
