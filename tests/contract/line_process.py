"""A second process that tests talk to: a module of this folder, run by name; one JSON object a line, either way.

Here is the test's side (`LineProcess`, `LineProcesses`) and the two words that the other side needs (`say`, `orders`).
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300

Message = TypeVar("Message")


def say(message: object) -> None:
    """Say something to the test that started this process."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def orders(kind: type[Message]) -> Iterator[Message]:
    """Yield what the test tells this process, until it closes."""
    while line := sys.stdin.buffer.readline():
        yield msgspec.json.decode(line, type=kind)


class LineProcess:
    """One process, and the lines it says."""

    def __init__(self, module: str, *arguments: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def tell(self, message: object) -> None:
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def hear(self, kind: type[Message]) -> Message | None:
        """Return the next message; None where the process has ended."""
        line = self._lines.get(timeout=TIMEOUT_S)
        return msgspec.json.decode(line, type=kind) if line else None

    def hear_newest(self, kind: type[Message]) -> Message | None:
        """Wait for a message and return the last of those that are there by then."""
        message = self.hear(kind)
        while not self._lines.empty():
            message = self.hear(kind)
        return message

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=TIMEOUT_S)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=TIMEOUT_S)
        self._listener.join(timeout=TIMEOUT_S)
        self.process.stdout.close()


class LineProcesses:
    """Long-lived processes of one kind; one that was killed is replaced when it is next needed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._started = (module, *arguments)
        self._processes: list[LineProcess] = []

    def take(self, number: int) -> list[LineProcess]:
        for index, one in enumerate(self._processes):
            if one.process.poll() is not None:
                one.close()
                self._processes[index] = LineProcess(*self._started)
        while len(self._processes) < number:
            self._processes.append(LineProcess(*self._started))
        return self._processes[:number]

    def close(self) -> None:
        for one in self._processes:
            one.close()
