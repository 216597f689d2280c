"""Subscriber processes of the broadcast benchmark: they fetch as a generator does, and load into weights they hold.

`Subscribers` starts them and speaks to them over their standard input and output; run as a module this is one of them. A process
is told which medium to open (`Open`), then what to take; it says `Live` when the bytes are verified and in the weights it holds.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import numpy as np
import torch
import zmq

from asyncrl.broadcast.subscriber import Subscriber
from asyncrl.broadcast.zeromq import CurveKeys
from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.models.copying import copy_tensors
from asyncrl.models.layout import view_tensors
from asyncrl.models.mapped import MappedTensors
from asyncrl.schema.weights import WeightsAvailable, WeightsManifest

TIMEOUT_S = 120.0

Message = TypeVar("Message")


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Subscribe to this run, instead of any before."""

    config: BroadcastConfig
    run_folder: str
    public: str = ""
    secret: str = ""
    learner: str = ""


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
        >>> peers.tell(2, Take(available)); peers.wait(2)  # doctest: +SKIP
    """

    def __init__(self, count: int) -> None:
        """Start them."""
        command = [sys.executable, "-m", "asyncrl.bench.subscribers"]
        self.processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]  # noqa: S603

    def tell(self, numbers: Sequence[int], order: Order) -> None:
        """Send an order to some of them."""
        for number in numbers:
            stream = self.processes[number].stdin
            assert stream is not None
            _send(stream, order)

    def wait(self, numbers: Sequence[int]) -> list[Live]:
        """Return what each of them says next."""
        said = []
        for number in numbers:
            stream = self.processes[number].stdout
            assert stream is not None
            live = _receive(stream, Live)
            assert live is not None, f"subscriber {number} broke off"
            said.append(live)
        return said

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _send(stream: IO[bytes], message: msgspec.Struct) -> None:
    frame = msgspec.msgpack.encode(message)
    stream.write(len(frame).to_bytes(4, "little") + frame)
    stream.flush()


def _receive(stream: IO[bytes], kind: type[Message]) -> Message | None:
    """Return the next message, None at the end of the stream."""
    frame = _receive_frame(stream)
    return msgspec.msgpack.decode(frame, type=kind) if frame is not None else None


def _receive_frame(stream: IO[bytes]) -> bytes | None:
    size = stream.read(4)
    return stream.read(int.from_bytes(size, "little")) if size else None


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
                await self._open(order)
                return Live()
            case Take(available):
                assert self._subscriber is not None
                self._held = self._held or _empty_weights(available.manifest)
                tensors = await self._subscriber.fetch(available)
                fetched_s = time.perf_counter()
                self._load(tensors)
                tensors.check()
                tensors.release()
            case TakeFile(path):
                loaded = torch.load(path, map_location="cpu", weights_only=True)
                fetched_s = time.perf_counter()
                self._load(loaded)
            case TakeParts():
                self._take_parts(order)
                fetched_s = time.perf_counter()
        live_s = time.perf_counter()
        return Live((fetched_s - started_s) * 1e3, (live_s - fetched_s) * 1e3)

    async def _open(self, order: Open) -> None:
        keys = CurveKeys(order.public.encode(), order.secret.encode(), (order.learner.encode(),)) if order.public else None
        self._subscriber = Subscriber(order.config, Path(order.run_folder), curve_keys=keys)

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy in, as an engine does (generate/weights_in_place.py)."""
        self._held = self._held or {name: tensor.clone() for name, tensor in tensors.items()}
        if isinstance(tensors, MappedTensors):
            tensors.copy_into(self._held)
        else:
            copy_tensors((tensor, self._held[name]) for name, tensor in tensors.items())

    def _take_parts(self, order: TakeParts) -> None:
        if order.address not in self._sockets:
            socket = self._sockets[order.address] = self._context.socket(zmq.PULL)
            socket.rcvhwm = 8
            socket.connect(order.address)
        if self._flat.size != order.num_bytes:
            self._flat = np.zeros(order.num_bytes, np.uint8)
        arrived = 0
        while arrived < order.num_bytes:
            part = np.frombuffer(self._sockets[order.address].recv(copy=False).buffer, np.uint8)
            self._flat[arrived : arrived + part.size] = part
            arrived += part.size

    def close(self) -> None:
        """Leave the run."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = None

    def end(self) -> None:
        """Close everything."""
        self.close()
        self._context.destroy(linger=0)


def _empty_weights(manifest: WeightsManifest) -> dict[str, torch.Tensor]:
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    return {name: tensor.clone() for name, tensor in view_tensors(flat, manifest).items()}


async def _serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    process = _Process()
    while (frame := await asyncio.to_thread(_receive_frame, stdin)) is not None:
        order: Order = msgspec.msgpack.decode(frame, type=Order)
        _send(stdout, await process.carry_out(order))
    process.end()


if __name__ == "__main__":
    asyncio.run(_serve(sys.stdin.buffer, sys.stdout.buffer))
