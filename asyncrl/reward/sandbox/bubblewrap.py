"""The sandbox that model-written Python runs in: bubblewrap, built so that nothing is trusted to hold on its own.

What a program finds inside: no network, no process but its own, no file of this machine but `/usr` (and the interpreter, where
that is elsewhere) read-only, `/tmp` of 64 MiB in memory, no environment, no capabilities, no way to a new user namespace, and
where pyseccomp is installed no socket, ptrace, keyring or bpf call either. As root the whole thing runs as uid 65534. Limits: CPU
time, address space, file size, open files and processes by rlimit, per test; wall time and the memory of all its processes
together by the scoring process, which kills it (confined.py). bubblewrap dies with the scoring process, and all inside
with it.

`probe_sandbox` runs a program for real and says what is missing; `open_sandbox` refuses where it does not work, unless the
config says `sandbox = "none"`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asyncrl.config.reward import CodeExecReward
from asyncrl.errors import RewardError
from asyncrl.reward.sandbox.confined import Confined, ProgramStopped

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


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """Whether model-written code can be run safely here, and if not, why and what to do."""

    works: bool
    reason: str
    interpreter: str | None = None
    """Path of the Python that runs inside."""


class Sandbox:
    """A way to start confined interpreters; `interpreter` None means unconfined, with this user's rights.

    Owns one judge (guest_judge.py), which is started when a test first needs it and serves one program after the other: what runs
    there is the code of tests, each in a process of its own. It ends with the sandbox.
    """

    def __init__(self, limits: CodeExecReward, interpreter: str | None) -> None:
        self.limits, self.interpreter = limits, interpreter
        self._judge: Confined | None = None

    def judge(self) -> Confined:
        """Return the judge, ready. Raises as `launch` and `Confined.begin`."""
        if self._judge is None or self._judge.has_ended:
            self.end_judge()
            self._judge = self.launch(is_judge=True)
            weakref.finalize(self, self._judge.close)
            self._judge.begin()
        return self._judge

    def end_judge(self) -> None:
        """End the judge, which may be in the middle of a test; the next one that is asked for is another."""
        if self._judge is not None:
            self._judge.close()
        self._judge = None

    def launch(self, code: str = "", is_judge: bool = False) -> Confined:
        """Start one driver (guest.py) and hand it its first message; `Confined.begin` waits until it is up.

        Args:
            code: The program.
            is_judge: It runs tests' code, and no program.

        Raises:
            RewardError: bubblewrap could not be executed, or no descriptor is left.
        """
        limits, is_confined = self.limits, self.interpreter is not None
        # Output as JSON: at most 6 characters a byte, and some room for the frame itself.
        max_frame_bytes = 6 * limits.output_bytes + 4096
        drop_root = is_confined and os.geteuid() == 0
        try:
            with contextlib.ExitStack() as ours, contextlib.ExitStack() as its:
                channel, its_channel = socket.socketpair()
                ours.enter_context(channel)
                its.enter_context(its_channel)
                filter_fd = None
                if self.interpreter and (program := _filter_program()) is not None:
                    filter_fd = os.memfd_create("seccomp")
                    its.callback(os.close, filter_fd)
                    os.pwrite(filter_fd, program, 0)
                errors = ours.enter_context(tempfile.TemporaryFile())
                python = [self.interpreter or sys.executable, "-I", "-S", "-c", _driver_text(is_judge)]
                python += map(str, (its_channel.fileno(), max_frame_bytes))
                process = subprocess.Popen(  # noqa: S603 - our own command line
                    python if self.interpreter is None else [*_bubblewrap(self.interpreter, filter_fd), *python],
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    cwd="/",
                    pass_fds=[its_channel.fileno()] if filter_fd is None else [its_channel.fileno(), filter_fd],
                    start_new_session=True,
                    user=NOBODY if drop_root else None,
                    group=NOBODY if drop_root else None,
                    extra_groups=[] if drop_root else None,
                )
                ours.pop_all()
        except OSError as error:
            raise RewardError(f"cannot start the sandbox: {error}; {INSTALL_HINT}") from error
        confined = Confined(process, channel, errors, limits, max_frame_bytes)
        rlimits = {
            "RLIMIT_CPU": math.ceil(limits.cpu_s),
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.output_bytes,
            "RLIMIT_NOFILE": MAX_OPEN_FILES,
            "RLIMIT_CORE": 0,
        }
        if is_confined:  # Else it would count all of the user's processes.
            rlimits["RLIMIT_NPROC"] = MAX_PROCESSES
        confined.send({"code": code, "limits": rlimits, "output_bytes": limits.output_bytes, "confined": is_confined})
        return confined


def open_sandbox(config: CodeExecReward) -> Sandbox:
    """Return the sandbox that the config asks for.

    Raises:
        RewardError: bubblewrap is asked for and does not work here; the message says what to install or to set.
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
    """Run a program in the sandbox and return whether it came back right; takes about 0.1 s."""
    if sys.platform != "linux":
        return SandboxStatus(False, f"bubblewrap needs Linux, this is {sys.platform}")
    if shutil.which("bwrap") is None:
        return SandboxStatus(False, f"bubblewrap is not installed: {INSTALL_HINT}")
    if "--size" not in _bubblewrap_help():
        return SandboxStatus(False, f"this bubblewrap is too old: {INSTALL_HINT}")
    reasons = []
    for interpreter in ("/usr/bin/python3", str(Path(sys.executable).resolve())):
        reason = _try(interpreter) if Path(interpreter).exists() else "it is not there"
        if not reason:
            return SandboxStatus(True, f"bubblewrap with {interpreter}", interpreter)
        reasons.append(f"with {interpreter}: {reason}")
    return SandboxStatus(False, "; ".join(reasons))


def _try(interpreter: str) -> str:
    """Run one program; return what went wrong, empty where nothing did."""
    code = "import os; print(6 * 7, os.path.exists('/etc/passwd'), len(os.listdir('/tmp')))"
    try:
        with contextlib.closing(Sandbox(CodeExecReward(), interpreter).launch(code)) as confined:
            confined.begin()
            confined.send({"op": "run", "stdin": ""})
            reply = confined.receive()
    except (ProgramStopped, RewardError) as stopped:
        return str(stopped)
    return "" if reply == {"status": 0, "output": "42 False 0\n"} else f"a program that should print '42 False 0' gave {reply}"


def _bubblewrap(interpreter: str, filter_fd: int | None) -> list[str]:
    options = ["bwrap", *_OPTIONS.split()]
    options += ["--disable-userns"] if "--disable-userns" in _bubblewrap_help() else []
    for name in ("lib", "lib64", "bin"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    if not interpreter.startswith("/usr/"):  # it is the one that runs us
        folder = str(Path(sys.base_prefix).resolve())
        options += ["--ro-bind", folder, folder]
    options += _FOLDERS.split()
    if filter_fd is not None:
        options += ["--seccomp", str(filter_fd)]
    return [*options, "--"]


@cache
def _driver_text(is_judge: bool) -> str:
    """Return a program that makes the modules of the driver from their text, and runs it."""
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
    """Return the system-call filter; None where pyseccomp is missing."""
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
