"""Code inside a sandbox: a driver that forks one process for each test, and the program's side of a test.

Sent as text to a separate interpreter (bubblewrap.py): standard library only, Python 3.9 and later. The driver runs no foreign
code itself. It ends the processes and removes the files of each test, so that no test sees traces of another. Its operations:

- `run` executes the program that a model wrote as a script, or calls one function of it;
- `session` loads the program and answers requests about it until the session is ended;
- `test`, in a sandbox of its own, runs a task's test code, which has a session with the program (guest_judge.py).
"""
# ruff: noqa: ANN401, S102, SIM105 - values of any kind, foreign code; contextlib takes 3 ms to import

from __future__ import annotations

import _thread
import builtins
import collections
import io
import json
import operator
import os
import resource
import signal
import sys
import time
import types

from asyncrl.reward.sandbox.guest_values import Pipe, SessionOver, decode, encode, only_plain, refuse_objects, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from asyncrl.reward.sandbox.guest_values import Frame

PASSED, FAILED = 77, 1
"""Exit statuses of a judge's test process: at its end, and after any exception."""
SCRATCH_FOLDERS = ("/tmp", "/dev/shm")  # noqa: S108 - in memory and private inside the sandbox
PR_SET_PDEATHSIG = 1

# -- the program's side of a session --------------------------------------------------------------------------------------------


def _await(value: Any, loops: list[Any] = []) -> Any:  # noqa: B006 - one loop for a session
    import asyncio  # noqa: PLC0415 - takes as long to import as all of a simple program's run

    async def result() -> Any:
        return await value

    if not loops:
        loops.append(asyncio.new_event_loop())
    return loops[0].run_until_complete(result())


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
OF_OPERATOR = "eq lt le gt ge neg pos invert abs getitem setitem delitem contains index"
BUILT_IN = """len bool int float complex round iter next reversed hash divmod str repr format isinstance issubclass
    getattr setattr delattr"""
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*BINARY, *(f"i{name.rstrip('_')}" for name in BINARY), *OF_OPERATOR.split())},
    **{name: getattr(builtins, name) for name in BUILT_IN.split()},
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context, *error: bool(type(context).__exit__(context, *error)),
    "await": _await,
    "plain": lambda value: value,
    **{name: lambda value, name=name: getattr(__import__("copy"), name)(value) for name in ("copy", "deepcopy")},
}
"""Operations of the program's side, requested by a judge."""
BEHAVIOURS = {f"__{name.strip('_')}__" for name in OPERATIONS} - {"__repr__", "__hash__"} | {"__missing__"}
"""Methods that change the behaviour of a subclass of a built-in class; every named tuple has `__repr__`."""


def _acts(value: Any) -> bool:
    """Return whether a value's class has functions of the program, which plain data would lose: for example a cache dict."""
    is_scalar = isinstance(value, (int, float, complex, str, bytes))
    for kind in type(value).__mro__:
        for name, each in vars(kind).items() if kind.__module__ == "solution" else ():
            acts = (callable(each) and not isinstance(each, staticmethod)) or isinstance(each, property)
            if (acts and not name.startswith("_")) or (name in BEHAVIOURS and not is_scalar):
                return True
    return False


class ProgramSession:
    """Performs the judge's requests; the program's objects are stored by number."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.lock = _thread.RLock()
        self.stdout: Any = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True)
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def serve(self, namespace: dict[str, Any], names: list[str]) -> None:
        """Send the requested names, then serve until the driver ends this process."""
        self.pipe.write({"names": {name: self._told(namespace[name]) for name in names if name in namespace}})
        self._printed()
        while True:
            self._answer(self.pipe.read())

    def _answer(self, frame: Frame) -> None:
        try:
            reply = self._perform(frame)
        except SessionOver:
            raise
        except BaseException as error:  # noqa: BLE001 - the test's to catch
            try:
                args = [encode(each, self._object) for each in error.args]
            except ValueError:
                args = []
            told = {"kind": self._class(type(error)), "text": str(error)[:1000], "args": args}
            reply = {"raise": {**told, "object": self._object(error)["v"]}}
        self.pipe.write({**reply, **self._printed()})

    def _printed(self) -> Frame:
        """Return the program's output since the last message."""
        text = self.stdout.buffer.getvalue().decode("utf-8", "replace")[: self.pipe.max_bytes // 16]
        self.stdout.buffer.seek(0)
        self.stdout.buffer.truncate()
        return {"printed": text} if text else {}

    def _perform(self, frame: Frame) -> Frame:
        args = [decode(each, self._decode_other) for each in frame["args"]]
        kwargs = {name: decode(each, self._decode_other) for name, each in frame["kwargs"].items()}
        value = OPERATIONS[frame["op"]](*args, **kwargs)
        changed = []
        for place, after in (*enumerate(args), *kwargs.items()):
            sent = frame["args"][place] if isinstance(place, int) else frame["kwargs"][place]
            is_own = isinstance(sent, dict) and sent["t"] == "yours"  # the test has no copy of it
            if isinstance(after, (list, dict, set, bytearray, collections.deque)) and not is_own:
                encoded = encode(after, self._object)
                if encoded != sent:
                    changed.append([place, encoded])
        told = encode(value, self._object) if frame["op"] == "plain" else self._told(value, frame["as_object"])
        return {"value": told, "changed": changed}

    def _told(self, value: Any, as_object: bool = False) -> Any:
        return self._object(value) if as_object or _acts(value) else encode(value, self._object)

    def _object(self, value: Any) -> Any:
        """Return the number of a stored object; for an error class also its bases."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        number = self.numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [self._class(each) for each in value.__bases__]
            return {"t": "error class", "v": number, "name": value.__name__, "module": str(value.__module__), "bases": bases}
        return {"t": "object", "v": number}

    def _class(self, kind: type) -> Any:
        return kind.__name__ if kind.__module__ == "builtins" else self._object(kind)

    def _decode_other(self, tag: str, value: Any) -> Any:
        if tag == "yours":
            return self.objects[value["v"]]
        if tag == "built-in":
            return getattr(builtins, value["v"])
        return lambda *args, **kwargs: self._call_back(value["v"], args, kwargs)

    def _call_back(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the test."""
        call = {
            "call": number,
            "args": [encode(each, refuse_objects) for each in args],
            "kwargs": {name: encode(each, refuse_objects) for name, each in kwargs.items()},
        }
        with self.lock:
            self.pipe.write({**call, **self._printed()})
            while "op" in (reply := self.pipe.read()):  # The function itself uses the program.
                self._answer(reply)
        if "value" in reply:
            return decode(reply["value"], only_plain)
        kind = getattr(builtins, str(reply["raise"][0]), RuntimeError)
        raise kind(*reply["raise"][1:]) if issubclass(kind, Exception) else RuntimeError(*reply["raise"])


# -- the driver --------------------------------------------------------------------------------------------------------------


def load_program(code: str, name: str) -> dict[str, Any]:
    """Execute `code` as the module `name` and return its namespace."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


class Driver:
    """Forks one process for each test, waits for it, and ends its remaining processes."""

    def __init__(self, pipe: Pipe, setup: Frame) -> None:
        self.pipe, self.setup = pipe, setup

    def fork(self, stdin_fd: int | None = None, stdout_fd: int | None = None) -> int:
        """Fork; returns 0 in the child, which has limits, its own process group, these streams and none of the driver's."""
        pid = os.fork()
        if pid:
            try:
                os.setpgid(pid, pid)
            except OSError:
                pass  # the child did so itself, or has ended
            return pid
        os.setpgid(0, 0)
        self.end_with_parent()
        for name, amount in self.setup["limits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
            resource.setrlimit(kind, (amount, amount))
        null = os.open(os.devnull, os.O_RDWR)
        for target, source in ((0, stdin_fd), (1, stdout_fd), (2, None)):
            os.dup2(null if source is None else source, target)
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - for the life of the process
            for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        os.close(self.pipe.fd)
        return 0

    def end_with_parent(self) -> None:
        """Make the kernel kill this process when its parent ends; in a sandbox, bubblewrap does this for all processes."""
        if not self.setup["confined"] and sys.platform == "linux":
            import ctypes  # noqa: PLC0415 - takes 8 ms to import

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait(self, pid: int) -> int:
        """Wait for a forked test, then end its processes and remove its files; return its exit status, negative for a signal."""
        status = os.waitpid(pid, 0)[1]
        try:
            # In a sandbox every visible process is the program's own, and the loop ends when the last of them has ended.
            while self.setup["confined"]:
                os.kill(-1, signal.SIGKILL)
                time.sleep(0.0002)
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        for folder in SCRATCH_FOLDERS if self.setup["confined"] else ():
            for entry in os.scandir(folder):
                import shutil  # noqa: PLC0415 - most programs leave no file

                # A file that cannot be removed ends the driver, and the program fails its remaining tests.
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def run(self, frame: Frame) -> str | None:
        """Execute the program as a script, or call a function of it; reply with exit status and output.

        The child writes its output, or the function's result as JSON, to an unnamed file, which is read after its end.

        Returns:
            The program, in the child that must run it as a script; otherwise None.
        """
        is_script = "stdin" in frame
        stdin_fd, output_fd = scratch_file(str(frame.get("stdin", "")).encode("utf-8", "replace")), scratch_file()
        pid = self.fork(stdin_fd, output_fd if is_script else None)
        if pid == 0:
            if is_script:
                return str(self.setup["code"])
            try:
                namespace = load_program(self.setup["code"], "solution")
                name, method = frame["function"], frame["method"]
                function = getattr(namespace[name](), method) if method else namespace[name]
                value = function(*frame["args"], **frame["kwargs"])
                if hasattr(value, "__await__"):
                    value = _await(value)
                write_all(output_fd, json.dumps(encode(value, refuse_objects, as_lists=True)).encode())
                os._exit(0)
            finally:
                os._exit(1)
        status = self.wait(pid)
        output = os.pread(output_fd, self.setup["output_bytes"], 0)
        for descriptor in (stdin_fd, output_fd):
            os.close(descriptor)
        self.pipe.write({"status": status, "output": output.decode("utf-8", "replace")})
        return None

    def session(self, frame: Frame) -> None:
        """Load the program and answer requests about it until told to end. The program cannot end the session earlier."""
        session_fd = self.take_descriptor()
        pid = self.fork()
        if pid == 0:
            try:
                session = ProgramSession(Pipe(session_fd, self.pipe.max_bytes, is_trusted=True))
                sys.stdout = session.stdout
                session.serve(load_program(self.setup["code"], "solution"), frame["names"])
            finally:
                os._exit(1)
        os.close(session_fd)  # The other end of the session closes when the child ends.
        self.pipe.read()
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)
        self.pipe.write({"ended": True})

    def test(self, frame: Frame) -> None:
        """Run one piece of test code against the program; reply whether it reached its end."""
        from asyncrl.reward.sandbox.guest_judge import passes  # noqa: PLC0415 - sent to a judge's sandbox only

        session_fd = self.take_descriptor()
        pid = self.fork()
        if pid == 0:
            try:
                os._exit(PASSED if passes(Pipe(session_fd, self.pipe.max_bytes), frame) else FAILED)
            finally:
                os._exit(FAILED)
        os.close(session_fd)
        self.pipe.write({"passed": self.wait(pid) == PASSED})

    def take_descriptor(self) -> int:
        """Return the end of a session that the scoring process sends after a message."""
        import _socket  # noqa: PLC0415 - `socket` takes 5 ms to import

        channel = _socket.socket(fileno=self.pipe.fd)
        (_, _, sent), *_ = channel.recvmsg(1, _socket.CMSG_SPACE(4))[1]
        channel.detach()
        return int.from_bytes(sent, sys.byteorder)

    def serve(self) -> str | None:
        """Serve one operation after the other until the scoring process closes the pipe; return as `run`."""
        self.end_with_parent()
        self.pipe.write({"ready": True})
        program: str | None = None
        while program is None:
            try:
                frame = self.pipe.read()
            except SessionOver:
                return None
            program = getattr(self, frame["op"])(frame)
        return program


def scratch_file(content: bytes = b"") -> int:
    """Return the descriptor of an unnamed file with `content`."""
    path = f"/tmp/.{os.getpid()}-{os.urandom(8).hex()}"  # noqa: S108 - in memory and private inside the sandbox
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    write_all(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def main() -> None:
    """Read the channel's descriptor and the maximum message size from the command line."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    channel_fd, max_bytes = map(int, sys.argv[1:3])
    pipe = Pipe(channel_fd, max_bytes, is_trusted=True)
    os.environ.pop("MALLOC_ARENA_MAX", None)
    code = Driver(pipe, pipe.read()).serve()
    if code is not None:
        sys.argv[:] = ["program.py"]
        load_program(code, "__main__")
