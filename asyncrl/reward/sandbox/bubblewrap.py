"""The sandbox for model-written Python: bubblewrap with several independent layers of protection.

Inside, a program has no network, no other processes, no files of this machine except `/usr` (and the interpreter, if it is
elsewhere) read-only, a `/tmp` of 64 MiB in memory, no environment, no capabilities and no new user namespace; with pyseccomp
installed also no socket, ptrace, keyring or bpf call. If started by root, it runs as uid 65534. Limits per test: CPU time,
address space, file size, open files and processes, by rlimit. The scoring process limits the wall time and the total memory of
all its processes, and kills it. bubblewrap and all processes inside die with the scoring process.

A driver (guest.py) runs inside, and reports that it is ready before any program runs. An earlier failure is a failure of the
sandbox and raises RewardError. Any later failure is attributed to the program and raises ProgramStopped.

`probe_sandbox` runs a test program and reports what is missing; `open_sandbox` raises an error if the sandbox does not work,
unless the config has `sandbox = "none"`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.config.reward import CodeExecReward
from asyncrl.errors import RewardError

NOBODY = 65534
SCRATCH_BYTES = 64 << 20
MAX_PROCESSES = 32
MAX_OPEN_FILES = 64
INSTALL_HINT = "install bubblewrap 0.7 or later (apt-get install bubblewrap, dnf install bubblewrap)"
_OPTIONS = """--unshare-all --unshare-user --die-with-parent --new-session --clearenv --cap-drop ALL --setenv MALLOC_ARENA_MAX 2
    --ro-bind /usr /usr"""
"""Each thread would reserve 64 MiB of address space without MALLOC_ARENA_MAX; the driver empties the environment."""
_FOLDERS = f"""--dev /dev --size {SCRATCH_BYTES} --tmpfs /dev/shm --size {SCRATCH_BYTES} --tmpfs /tmp
    --remount-ro /dev --remount-ro / --chdir /tmp"""
_REFUSED_CALLS = """
    socket connect bind listen accept accept4 ptrace process_vm_readv process_vm_writev pidfd_getfd keyctl add_key request_key bpf
    perf_event_open userfaultfd io_uring_setup unshare setns mount umount2 pivot_root memfd_create shmget msgget semget mq_open
"""
START_TIMEOUT_S = 60.0
_WATCH_INTERVAL_S = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Frame = dict[str, object]


class ProgramStopped(Exception):  # noqa: N818 - the program's fault, not ours: it scores what it passed so far
    """The confined interpreter reached a limit or ended; the message says which."""


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """Whether model-written code can run safely here; if not, the reason and what to do."""

    works: bool
    reason: str
    interpreter: str | None = None
    """Path of the Python interpreter inside."""


class Sandbox:
    """Starts confined interpreters; `interpreter` None means unconfined, with this user's rights.

    Owns one judge (guest_judge.py), which starts when a test first needs it and serves one program after the other. It runs only
    the code of tests, each in its own process. It ends with the sandbox.
    """

    def __init__(self, limits: CodeExecReward, interpreter: str | None) -> None:
        self._limits, self._interpreter = limits, interpreter
        self._judge: Confined | None = None

    def launch(self, code: str) -> Confined:
        """Start a driver for a program. Raises as `Confined`."""
        return Confined(self._limits, self._interpreter, code)

    def judge(self) -> Confined:
        """Return the judge, ready. Raises as `Confined` and `Confined.begin`."""
        if self._judge is None or self._judge.process.poll() is not None:
            self.end_judge()
            self._judge = Confined(self._limits, self._interpreter, is_judge=True)
            weakref.finalize(self, self._judge.close)
            self._judge.begin()
        return self._judge

    def end_judge(self) -> None:
        """End the judge, also during a test; the next call of `judge` starts a new one."""
        if self._judge is not None:
            self._judge.close()
        self._judge = None


class Confined:
    """One interpreter with a driver and its messages, under one deadline and one memory limit. Not thread-safe.

    Owns the process, the channel and the file for its error output. A read takes at most `_max_frame_bytes`. While it waits, it
    sums the resident memory of all processes inside, because rlimits count each process alone.
    """

    def __init__(self, limits: CodeExecReward, interpreter: str | None, code: str = "", is_judge: bool = False) -> None:
        """Start the driver and send its first message; `begin` waits until it is ready.

        Args:
            limits: The program's limits.
            interpreter: The Python interpreter inside; None: this interpreter, unconfined.
            code: The program.
            is_judge: Whether it runs the code of tests, and no program.

        Raises:
            RewardError: bubblewrap could not be executed, or no file descriptor is left.
        """
        is_confined = interpreter is not None
        self._limits = limits
        # Output as JSON: at most 6 characters per byte, plus space for the frame itself.
        self._max_frame_bytes = 6 * limits.output_bytes + 4096
        is_root = is_confined and os.geteuid() == 0
        as_nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if is_root else {}
        try:
            with contextlib.ExitStack() as ours, contextlib.ExitStack() as its:
                self._channel, its_channel = socket.socketpair()
                ours.enter_context(self._channel)
                its.enter_context(its_channel)
                python = [interpreter or sys.executable, "-I", "-S", "-c", _driver_text(is_judge)]
                python += map(str, (its_channel.fileno(), self._max_frame_bytes))
                fds = [its_channel.fileno()]
                if interpreter is not None:
                    options = _bubblewrap(interpreter)
                    if (program := _filter_program()) is not None:
                        fds.append(os.memfd_create("seccomp"))
                        its.callback(os.close, fds[-1])
                        os.pwrite(fds[-1], program, 0)
                        options += ["--seccomp", str(fds[-1])]
                    python = [*options, "--", *python]
                self._errors = ours.enter_context(tempfile.TemporaryFile())
                self.process = subprocess.Popen(  # noqa: S603 - our own command line
                    python,
                    stdin=subprocess.DEVNULL,
                    stdout=self._errors,
                    stderr=self._errors,
                    cwd="/",
                    pass_fds=fds,
                    start_new_session=True,
                    **as_nobody,
                )
                ours.pop_all()
        except OSError as error:
            raise RewardError(f"cannot start the sandbox: {error}; {INSTALL_HINT}") from error
        self._channel.setblocking(False)
        self.pid = self.process.pid
        """Process id of the launched process, the ancestor of all processes inside."""
        self.deadline_s = time.monotonic() + START_TIMEOUT_S
        self.beside: Confined | None = None
        """A driver whose memory is added to this one's."""
        self._is_ready = False
        self._watched_s = time.monotonic()
        self._unsent = b""
        self._lent: socket.socket | None = None
        rlimits = {
            "RLIMIT_CPU": math.ceil(limits.cpu_s),
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.output_bytes,
            "RLIMIT_NOFILE": MAX_OPEN_FILES,
            "RLIMIT_CORE": 0,
        }
        if is_confined:  # Otherwise it would count all of the user's processes.
            rlimits["RLIMIT_NPROC"] = MAX_PROCESSES
        self.send({"code": code, "limits": rlimits, "output_bytes": limits.output_bytes, "confined": is_confined})

    def send(self, frame: Frame, lent: socket.socket | None = None) -> None:
        """Queue a frame; `receive` sends the part that the channel does not accept at once.

        Args:
            frame: The message.
            lent: One end of a session; it is sent to the driver after the frame and closed here.
        """
        payload = json.dumps(frame).encode()
        self._unsent += struct.pack("<I", len(payload)) + payload
        self._lent = lent
        self._write_some()

    def begin(self) -> None:
        """Wait until the driver is ready, and start the program's time limit.

        Raises:
            RewardError: The driver does not start.
        """
        try:
            told: object = self.receive()
        except ProgramStopped as stopped:
            told = stopped
        if told != {"ready": True}:
            raise RewardError(f"the sandbox could not start: {told}")
        self._is_ready = True
        self.deadline_s = time.monotonic() + self._limits.wall_s

    def receive(self) -> Frame:
        """Return the driver's next frame.

        Raises:
            ProgramStopped: The deadline or the memory limit was exceeded, the driver is gone, or it sent an invalid frame.
        """
        self.check()  # Also checked here: a program that floods its channel never lets us wait.
        (size,) = struct.unpack("<I", self._read_exactly(4))
        if size > self._max_frame_bytes:
            raise ProgramStopped(f"sent {size} bytes at once, the limit is {self._max_frame_bytes}")
        try:
            frame = json.loads(self._read_exactly(size))
        except (ValueError, RecursionError) as error:
            raise ProgramStopped(f"sent something that is no frame: {error}") from error
        if not isinstance(frame, dict):
            raise ProgramStopped("sent something that is no frame")
        return frame

    def check(self) -> None:
        """Raise ProgramStopped if the deadline or the memory limit is exceeded."""
        now_s = time.monotonic()
        if now_s > self.deadline_s:
            raise ProgramStopped(f"ran past {self._limits.wall_s if self._is_ready else START_TIMEOUT_S:g} s")
        if now_s - self._watched_s >= _WATCH_INTERVAL_S:
            resident_bytes = sum(resident_bytes_of_tree(each.pid) for each in (self, self.beside) if each is not None)
            self._watched_s = time.monotonic()
            if resident_bytes > self._limits.memory_bytes:
                raise ProgramStopped(f"its processes hold {resident_bytes} bytes, {self._limits.memory_bytes} are allowed")

    def close(self) -> None:
        """Kill and reap all processes inside, and close the channel. Safe to repeat."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for each in (self._channel, self._errors, self._lent):
            if each is not None:
                each.close()

    def _read_exactly(self, size: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            try:
                chunk = self._channel.recv(min(size - len(chunks), 1 << 20))
            except BlockingIOError:  # sleep until the channel is ready or the limits must be checked again
                self.check()
                poll = select.poll()
                poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent or self._lent else 0))
                poll.poll(1000 * min(_WATCH_INTERVAL_S, max(self.deadline_s - time.monotonic(), 0)) + 1)
                self._write_some()
                continue
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                break
            chunks += chunk
        else:
            return bytes(chunks)
        try:
            status = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            raise ProgramStopped("its driver closed the channel") from None
        self._errors.seek(0)
        said = self._errors.read(1000).decode("utf-8", "replace").strip()
        raise ProgramStopped(f"its driver ended with status {status}" + (f": {said}" if said else ""))

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


def open_sandbox(config: CodeExecReward) -> Sandbox:
    """Return the sandbox that the config selects.

    Raises:
        RewardError: bubblewrap is selected and does not work here; the message says what to install or set.
    """
    if config.sandbox == "none":
        return Sandbox(config, None)
    status = probe_sandbox()
    if not status.works:
        raise RewardError(
            f"model-written code is not run without a sandbox, and there is none here: {status.reason}; "
            f'or set sandbox = "none" on the code_exec reward to run it with this user\'s rights'
        )
    return Sandbox(config, status.interpreter)


def probe_sandbox() -> SandboxStatus:
    """Run a test program in the sandbox and return whether its output is right; takes about 0.1 s."""
    if sys.platform != "linux":
        return SandboxStatus(False, f"bubblewrap needs Linux, this is {sys.platform}")
    if shutil.which("bwrap") is None:
        return SandboxStatus(False, f"bubblewrap is not installed: {INSTALL_HINT}")
    if "--size" not in _bubblewrap_help():
        return SandboxStatus(False, f"this bubblewrap is too old: {INSTALL_HINT}")
    code = "import os; print(6 * 7, os.path.exists('/etc/passwd'), len(os.listdir('/tmp')))"
    reasons = []
    for interpreter in ("/usr/bin/python3", str(Path(sys.executable).resolve())):
        try:
            with contextlib.closing(Confined(CodeExecReward(), interpreter, code)) as confined:
                confined.begin()
                confined.send({"op": "run", "stdin": ""})
                told: object = confined.receive()
        except (ProgramStopped, RewardError) as stopped:
            told = stopped
        if told == {"status": 0, "output": "42 False 0\n"}:
            return SandboxStatus(True, f"bubblewrap with {interpreter}", interpreter)
        reasons.append(f"with {interpreter}, where a program should print '42 False 0': {told}")
    return SandboxStatus(False, "; ".join(reasons))


def _bubblewrap(interpreter: str) -> list[str]:
    """Return the bubblewrap command line, without the program to run."""
    options = ["bwrap", *_OPTIONS.split()]
    options += ["--disable-userns"] if "--disable-userns" in _bubblewrap_help() else []
    for name in ("lib", "lib64", "bin"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    if not interpreter.startswith("/usr/"):  # it is our own interpreter
        folder = str(Path(sys.base_prefix).resolve())
        options += ["--ro-bind", folder, folder]
    return [*options, *_FOLDERS.split()]


@cache
def _driver_text(is_judge: bool) -> str:
    """Return a program that creates the driver's modules from their text, and runs the driver."""
    lines = ["import sys, types"]
    for name in ("guest_values", *(("guest_judge",) if is_judge else ()), "guest"):
        text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        module = f"{__package__}.{name}"
        lines.append(f"guest = sys.modules[{module!r}] = types.ModuleType({module!r})")
        lines.append(f"exec(compile({text!r}, {name!r}, 'exec', dont_inherit=True), vars(guest))")
    return "\n".join([*lines, "guest.main()"])


@cache
def _bubblewrap_help() -> str:
    command = [shutil.which("bwrap") or "bwrap", "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout  # noqa: S603


@cache
def _filter_program() -> bytes | None:
    """Return the system-call filter; None without pyseccomp."""
    try:
        seccomp = importlib.import_module("pyseccomp")
    except (ImportError, OSError, RuntimeError):
        return None
    calls = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in _REFUSED_CALLS.split():
        calls.add_rule(seccomp.ERRNO(1), name)
    with tempfile.TemporaryFile() as file:
        calls.export_bpf(file)
        file.seek(0)
        return file.read()


def resident_bytes_of_tree(pid: int) -> int:
    """Return the resident memory of a process and all its descendants; processes that end meanwhile count 0."""
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
