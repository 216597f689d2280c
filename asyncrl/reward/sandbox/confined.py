"""One confined interpreter, seen from outside: messages to and from its driver, under one deadline and one memory limit.

Owns the process, the channel and the file that catches its error output. Reading never takes more than `max_frame_bytes`;
waiting never goes past the deadline; while it waits it adds up the resident memory of everything inside, because rlimits count
each process alone. `close` kills and reaps, whatever state things are in.

The driver says that it is ready before any program runs. What goes wrong until then is the sandbox's failure and raises
RewardError; what goes wrong afterwards is the program's doing and raises ProgramStopped, whatever it looks like.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import IO

from asyncrl.config.reward import CodeExecReward
from asyncrl.errors import RewardError

START_TIMEOUT_S = 60.0
_WATCH_INTERVAL_S = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Frame = dict[str, object]


class ProgramStopped(Exception):  # noqa: N818 - the program's fault, not ours: it scores what it passed so far
    """The confined interpreter ran into a limit or ended; the message says which."""


class Confined:
    """A running driver (guest.py). Not thread-safe; the time of the program starts when the driver is ready."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: socket.socket,
        errors: IO[bytes],
        limits: CodeExecReward,
        max_frame_bytes: int,
    ) -> None:
        """Take over a process, the channel to its driver and the file that its standard error is written to."""
        self.pid = process.pid
        """Of what was launched; everything inside is below it."""
        self.deadline_s = time.monotonic() + START_TIMEOUT_S
        self.beside: Confined | None = None
        """A driver whose memory counts together with this one's."""
        self._process, self._channel, self._errors = process, channel, errors
        self._limits, self._max_frame_bytes = limits, max_frame_bytes
        self._is_ready = False
        self._watched_s = time.monotonic()
        self._unsent = b""
        self._lent: socket.socket | None = None
        channel.setblocking(False)

    @property
    def has_ended(self) -> bool:
        """Whether the driver is gone."""
        return self._process.poll() is not None

    def send(self, frame: Frame, lent: socket.socket | None = None) -> None:
        """Queue a frame; what the channel does not take at once goes out while waiting in `receive`.

        Args:
            frame: The message.
            lent: One end of a session, which goes to the driver behind the frame and is closed here.
        """
        payload = json.dumps(frame).encode()
        self._unsent += struct.pack("<I", len(payload)) + payload
        self._lent = lent
        self._write_some()

    def begin(self) -> None:
        """Wait until the driver is ready, and start the clock of the program.

        Raises:
            RewardError: It does not come up.
        """
        try:
            is_ready = self.receive() == {"ready": True}
        except ProgramStopped as stopped:
            raise RewardError(f"the sandbox could not start: {stopped}") from stopped
        if not is_ready:
            raise RewardError("the sandbox could not start: its driver said something else")
        self._is_ready = True
        self.deadline_s = time.monotonic() + self._limits.wall_s

    def receive(self) -> Frame:
        """Return the driver's next frame.

        Raises:
            ProgramStopped: The deadline passed, memory ran over, the driver is gone, or it sent something that is no frame.
        """
        self.check()  # Not only while waiting: a program that floods its channel never lets us wait.
        (size,) = struct.unpack("<I", self._read_exactly(4))
        if size > self._max_frame_bytes:
            raise ProgramStopped(f"sent {size} bytes at once, {self._max_frame_bytes} are allowed")
        try:
            frame = json.loads(self._read_exactly(size))
        except (ValueError, RecursionError) as error:
            raise ProgramStopped(f"sent something that is no frame: {error}") from error
        if not isinstance(frame, dict):
            raise ProgramStopped("sent something that is no frame")
        return frame

    def check(self) -> None:
        """Raise ProgramStopped where the deadline or the memory limit is passed."""
        now_s = time.monotonic()
        if now_s > self.deadline_s:
            raise ProgramStopped(f"ran past {self._limits.wall_s if self._is_ready else START_TIMEOUT_S:g} s")
        if now_s - self._watched_s >= _WATCH_INTERVAL_S:
            resident_bytes = sum(resident_bytes_of_tree(each.pid) for each in (self, self.beside) if each is not None)
            self._watched_s = time.monotonic()
            if resident_bytes > self._limits.memory_bytes:
                raise ProgramStopped(f"its processes hold {resident_bytes} bytes, {self._limits.memory_bytes} are allowed")

    def close(self) -> None:
        """Kill everything inside, reap it, close the channel. Safe to repeat."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for each in (self._channel, self._errors, self._lent):
            if each is not None:
                each.close()

    def _read_exactly(self, size: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            try:
                chunk = self._channel.recv(min(size - len(chunks), 1 << 20))
            except BlockingIOError:
                self._wait()
                continue
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise self._gone()
            chunks += chunk
        return bytes(chunks)

    def _wait(self) -> None:
        """Sleep until the channel is ready or it is time to look at the limits again."""
        self.check()
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent or self._lent else 0))
        left_s = min(_WATCH_INTERVAL_S, max(self.deadline_s - time.monotonic(), 0))
        poll.poll(left_s * 1000 + 1)
        self._write_some()

    def _write_some(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
            if self._lent is not None:
                socket.send_fds(self._channel, [b"\0"], [self._lent.fileno()])
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._unsent = b""  # the reading side reports it
        if self._lent is not None:
            self._lent.close()
            self._lent = None

    def _gone(self) -> ProgramStopped:
        """Return what to raise now that the driver has closed its pipe."""
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return ProgramStopped("its driver closed the channel")
        self._errors.seek(0)
        said = self._errors.read(1000).decode("utf-8", "replace").strip()
        return ProgramStopped(f"its driver ended with status {status}" + (f": {said}" if said else ""))


def resident_bytes_of_tree(pid: int) -> int:
    """Return the resident memory of a process and all its descendants; those that end meanwhile count 0."""
    total, pids = 0, [pid]
    while pids:
        folder = Path("/proc", str(pids.pop()))
        try:
            total += int((folder / "statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
            for task in (folder / "task").iterdir():
                pids += map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:
            continue
    return total
