"""Requests between the two ends of a session: what each may ask, how it is performed, how a result or an exception comes back."""
# ruff: noqa: ANN401 - values of any kind are its business

from __future__ import annotations

import builtins
import collections
import operator
import types
from collections.abc import Callable
from typing import Any

from asyncrl.reward.inside.pipe import Frame, Pipe, SessionOver
from asyncrl.reward.inside.values import Remote, Wire

OPERATIONS: dict[str, Callable[..., Any]] = {
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

    def __init__(self, pipe: Pipe, may: Callable[[str, Any, list[Any]], bool]) -> None:
        self.pipe, self.may, self.ended = pipe, may, False
        self.wire = Wire(lambda remote_id: Remote(self, remote_id))

    def ask(self, name: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Have the other end perform an operation; return its value, raise its exception or SessionOver."""
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
                raise SessionOver(f"the program ended: {frame.get('ended')}")

    def serve(self, frame: Frame) -> None:
        """Perform what the other end asks for and reply."""
        try:
            reply = self._perform(frame)
        except SessionOver:
            raise
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a function is an answer too
            reply = {"raise": [type(error).__name__, str(error)[:1000]]}
        self.pipe.write(reply)

    def _perform(self, frame: Frame) -> Frame:
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


def candidate_may(_op: str, _target: Any, _args: list[Any]) -> bool:
    """Serve whatever the judge asks."""
    return True


def judge_may(op: str, target: Any, args: list[Any]) -> bool:
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


def raise_like(type_name: str, message: str) -> None:
    """Raise the built-in exception of that name; anything else as RuntimeError."""
    kind = getattr(builtins, str(type_name), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise RuntimeError(  # noqa: TRY004 - it stands for whatever the program raised
            f"{type_name}: {message}"
        )
    try:
        error: Exception = kind(message)
    except TypeError:
        error = RuntimeError(f"{type_name}: {message}")
    raise error


def replace_contents(target: Any, changed: Any) -> None:
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
