"""The scoring process: `python -m asyncrl.reward.child FD`, started and owned by reward/pool.py.

Strictly one sample after the other, in the main thread, with an event loop of its own for async rewards. It may hang, run out of
memory or die: the pool notices and replaces it. It dies with its parent, holds at most `process_memory_bytes` of data, and never
imports torch unless a user's reward does. Standard output of rewards goes to standard error, where the run's log is.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable

import msgspec

from asyncrl.errors import AsyncRLError, ConfigError, RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.registry import NamedReward, build_rewards, weighted_sum
from asyncrl.reward.wire import LENGTH, Begin, Judgement, Ready, frame

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the pool until it hangs up."""
    with socket.socket(fileno=int(sys.argv[1])) as pool:
        pool.set_inheritable(False)
        begin = msgspec.msgpack.decode(_read_frame(pool), type=Begin)
        _tie_to_parent(begin.parent_pid)
        _limit_memory(begin.config.process_memory_bytes)
        sys.path.extend(path for path in begin.import_paths if path not in sys.path)
        try:
            rewards = build_rewards(begin.config)
        except AsyncRLError as error:
            pool.sendall(frame(Ready(str(error), isinstance(error, ConfigError))))
            return
        pool.sendall(frame(Ready()))
        with asyncio.Runner() as runner:
            _serve(pool, rewards, runner)


def _serve(pool: socket.socket, rewards: tuple[NamedReward, ...], runner: asyncio.Runner) -> None:
    decoder = msgspec.msgpack.Decoder(RewardInput)

    def resolve(pending: Awaitable[float]) -> float:
        return runner.run(_await(pending))

    stream = pool.makefile("rb")
    while header := stream.read(LENGTH.size):
        sample = decoder.decode(stream.read(LENGTH.unpack(header)[0]))
        started_s = time.monotonic()
        try:
            reward, parts = weighted_sum(rewards, sample, resolve)
            judgement = Judgement(reward, parts, seconds=time.monotonic() - started_s)
        except RewardError as error:
            judgement = Judgement(error=str(error) or "RewardError", seconds=time.monotonic() - started_s)
        except MemoryError:
            # What filled the memory may still be held; a fresh process is the only sure way to get it back.
            pool.sendall(frame(Judgement(error="MemoryError: over reward.process_memory_bytes", retiring=True)))
            return
        pool.sendall(frame(judgement))


async def _await(pending: Awaitable[float]) -> float:
    return await pending


def _read_frame(pool: socket.socket) -> bytes:
    return _read_exactly(pool, LENGTH.unpack(_read_exactly(pool, LENGTH.size))[0])


def _read_exactly(pool: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = pool.recv(size - len(received))
        if not chunk:
            raise SystemExit(0)
        received += chunk
    return bytes(received)


def _tie_to_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies: a hanging C call would not see the socket close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(0)


def _limit_memory(limit_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit_bytes = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
