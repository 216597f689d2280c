"""What runs inside the sandbox. Sent as text to the sandbox's own interpreter: standard library only, Python 3.8 and later.

Two roles, each a driver that forks one process a test, so that no test sees what another left behind and the driver itself never
runs foreign code:

- `candidate` holds the model-written program. `run` executes it with an input and returns what it printed; `session` loads it and
  answers requests about it (call this function, read that attribute) until told to end.
- `judge` holds the task's test code, in a sandbox of its own. Every name the program defines is a `Remote` there, and using it is
  a request to a session of the candidate.

Whoever judges (the judge, or the scoring process outside) never shares a process with the program, and only plain values cross:
the program cannot know what is expected of it, cannot reach the code that compares, and cannot print or exit its way to a pass.
A `Remote` equals another `Remote` if the program says so, and never equals a plain value.

Wire, both ways: 4 bytes little-endian length, then JSON. Values: see `Wire`.
"""

from __future__ import annotations

import builtins
import collections
import decimal
import fractions
import json
import operator
import os
import resource
import signal
import struct
import sys
import tempfile
import types

PASSED = 77
"""Exit status of a judge's test process that reached its end; a plain 0 is too easy to come by."""
SAFE_INT = 1 << 53

Frame = dict


class SessionOver(BaseException):
    """The process at the other end of the pipe is gone, has said that it ended, or does not keep to the protocol."""


class Pipe:
    """Length-prefixed JSON over a pair of file descriptors; refuses frames larger than `max_bytes`."""

    def __init__(self, read_fd, write_fd, max_bytes):
        self.read_fd, self.write_fd, self.max_bytes = read_fd, write_fd, max_bytes

    def read(self):
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > self.max_bytes:
            raise SessionOver("frame of %d bytes" % size)
        frame = json.loads(self._exactly(size))
        if not isinstance(frame, dict):
            raise SessionOver("not a frame")
        return frame

    def write(self, frame):
        payload = json.dumps(frame).encode()
        left = memoryview(struct.pack("<I", len(payload)) + payload)
        while left:
            left = left[os.write(self.write_fd, left) :]

    def _exactly(self, size):
        chunks = []
        while size:
            chunk = os.read(self.read_fd, min(size, 1 << 20))
            if not chunk:
                raise SessionOver("end of file")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


# -- values --------------------------------------------------------------------------------------------------------------


class Wire:
    """Plain values as JSON: numbers, text and lists as they are, everything else as `{"t": tag, "v": ...}`.

    What is not plain stays where it is and travels as a number: `theirs` is an object of the sender, `yours` one of the receiver.
    """

    def __init__(self, make_remote):
        self.make_remote = make_remote
        self.exported = []
        self.export_ids = {}
        self.remotes = {}

    def encode(self, value):
        if value is None or value is True or value is False:
            return value
        if isinstance(value, Remote):
            return {"t": "yours", "v": value._remote_id}
        for kind, encode in _ENCODERS:
            if isinstance(value, kind):
                return encode(self, value)
        if id(value) not in self.export_ids:
            self.export_ids[id(value)] = len(self.exported)
            self.exported.append(value)
        return {"t": "theirs", "v": self.export_ids[id(value)]}

    def decode(self, value):
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag, inner = value["t"], value["v"]
        if tag == "theirs":
            if inner not in self.remotes:
                self.remotes[inner] = self.make_remote(inner)
            return self.remotes[inner]
        if tag == "yours":
            return self.exported[inner]
        return _DECODERS[tag](self, inner)


def _encode_int(_, value):
    value = int.__int__(value)
    return value if -SAFE_INT < value < SAFE_INT else {"t": "int", "v": hex(value)}


def _tagged(tag, items):
    return lambda wire, value: {"t": tag, "v": [wire.encode(item) for item in items(value)]}


_ENCODERS = (
    (int, _encode_int),
    (float, lambda _, value: float.__float__(value)),
    (str, lambda _, value: str.__str__(value)),
    (list, lambda wire, value: [wire.encode(item) for item in list.__iter__(value)]),
    (tuple, _tagged("tuple", tuple.__iter__)),
    (set, _tagged("set", set.__iter__)),
    (frozenset, _tagged("frozenset", frozenset.__iter__)),
    (dict, lambda wire, value: {"t": "dict", "v": [[wire.encode(k), wire.encode(v)] for k, v in dict.items(value)]}),
    (collections.deque, _tagged("deque", iter)),
    (range, lambda _, value: {"t": "range", "v": [value.start, value.stop, value.step]}),
    (bytearray, lambda _, value: {"t": "bytearray", "v": bytes(value).hex()}),
    (bytes, lambda _, value: {"t": "bytes", "v": value.hex()}),
    (complex, lambda _, value: {"t": "complex", "v": [value.real, value.imag]}),
    (decimal.Decimal, lambda _, value: {"t": "decimal", "v": str(value)}),
    (fractions.Fraction, lambda _, value: {"t": "fraction", "v": str(value)}),
)

_DECODERS = {
    "int": lambda _, inner: int(inner, 16),
    "tuple": lambda wire, inner: tuple(wire.decode(item) for item in inner),
    "set": lambda wire, inner: {wire.decode(item) for item in inner},
    "frozenset": lambda wire, inner: frozenset(wire.decode(item) for item in inner),
    "dict": lambda wire, inner: {wire.decode(key): wire.decode(value) for key, value in inner},
    "deque": lambda wire, inner: collections.deque(wire.decode(item) for item in inner),
    "range": lambda _, inner: range(*inner),
    "bytearray": lambda _, inner: bytearray.fromhex(inner),
    "bytes": lambda _, inner: bytes.fromhex(inner),
    "complex": lambda _, inner: complex(*inner),
    "decimal": lambda _, inner: decimal.Decimal(inner),
    "fraction": lambda _, inner: fractions.Fraction(inner),
}

OPERATIONS = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
    "isinstance": lambda kind, value: isinstance(value, kind),
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "matmul": operator.matmul,
}


class Peer:
    """One end of a session: asks the other end, and serves what it asks back while an answer is awaited (callbacks).

    `may` says which requests this end serves: all at the candidate, `judge_may` at the judge.
    """

    def __init__(self, pipe, may):
        self.pipe, self.may, self.ended = pipe, may, False
        self.wire = Wire(lambda remote_id: Remote(self, remote_id))

    def ask(self, name, target, args=(), kwargs=None):
        encode = self.wire.encode
        before = [encode(arg) for arg in args]
        self.pipe.write({
            "op": name,
            "target": encode(target),
            "args": before,
            "kwargs": {k: encode(v) for k, v in (kwargs or {}).items()},
        })
        while True:
            frame = self.pipe.read()
            if "op" in frame:
                self.serve(frame)
            elif "raise" in frame:
                raise_like(*frame["raise"])
            elif "value" in frame:
                for index, changed in frame.get("changed", ()):
                    replace_contents(args[index], self.wire.decode(changed))
                return self.wire.decode(frame["value"])
            else:
                self.ended = True
                raise SessionOver("the program ended: %s" % frame.get("ended"))

    def serve(self, frame):
        try:
            reply = self._perform(frame)
        except SessionOver:
            raise
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a function is an answer too
            reply = {"raise": [type(error).__name__, str(error)[:1000]]}
        self.pipe.write(reply)

    def _perform(self, frame):
        wire = self.wire
        target = wire.decode(frame["target"])
        args = [wire.decode(arg) for arg in frame["args"]]
        kwargs = {str(key): wire.decode(value) for key, value in frame["kwargs"].items()}
        if not self.may(frame["op"], target, args):
            raise PermissionError(frame["op"])
        value = OPERATIONS[frame["op"]](target, *args, **kwargs)
        changed = []
        for index, arg in enumerate(args):
            if isinstance(arg, (list, dict, set, bytearray, collections.deque)):
                after = wire.encode(arg)
                if after != frame["args"][index]:
                    changed.append([index, after])
        return {"value": wire.encode(value), "changed": changed}


def candidate_may(_op, _target, _args):
    """Serve whatever the judge asks."""
    return True


def judge_may(op, target, args):
    """Let the program call the functions a test hands it, and use the public attributes and items of objects that the test made.

    Not the attributes of functions, classes and modules, nor private names: they lead to the test's own code and values.
    """
    if isinstance(target, Remote):
        return False
    if op == "call":
        return callable(target)
    if callable(target) or isinstance(target, (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)):
        return False
    if op in ("getattr", "setattr"):
        return isinstance(args[0], str) and not args[0].startswith("_")
    return op in ("getitem", "setitem", "delitem", "len", "iter", "next", "bool", "str", "eq")


class Remote:
    """An object that lives in the candidate's process. Never equal to, and never combined with, a plain value."""

    __slots__ = ("_peer", "_remote_id")

    def __init__(self, peer, remote_id):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_remote_id", int(remote_id))

    def __call__(self, *args, **kwargs):
        return self._peer.ask("call", self, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._peer.ask("getattr", self, (name,))

    def __setattr__(self, name, value):
        self._peer.ask("setattr", self, (name, value))

    def __getitem__(self, key):
        return self._peer.ask("getitem", self, (key,))

    def __setitem__(self, key, value):
        self._peer.ask("setitem", self, (key, value))

    def __delitem__(self, key):
        self._peer.ask("delitem", self, (key,))

    def __len__(self):
        return self._peer.ask("len", self)

    def __iter__(self):
        iterator = self._peer.ask("iter", self)
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __next__(self):
        return self._peer.ask("next", self)

    def __bool__(self):
        return self._peer.ask("bool", self) is True

    def __str__(self):
        return self._peer.ask("str", self)

    def __repr__(self):
        return self._peer.ask("repr", self)

    def __instancecheck__(self, value):
        return isinstance(value, Remote) and self._peer.ask("isinstance", self, (value,)) is True

    def __eq__(self, other):
        return isinstance(other, Remote) and self._peer.ask("eq", self, (other,)) is True

    def __hash__(self):
        return self._remote_id


def _between_remotes(name):
    def combine(self, other):
        return self._peer.ask(name, self, (other,)) if isinstance(other, Remote) else NotImplemented

    return combine


for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "matmul"):
    setattr(Remote, "__%s__" % _name, _between_remotes(_name))


def raise_like(type_name, message):
    """Raise the built-in exception of that name; anything else as RuntimeError."""
    kind = getattr(builtins, str(type_name), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise RuntimeError("%s: %s" % (type_name, message))
    try:
        error = kind(message)
    except TypeError:
        error = RuntimeError("%s: %s" % (type_name, message))
    raise error


def replace_contents(target, changed):
    """Bring a container that was passed by value to the state the program left it in."""
    if type(target) is not type(changed):
        return
    if isinstance(target, (list, bytearray)):
        target[:] = changed
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(changed)
    elif isinstance(target, collections.deque):
        target.clear()
        target.extend(changed)


# -- processes -----------------------------------------------------------------------------------------------------------


def limit_this_process(limits):
    """Apply the limits of one test to this process and, by inheritance, to all it starts."""
    for name, amount in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(kind, (amount, amount))


def detach_standard_streams(stdin_fd=None, stdout_fd=None):
    """Point the three standard streams at nothing, or at the descriptors given."""
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, stdin_fd), (1, stdout_fd), (2, None)):
        os.dup2(null if source is None else source, target)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)


def load_program(code, name):
    """Execute `code` as the module `name` and return its namespace."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def wait_for(pid):
    """Wait for a forked test and end what it left running; return its exit status, negative for a signal."""
    status = os.waitpid(pid, 0)[1]
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def fork_test(limits):
    """Fork; the child comes back limited, in a process group of its own, and gets 0."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        limit_this_process(limits)
    else:
        try:
            os.setpgid(pid, pid)
        except OSError:
            pass
    return pid


def scratch_file(content=b""):
    """Return the descriptor of a file without a name that holds `content`."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        file.seek(0)
        return os.dup(file.fileno())


class ProgramRun(BaseException):
    """Carries the program up out of the driver loop, so that it ends as a script does: threads joined, exit handlers run."""


def candidate_run(pipe, setup, frame):
    """Execute the program as a script with the given input; reply with its output and exit status."""
    stdin_fd, stdout_fd = scratch_file(frame["stdin"].encode()), scratch_file()
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


def candidate_session(pipe, setup, _frame):
    """Load the program and answer requests about it until told to end; then say how its process ended."""
    pid = fork_test(setup["limits"])
    if pid == 0:
        try:
            serve_session(pipe, setup["code"])
        finally:
            os._exit(1)
    pipe.write({"ended": wait_for(pid)})


def serve_session(pipe, code):
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


def judge_test(pipe, setup, frame):
    """Run one piece of test code against the candidate; reply whether it reached its end."""
    pid = fork_test(setup["limits"])
    if pid == 0:
        try:
            candidate = Pipe(setup["candidate_in"], setup["candidate_out"], pipe.max_bytes)
            os._exit(PASSED if passes(candidate, frame) else 1)
        finally:
            os._exit(1)
    pipe.write({"passed": wait_for(pid) == PASSED})


def passes(candidate, frame):
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
        pass
    finally:
        if not peer.ended:
            close_session(candidate)
    return False


def run_test(peer, names, code):
    """Execute test code. Built-in and standard-library names are the judge's own, whatever the program calls its functions."""
    own = set(dir(builtins)) | set(getattr(sys, "stdlib_module_names", ()))
    solution = types.ModuleType("solution")
    vars(solution).update((name, peer.wire.decode(value)) for name, value in names.items() if name not in own)
    sys.modules["solution"] = solution
    namespace = {**vars(solution), "__name__": "test"}
    exec(compile(code, "<test>", "exec", dont_inherit=True), namespace)


def close_session(candidate):
    """Tell the session to end and read up to the driver's word that it did."""
    try:
        candidate.write({"op": "end"})
        while "ended" not in candidate.read():
            pass
    except (SessionOver, OSError, ValueError):
        pass


ROLES = {"candidate": {"run": candidate_run, "session": candidate_session}, "judge": {"test": judge_test}}


def drive(pipe):
    """Serve one operation after the other until the outside closes the pipe; return the program to run as a script, if told to."""
    setup = pipe.read()
    while True:
        try:
            frame = pipe.read()
        except SessionOver:
            return None
        serve = ROLES[setup["role"]].get(frame.get("op"))
        if serve is not None:
            try:
                serve(pipe, setup, frame)
            except ProgramRun:
                return setup["code"]


def main():
    """Take the pipe's descriptors from the command line."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    code = drive(Pipe(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    if code is not None:
        sys.argv[:] = ["program.py"]
        load_program(code, "__main__")


if __name__ == "__main__":
    main()
