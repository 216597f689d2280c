"""The driver and the processes it forks, one a test. Runs no foreign code itself."""

from __future__ import annotations

import builtins
import contextlib
import os
import resource
import signal
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

from asyncrl.reward.inside.peer import Peer, candidate_may, judge_may
from asyncrl.reward.inside.pipe import Frame, Pipe, SessionOver

PASSED = 77
"""Exit status of a judge's test process that reached its end; a plain 0 is too easy to come by."""


def limit_this_process(limits: dict[str, int]) -> None:
    """Apply the limits of one test to this process and, by inheritance, to all it starts."""
    for name, amount in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(kind, (amount, amount))


def detach_standard_streams(stdin_fd: int | None = None, stdout_fd: int | None = None) -> None:
    """Point the three standard streams at nothing, or at the descriptors given."""
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, stdin_fd), (1, stdout_fd), (2, None)):
        os.dup2(null if source is None else source, target)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - for the life of the process


def load_program(code: str, name: str) -> dict[str, Any]:
    """Execute `code` as the module `name` and return its namespace."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - in here that is the job
    return module.__dict__


def wait_for(pid: int) -> int:
    """Wait for a forked test and end what it left running; return its exit status, negative for a signal."""
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def fork_test(limits: dict[str, int]) -> int:
    """Fork; the child comes back limited, in a process group of its own, and gets 0."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        limit_this_process(limits)
    else:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
    return pid


def scratch_file(content: bytes = b"") -> int:
    """Return the descriptor of a file without a name that holds `content`."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        file.seek(0)
        return os.dup(file.fileno())


class ProgramRun(BaseException):
    """Carries the program up out of the driver loop, so that it ends as a script does: threads joined, exit handlers run."""


def candidate_run(pipe: Pipe, setup: Frame, frame: Frame) -> None:
    """Execute the program as a script with the given input; reply with its output and exit status."""
    stdin_fd, stdout_fd = scratch_file(frame["stdin"].encode("utf-8", "replace")), scratch_file()
    pid = fork_test(setup["limits"])
    if pid == 0:
        detach_standard_streams(stdin_fd, stdout_fd)
        for descriptor in (pipe.read_fd, pipe.write_fd, stdin_fd, stdout_fd):
            os.close(descriptor)
        raise ProgramRun
    status = wait_for(pid)
    output = os.pread(stdout_fd, setup["output_bytes"], 0)
    for descriptor in (stdin_fd, stdout_fd):
        os.close(descriptor)
    pipe.write({"status": status, "stdout": output.decode("utf-8", "replace")})


def candidate_session(pipe: Pipe, setup: Frame, _frame: Frame) -> None:
    """Load the program and answer requests about it until told to end; then say how its process ended."""
    pid = fork_test(setup["limits"])
    if pid == 0:
        try:
            serve_session(pipe, setup["code"])
        finally:
            os._exit(1)
    pipe.write({"ended": wait_for(pid)})


def serve_session(pipe: Pipe, code: str) -> None:
    """Load the program, tell its names, serve requests."""
    detach_standard_streams()
    peer = Peer(pipe, candidate_may)
    try:
        namespace = load_program(code, "solution")
    except BaseException as error:  # noqa: BLE001 - whatever the program does at import is its result
        pipe.write({"raise": [type(error).__name__, str(error)[:1000]]})
        os._exit(1)
    names = [name for name, value in namespace.items() if not name.startswith("__") and not isinstance(value, types.ModuleType)]
    pipe.write({"names": {name: peer.wire.encode(namespace[name]) for name in names}})
    while True:
        frame = pipe.read()
        if frame.get("op") == "end":
            os._exit(0)
        peer.serve(frame)


def judge_test(pipe: Pipe, setup: Frame, frame: Frame) -> None:
    """Run one piece of test code against the candidate; reply whether it reached its end."""
    pid = fork_test(setup["limits"])
    if pid == 0:
        try:
            candidate = Pipe(setup["candidate_in"], setup["candidate_out"], pipe.max_bytes)
            os._exit(PASSED if passes(candidate, frame) else 1)
        finally:
            os._exit(1)
    pipe.write({"passed": wait_for(pid) == PASSED})


def passes(candidate: Pipe, frame: Frame) -> bool:
    """Open a session with the candidate, execute the test with its names in scope, close the session."""
    detach_standard_streams()
    candidate.write({"op": "session"})
    peer = Peer(candidate, judge_may)
    try:
        loaded = candidate.read()
        if "names" in loaded:
            run_test(peer, loaded["names"], frame["code"])
            return True
        peer.ended = "ended" in loaded
    except BaseException:  # noqa: BLE001 - any exception out of the test is a failure of the test
        return False
    finally:
        if not peer.ended:
            close_session(candidate)
    return False


def run_test(peer: Peer, names: dict[str, Any], code: str) -> None:
    """Execute test code. Built-in and standard-library names are the judge's own, whatever the program calls its functions."""
    own = set(dir(builtins)) | set(getattr(sys, "stdlib_module_names", ()))
    solution = types.ModuleType("solution")
    vars(solution).update((name, peer.wire.decode(value)) for name, value in names.items() if name not in own)
    sys.modules["solution"] = solution
    namespace = {**vars(solution), "__name__": "test"}
    exec(compile(code, "<test>", "exec", dont_inherit=True), namespace)  # noqa: S102 - in here that is the job


def close_session(candidate: Pipe) -> None:
    """Tell the session to end and read up to the driver's word that it did."""
    try:
        candidate.write({"op": "end"})
        while "ended" not in candidate.read():
            pass
    except (SessionOver, OSError, ValueError):
        pass


ROLES: dict[str, dict[str, Callable[[Pipe, Frame, Frame], None]]] = {
    "candidate": {"run": candidate_run, "session": candidate_session},
    "judge": {"test": judge_test},
}


def drive(pipe: Pipe) -> str | None:
    """Serve one operation after the other until the outside closes the pipe.

    Returns:
        In a fork that is to run the program as a script, the program; at the end, None.
    """
    setup = pipe.read()
    roles = ROLES[setup["role"]]
    while True:
        try:
            frame = pipe.read()
        except SessionOver:
            return None
        serve = roles.get(str(frame.get("op")))
        if serve is not None:
            try:
                serve(pipe, setup, frame)
            except ProgramRun:
                return str(setup["code"])


def main() -> None:
    """Take the pipe's descriptors from the command line."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    code = drive(Pipe(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    if code is not None:
        sys.argv[:] = ["program.py"]
        load_program(code, "__main__")
