"""Starts learner, generators and inference workers as forks of one process that has imported torch and transformers.

That import takes 3 s of CPU time. The fork server, a child of the controller, does it once. A process that is started, or
restarted, is then ready within tenths of a second, and shares the memory of the imported modules. Processes that use an
accelerator are started by their command (processes.py), because a CUDA context does not survive a fork.

The server has one thread, so a fork is a whole process. It reads one request a line from a socket, answers with the child's pid,
and says the exit code once the child is gone. A child has the server's standard input, which only the controller holds open.
multiprocessing's fork server would start one more process, leave a folder in /tmp where it is killed, and import the
controller's main module in every child.

Invariants:
- Answers come in the order of the requests, and a child's pid before its exit code.
- When the server is gone, the controller kills its children. The next start begins a new server. A server that does not answer
  counts as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec
from setproctitle import setproctitle

from asyncrl.control.launch.process_main import EXIT_OK, FORK_SERVER, imports_without_gc, leave
from asyncrl.control.launch.processes import LocalLauncher, LocalProcess, ProcessSpec, child_environment, is_running, kill_group
from asyncrl.errors import LaunchError
from asyncrl.schema.control import ProcessKind

TOLD_S = 3.0
"""How long the server has to report the end of a killed process; otherwise it is replaced."""


class ForkRequest(msgspec.Struct, frozen=True):
    """A request to start a child."""

    command: list[str]
    """The command of an equal separate process: `python -P -m asyncrl.pipeline ...`."""
    log_path: str
    num_threads: int
    env: dict[str, str]


class ForkAnswer(msgspec.Struct, frozen=True):
    """A child was started, or is gone."""

    pid: int = 0
    code: int | None = None
    """Its exit code once it is gone; negative for a signal."""
    error: str = ""


@dataclass(eq=False)
class ForkLauncher:
    """Forks processes of some kinds, and starts the others by their command."""

    run_folder: Path
    kinds: Collection[ProcessKind]
    """Kinds that are forked."""
    modules: Sequence[str]
    """Modules that the server imports for them."""
    timeout_s: float
    """Timeout of a start, including the import."""
    _server: _Server | None = None
    _process: LocalProcess | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        """Start one process; see `Launcher.start`."""
        if spec.kind not in self.kinds:
            return await LocalLauncher().start(spec)
        async with self._starting:
            if self._server is None or self._server.is_gone:
                await self.close()
                ours, theirs = socket.socketpair()
                with theirs:
                    command = (*spec.command[:4], FORK_SERVER, str(self.run_folder), str(theirs.fileno()), *self.modules)
                    log_path = self.run_folder / "logs" / "controller.log"
                    server = replace(spec, name=FORK_SERVER, command=command, log_path=log_path, num_threads=1, env={})
                    try:
                        self._process = await LocalLauncher().start(server, pass_fds=(theirs.fileno(),))
                    except BaseException:
                        ours.close()
                        raise
                _, self._server = await asyncio.get_running_loop().create_unix_connection(_Server, sock=ours)
        return await self._server.fork(spec, self.timeout_s)

    async def close(self) -> None:
        """End the server, and its children if any are left."""
        if self._server is not None:
            self._server.give_up()
        if self._process is not None:
            self._process.kill()
            await self._process.wait()


@dataclass(eq=False)
class _Server(asyncio.Protocol):
    """The controller's end of the socket."""

    is_gone: bool = False
    _transport: asyncio.WriteTransport | None = None
    _pending: bytes = b""
    _asked: deque[asyncio.Future[LocalProcess]] = field(default_factory=deque)
    _codes: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    _expected: set[int] = field(default_factory=set)
    """Processes that were killed and whose end is not reported yet."""

    async def fork(self, spec: ProcessSpec, timeout_s: float) -> LocalProcess:
        """Start one child.

        Raises:
            LaunchError: It could not be forked, or the server is gone or does not answer.
        """
        assert self._transport is not None
        environment = child_environment({"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "")}, spec)
        request = msgspec.json.encode(ForkRequest(list(spec.command), str(spec.log_path), spec.num_threads, environment))
        child: asyncio.Future[LocalProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(child)
        self._transport.write(request + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(child)
        except asyncio.CancelledError:
            child.add_done_callback(_kill_unwanted)
            raise
        except TimeoutError:
            child.add_done_callback(_kill_unwanted)
            self.give_up()
            reason = f"the fork server did not answer within {timeout_s:g} s (supervision.start_timeout_s)"
            raise LaunchError(f"cannot start {spec.name}: {reason}; see controller.log") from None
        except OSError as error:
            raise LaunchError(f"cannot start {spec.name} ({' '.join(spec.command)}): {error}") from error

    def give_up(self) -> None:
        """Treat the server as gone, and close the socket, which ends it."""
        assert self._transport is not None
        self.is_gone = True
        self._transport.abort()

    def _expect(self, pid: int, end: asyncio.Future[int]) -> None:
        """Give up the server if it does not report the end of a killed process in time after that end."""

        def look(*, has_ended: bool) -> None:
            if not end.done() and has_ended:
                self.give_up()
            elif not end.done():  # it may be in a call of the kernel for long
                asyncio.get_running_loop().call_later(TOLD_S, partial(look, has_ended=not is_running(pid)))

        if pid not in self._expected:
            self._expected.add(pid)
            look(has_ended=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle the server's answers."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            answer = msgspec.json.decode(line, type=ForkAnswer)
            if answer.code is not None:
                self._expected.discard(answer.pid)
                if (code := self._codes.pop(answer.pid, None)) is not None:  # else an import started it
                    code.set_result(answer.code)
            elif answer.error:
                self._asked.popleft().set_exception(OSError(answer.error))
            else:
                code = self._codes[answer.pid] = asyncio.get_running_loop().create_future()
                self._asked.popleft().set_result(LocalProcess(answer.pid, code, partial(self._expect, answer.pid)))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Kill the processes that the server forked."""
        self.is_gone = True
        for pid, code in self._codes.items():
            kill_group(pid)
            code.set_result(-signal.SIGKILL)
        for child in self._asked:
            child.set_exception(OSError("the fork server is gone; see controller.log"))
        self._codes.clear()
        self._asked.clear()


def _kill_unwanted(child: asyncio.Future[LocalProcess]) -> None:
    if child.exception() is None:
        child.result().kill()


# -- the server's process --------------------------------------------------------------------------------------------------


def serve_forks(descriptor: int, modules: Sequence[str]) -> list[str]:
    """Run the fork server until the controller is gone. In each child, return the arguments after its command's module.

    Args:
        descriptor: File descriptor of the server's end of the socket.
        modules: Modules to import first.
    """
    _set_title(sys.orig_argv)  # before the environment changes: a title has the room of the arguments and of what is behind them
    with imports_without_gc():
        for module in modules:
            try:
                import_module(module)
            except Exception:  # noqa: BLE001 - a child meets it again, and tells the controller
                traceback.print_exc()
    channel = socket.socket(fileno=descriptor)
    with channel, _ends_of_children() as ended:
        for line in _requests(channel, ended):
            request = msgspec.json.decode(line, type=ForkRequest)
            try:
                Path(request.log_path).parent.mkdir(parents=True, exist_ok=True)
                log = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                pid = os.fork()
            except OSError as error:
                _tell(channel, ForkAnswer(error=str(error)))
                continue
            if not pid:  # be what a process would be that was started by the command
                os.setsid()
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
                os.environ.update(request.env)
                if (torch := sys.modules.get("torch")) is not None:
                    torch.set_num_threads(request.num_threads)
                _set_title(request.command)
                return request.command[4:]
            os.close(log)
            _tell(channel, ForkAnswer(pid))
    return leave(EXIT_OK)


@contextlib.contextmanager
def _ends_of_children() -> Iterator[int]:
    """Yield a descriptor that becomes readable when a child has ended, since a signal just before a wait would be missed."""
    ended, told = os.pipe()
    os.set_blocking(told, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        yield ended
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(ended)
        os.close(told)


def _requests(channel: socket.socket, ended: int) -> Iterator[bytes]:
    """Yield requests until the controller is gone; meanwhile report every child that ends."""
    pending, waiting = b"", select.poll()
    for descriptor in (channel.fileno(), ended):
        waiting.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in waiting.poll()}
        if ended in ready:
            os.read(ended, 4096)
            with contextlib.suppress(ChildProcessError):
                while (child := os.waitpid(-1, os.WNOHANG))[0]:
                    _tell(channel, ForkAnswer(child[0], os.waitstatus_to_exitcode(child[1])))
        if channel.fileno() in ready:
            try:
                data = channel.recv(1 << 16)
            except ConnectionResetError:
                return
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            yield from lines


def _set_title(command: Sequence[str]) -> None:
    """Show this command, its program without the folder."""
    setproctitle(" ".join([Path(command[0]).name, *command[1:]]))


def _tell(channel: socket.socket, answer: ForkAnswer) -> None:
    with contextlib.suppress(ConnectionError):  # the controller is gone, as the next read says
        channel.sendall(msgspec.json.encode(answer) + b"\n")
