"""Starts learner, generators and inference workers as forks of one process that has imported torch and transformers.

That import takes 3 s of CPU. The fork server, a child of the controller, does it once. A process that is started, or started
again, then computes after tenths of a second, and shares the memory of what was imported. What uses an accelerator is started by
its command (local.py), for a CUDA context does not survive a fork.

The server has one thread, so a fork is a whole process. It reads one request a line from a socket, answers with the child's pid,
and says the exit code once the child is gone. A child has the server's standard input, which only the controller holds open.
multiprocessing's fork server would start one more process, leave a folder in /tmp where it is killed, and import the
controller's main module in every child.

Invariants:
- Answers come in the order of the requests, and a child's pid before its exit code.
- When the server is gone, so are its children: the controller kills them. The next start begins a new server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType

import msgspec
from setproctitle import getproctitle, setproctitle

from asyncrl.control.launch.local import LocalLauncher, LocalProcess, ProcessHandle, ProcessSpec, child_environment, kill_group
from asyncrl.control.launch.process_main import EXIT_OK, FORK_SERVER, imports_without_gc, leave
from asyncrl.errors import LaunchError
from asyncrl.schema.control import ProcessKind


class ForkRequest(msgspec.Struct, frozen=True):
    """What a child is to be."""

    command: list[str]
    """As a process of its own would be started: `python -P -m asyncrl.pipeline ...`."""
    log_path: str
    num_threads: int
    env: dict[str, str]


class ForkAnswer(msgspec.Struct, frozen=True):
    """A child was started, or is gone."""

    pid: int = 0
    code: int | None = None
    """Its exit code once it is gone; negative for a signal."""
    error: str = ""
    """Why it could not be started."""


class ForkLauncher:
    """Forks processes of some kinds, and starts the others by their command."""

    def __init__(self, run_folder: Path, kinds: Collection[ProcessKind], modules: Sequence[str]) -> None:
        """Start nothing yet.

        Args:
            run_folder: Of the run.
            kinds: Which are forked.
            modules: What they import.
        """
        self._run_folder = run_folder
        self._kinds = kinds
        self._modules = modules
        self._local = LocalLauncher()
        self._server: _Server | None = None
        self._process: LocalProcess | None = None
        self._starting = asyncio.Lock()

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start one process; see `Launcher.start`."""
        if spec.kind not in self._kinds:
            return await self._local.start(spec)
        async with self._starting:
            if self._server is None or self._server.is_gone:
                await self.close()
                self._server = await self._start_server(spec)
        return await self._server.fork(spec)

    async def close(self) -> None:
        """End the server, and its children where any are left."""
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    async def _start_server(self, spec: ProcessSpec) -> _Server:
        ours, theirs = socket.socketpair()
        with theirs:
            command = (*spec.command[:4], FORK_SERVER, str(self._run_folder), str(theirs.fileno()), *self._modules)
            log_path = self._run_folder / "logs" / "controller.log"
            server = replace(spec, name=FORK_SERVER, command=command, log_path=log_path, num_threads=1, env={})
            try:
                self._process = await self._local.start(server, pass_fds=(theirs.fileno(),))
            except BaseException:
                ours.close()
                raise
        return (await asyncio.get_running_loop().create_unix_connection(_Server, sock=ours))[1]


class ForkedProcess:
    """A child of the fork server and everything in its process group."""

    def __init__(self, pid: int, code: asyncio.Future[int]) -> None:
        self.pid = pid
        """Also the id of its group."""
        self._code = code

    async def wait(self) -> int:
        """Return its exit code once it is gone and the rest of its group was killed."""
        code = await asyncio.shield(self._code)
        kill_group(self.pid)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process alone: it ends its own helpers."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        self._send(signal.SIGKILL)  # one that was forked just now may not lead its group yet
        if not self._code.done():
            kill_group(self.pid)

    def _send(self, number: signal.Signals) -> None:
        if not self._code.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Server(asyncio.Protocol):
    """The controller's end of the socket."""

    def __init__(self) -> None:
        self.is_gone = False
        self._transport: asyncio.WriteTransport | None = None
        self._pending = b""
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()
        self._codes: dict[int, asyncio.Future[int]] = {}

    async def fork(self, spec: ProcessSpec) -> ForkedProcess:
        """Start one child.

        Raises:
            LaunchError: It could not be forked, or the server is gone.
        """
        assert self._transport is not None
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        request = ForkRequest(list(spec.command), str(spec.log_path), spec.num_threads, child_environment({}, spec))
        child: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(child)
        self._transport.write(msgspec.json.encode(request) + b"\n")
        try:
            return await asyncio.shield(child)
        except asyncio.CancelledError:
            child.add_done_callback(_kill_unwanted)
            raise
        except OSError as error:
            raise LaunchError(f"cannot start {spec.name} ({' '.join(spec.command)}): {error}") from error

    def close(self) -> None:
        """Close the socket, which ends the server."""
        assert self._transport is not None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take what the server says."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            answer = msgspec.json.decode(line, type=ForkAnswer)
            if answer.code is not None:
                self._codes.pop(answer.pid).set_result(answer.code)
            elif answer.error:
                self._asked.popleft().set_exception(OSError(answer.error))
            else:
                code = self._codes[answer.pid] = asyncio.get_running_loop().create_future()
                self._asked.popleft().set_result(ForkedProcess(answer.pid, code))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """End what it forked."""
        self.is_gone = True
        for pid, code in self._codes.items():
            kill_group(pid)
            code.set_result(-signal.SIGKILL)
        for child in self._asked:
            child.set_exception(OSError("the fork server is gone; see controller.log"))
        self._codes.clear()
        self._asked.clear()


def _kill_unwanted(child: asyncio.Future[ForkedProcess]) -> None:
    if child.exception() is None:
        child.result().kill()


# -- the server's process --------------------------------------------------------------------------------------------------


def serve_forks(descriptor: int, modules: Sequence[str]) -> list[str]:
    """Be the fork server until the controller is gone. Return in each child, with what follows its command's module.

    Args:
        descriptor: Of the server's end of the socket.
        modules: To import first.
    """
    getproctitle()  # finds the room for titles, which is behind the arguments as long as the environment was not changed
    with imports_without_gc():
        for module in modules:
            with contextlib.suppress(Exception):  # a child meets it again, and tells the controller
                import_module(module)
    channel = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, partial(_tell_ended, channel))
    with channel, channel.makefile("rb") as requests:
        for line in requests:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # a child's end is told after its start
            try:
                pid = os.fork()
            except OSError as error:
                _tell(channel, ForkAnswer(error=error.strerror or str(error)))
            else:
                if not pid:
                    return _become(msgspec.json.decode(line, type=ForkRequest))
                _tell(channel, ForkAnswer(pid))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return leave(EXIT_OK)


def _become(request: ForkRequest) -> list[str]:
    """Make this child what a process would be that was started by the command."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    log = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(request.env)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(request.num_threads)
    setproctitle(" ".join(request.command))
    return request.command[4:]


def _tell_ended(channel: socket.socket, _signal: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(channel, ForkAnswer(ended[0], os.waitstatus_to_exitcode(ended[1])))


def _tell(channel: socket.socket, answer: ForkAnswer) -> None:
    with contextlib.suppress(BrokenPipeError):  # the controller is gone, as the next read says
        channel.sendall(msgspec.json.encode(answer) + b"\n")
