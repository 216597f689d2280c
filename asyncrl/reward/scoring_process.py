"""One scoring process, seen from the pool's event loop: start, ask, kill.

Owns the process and the socket to it from the constructor on: whoever makes one kills and reaps it, however far `begin` came.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import msgspec

from asyncrl.config.reward import RewardConfig
from asyncrl.errors import ConfigError, RewardError
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.wire import LENGTH, Begin, Judgement, Ready, frame

START_TIMEOUT_S = 120.0
"""Importing what rewards need, on a busy machine."""
_judgements = msgspec.msgpack.Decoder(Judgement)


class ProcessDied(Exception):  # noqa: N818 - an event to handle, not an error of ours
    """The scoring process is gone; the message says how it ended."""


class ScoringProcess:
    """A child that scores samples one after the other, in the order sent."""

    def __init__(self) -> None:
        """Start the child, which waits to be told what to score by.

        Raises:
            RewardError: It cannot be started.
        """
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                [sys.executable, "-m", "asyncrl.reward.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            raise RewardError(f"cannot start a scoring process: {error}") from error
        finally:
            theirs.close()

    async def begin(self, config: RewardConfig) -> None:
        """Wait until the child has built its rewards.

        Raises:
            ConfigError: The rewards are configured wrongly.
            RewardError: They cannot be built here (a missing package, no sandbox), or the child did not come up.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._writer.write(frame(Begin(config, os.getpid(), tuple(sys.path))))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = msgspec.msgpack.decode(await self._read(), type=Ready)
        except TimeoutError as error:
            raise RewardError(f"a scoring process did not come up within {START_TIMEOUT_S:g} s") from error
        except ProcessDied as died:
            raise RewardError(f"a scoring process could not start: {died}; its words are in the worker's log") from died
        if ready.error:
            raise (ConfigError if ready.is_config_error else RewardError)(ready.error)

    @property
    def pid(self) -> int:
        """The process id of the child, which is also that of its process group."""
        return self._process.pid

    def send(self, samples: list[RewardInput]) -> None:
        """Hand over samples to score, in order; a dead child is noticed by `judgement`.

        Does not wait: a hanging child would not read, and its time limit runs in `judgement`. The caller bounds the batch.
        """
        assert self._writer is not None, "begin comes first"
        self._writer.write(b"".join(map(frame, samples)))

    async def judgement(self) -> Judgement:
        """Return the next sample's judgement.

        Raises:
            ProcessDied: The child ended instead.
        """
        return _judgements.decode(await self._read())

    def kill(self) -> None:
        """End the child and all it started, now. Safe to repeat."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    async def reap(self) -> None:
        """Wait for the end of the child and close the socket to it. Safe to repeat, and to repeat when it was cancelled."""
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        await asyncio.to_thread(self._process.wait)

    async def _read(self) -> bytes:
        assert self._reader is not None, "begin comes first"
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ProcessDied(await self._how_it_ended()) from error

    async def _how_it_ended(self) -> str:
        try:
            status = await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
