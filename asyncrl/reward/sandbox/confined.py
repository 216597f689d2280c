"""One confined interpreter, seen from outside: messages to and from its driver, under one deadline and one memory limit.

Owns the process, both pipe ends and the file that catches its error output. Reading never takes more than `max_frame_bytes`;
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
import struct
import subprocess
import time
from pathlib import Path
from typing import IO, NamedTuple

from asyncrl.errors import RewardError

START_TIMEOUT_S = 60.0
_WATCH_INTERVAL_S = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Frame = dict[str, object]


class ProgramStopped(Exception):  # noqa: N818 - the program's fault, not ours: it scores what it passed so far
    """The confined interpreter ran into a limit or ended; the message says which."""


class ConfinedPipes(NamedTuple):
    """What a launch leaves behind, for `Confined` to own."""

    process: subprocess.Popen[bytes]
    read_fd: int
    write_fd: int
    errors: IO[bytes]
    """Where the process writes its standard error."""


class SessionPipes:
    """What carries sessions between a program and its judge, each in a sandbox; all four ends stay open here until `close`."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as opened:
            ends = []
            for _ in range(2):
                ends.append(os.pipe())
                for fd in ends[-1]:
                    opened.callback(os.close, fd)
            (program_reads, judge_writes), (self._judge_reads, program_writes) = ends
            self.of_program, self.of_judge = (program_reads, program_writes), (self._judge_reads, judge_writes)
            self.close = opened.pop_all().close

    def empty(self) -> None:
        """Discard what a program that has ended left for its judge, so that none of it is read in the next session."""
        poll = select.poll()
        poll.register(self._judge_reads, select.POLLIN)
        while poll.poll(0):
            os.read(self._judge_reads, 1 << 20)


class Confined:
    """A running driver (guest.py). Not thread-safe; the time of the program starts when the driver is ready.

    `beside` is a driver whose memory counts together with this one's.
    """

    def __init__(
        self, pipes: ConfinedPipes, wall_s: float, memory_bytes: int, max_frame_bytes: int, beside: Confined | None = None
    ) -> None:
        self.read_fd, self.write_fd = pipes.read_fd, pipes.write_fd
        self.deadline_s = time.monotonic() + START_TIMEOUT_S
        self._is_ready = False
        self._process, self._errors, self._beside = pipes.process, pipes.errors, beside
        self._wall_s, self._memory_bytes, self._max_frame_bytes = wall_s, memory_bytes, max_frame_bytes
        self._watched_s = time.monotonic()
        self._unsent = b""
        for fd in (self.read_fd, self.write_fd):
            os.set_blocking(fd, False)

    @property
    def pid(self) -> int:
        """Process id of what was launched; everything inside is below it."""
        return self._process.pid

    def send(self, frame: Frame) -> None:
        """Queue a frame; what the pipe does not take at once goes out while waiting in `receive`."""
        payload = json.dumps(frame).encode()
        self._unsent += struct.pack("<I", len(payload)) + payload
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
        self.deadline_s = time.monotonic() + self._wall_s

    def receive(self) -> Frame:
        """Return the driver's next frame.

        Raises:
            ProgramStopped: The deadline passed, memory ran over, the driver is gone, or it sent something that is no frame.
        """
        self.check()  # Not only while waiting: a program that floods its pipe never lets us wait.
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
            raise ProgramStopped(f"ran past {self._wall_s if self._is_ready else START_TIMEOUT_S:g} s")
        if now_s - self._watched_s >= _WATCH_INTERVAL_S:
            resident_bytes = self.resident_bytes()
            self._watched_s = time.monotonic()
            if resident_bytes > self._memory_bytes:
                raise ProgramStopped(f"its processes hold {resident_bytes} bytes, {self._memory_bytes} are allowed")

    def close(self) -> None:
        """Kill everything inside, reap it, close the pipes. Safe to repeat."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self.read_fd = self.write_fd = -1
        self._errors.close()

    def resident_bytes(self) -> int:
        """Return what all processes inside hold in memory, those of `beside` included."""
        return resident_bytes_of_tree(self._process.pid) + (self._beside.resident_bytes() if self._beside else 0)

    def _read_exactly(self, size: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            try:
                chunk = os.read(self.read_fd, min(size - len(chunks), 1 << 20))
            except BlockingIOError:
                self._wait()
                continue
            if not chunk:
                raise self._gone()
            chunks += chunk
        return bytes(chunks)

    def _wait(self) -> None:
        """Sleep until a pipe is ready or it is time to look at the limits again."""
        self.check()
        poll = select.poll()
        poll.register(self.read_fd, select.POLLIN)
        if self._unsent:
            poll.register(self.write_fd, select.POLLOUT)
        left_s = min(_WATCH_INTERVAL_S, max(self.deadline_s - time.monotonic(), 0))
        poll.poll(left_s * 1000 + 1)
        self._write_some()

    def _write_some(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.write_fd, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent = b""  # the reading side reports it

    def _gone(self) -> ProgramStopped:
        """Return what to raise now that the driver has closed its pipe."""
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return ProgramStopped("its driver closed the pipe")
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
