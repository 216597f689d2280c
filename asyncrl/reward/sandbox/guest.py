"""What runs inside a sandbox, sent as text to an interpreter of its own: standard library only, Python 3.9 and later.

A driver forks one process for each test, so that no test sees what another left, and runs no foreign code itself. Two roles:

- `candidate` holds the program that a model wrote: `run` executes it as a script, `function` calls one function of it, `session`
  loads it and answers requests about it until it is told to end.
- `judge` holds a task's test code, in a sandbox of its own, and has a session with the candidate.

What makes a pass impossible to fake:
- The judge asks for the names that it was told to ask for (test_code.py finds them in the test's source) and for nothing else.
- Plain data is rebuilt as exact built-in types (`decode`). Everything else is a `Handle`: using it is a request to the candidate.
- A handle never equals plain data and is never ordered against it. What an operator makes of a handle and plain data stays a
  handle that cannot be counted, iterated or turned into a number, because the program has then seen the test's value.
- The judge serves one request: a call, with plain data, of a function that the test passed to a call that is still running.

Messages are 4 bytes little-endian length, then JSON.
"""
# ruff: noqa: ANN401, S102, BLE001, SLF001 - values of any kind, foreign code and whatever it raises are its business

from __future__ import annotations

import builtins
import collections
import collections.abc
import contextlib
import copy
import itertools
import json
import operator
import os
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable, Generator
from typing import Any

_SEVERAL = (collections.abc.Iterator, collections.abc.KeysView, collections.abc.ValuesView, collections.abc.ItemsView)
MAX_DEPTH = 100
MAX_ITEMS = 1_000_000
SAFE_INT = 1 << 53
PASSED, FAILED = 77, 1
"""Exit statuses of a judge's test process: at its end, and after any exception."""
_iteration_ends = (StopIteration, StopAsyncIteration, GeneratorExit)

Frame = dict[str, Any]


class SessionOver(BaseException):
    """The other end of the pipe is gone, has ended, or does not keep to the protocol."""


class Malformed(Exception):  # noqa: N818 - of a message
    """A message does not have the form of plain data."""


class Pipe:
    """Messages over two blocking descriptors, of at most `max_bytes`; what a trusted end sends may be larger."""

    def __init__(self, read_fd: int, write_fd: int, max_bytes: int, is_trusted: bool = False) -> None:
        self.read_fd, self.write_fd, self.max_bytes, self.is_trusted = read_fd, write_fd, max_bytes, is_trusted

    def read(self) -> Frame:
        """Return the next message, or raise SessionOver."""
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > self.max_bytes and not self.is_trusted:
            raise SessionOver(f"message of {size} bytes")
        try:
            frame = json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise SessionOver(f"not a message: {error}") from error
        if type(frame) is not dict:
            raise SessionOver("not a message")
        return frame

    def write(self, frame: Frame) -> None:
        """Send a message, or raise ValueError where it is larger than the other end takes."""
        payload = json.dumps(frame).encode()
        if len(payload) > self.max_bytes:
            raise ValueError(f"message of {len(payload)} bytes, {self.max_bytes} are allowed")
        left = memoryview(struct.pack("<I", len(payload)) + payload)
        while left:
            left = left[os.write(self.write_fd, left) :]

    def _exactly(self, size: int) -> bytes:
        chunks = []
        while size:
            chunk = os.read(self.read_fd, min(size, 1 << 20))
            if not chunk:
                raise SessionOver("end of file")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


# -- plain data ----------------------------------------------------------------------------------------------------------


def _as_list(value: Any) -> list[Any]:
    """Return what an iterator, a view or a range holds, up to MAX_ITEMS."""
    items = list(itertools.islice(value, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items")
    return items


def encode(value: Any, other: Callable[[Any], Any], as_lists: bool = False, depth: int = 0) -> Any:
    """Return a value as JSON can hold it: numbers, text and lists as they are, the rest as `{"t": tag, "v": ...}`.

    Args:
        value: Anything.
        other: Encodes what is not plain data, or raises.
        as_lists: Write iterators, views and ranges as lists.
        depth: Of `value` in what is encoded.

    Raises:
        ValueError: It is nested too deep or has too many items.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return _bounded_hex(int.__int__(value))
    if isinstance(value, (float, str)):
        return float.__float__(value) if isinstance(value, float) else str.__str__(value)
    if isinstance(value, list) or (as_lists and isinstance(value, (*_SEVERAL, range))):
        return [encode(item, other, as_lists, depth + 1) for item in (value if isinstance(value, list) else _as_list(value))]
    for tag, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset), ("deque", collections.deque)):
        if isinstance(value, kind):
            return {"t": tag, "v": [encode(item, other, as_lists, depth + 1) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(each, other, as_lists, depth + 1) for each in pair] for pair in dict.items(value)]
        return {"t": "dict", "v": pairs}
    for plain_kind, tag, write in _WRITTEN:
        if isinstance(value, plain_kind):
            return {"t": tag, "v": write(value)}
    name = f"{type(value).__module__}.{type(value).__name__}"
    return {"t": name, "v": _WRITTEN_BY_NAME[name](value)} if name in _WRITTEN_BY_NAME else other(value)


def _bounded_hex(number: int) -> Any:
    return number if -SAFE_INT < number < SAFE_INT else {"t": "int", "v": hex(number)}


_WRITTEN: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (range, "range", lambda value: [_bounded_hex(each) for each in (value.start, value.stop, value.step)]),
    (bytes, "bytes", bytes.hex),
    (bytearray, "bytearray", bytearray.hex),
    (complex, "complex", lambda value: [value.real, value.imag]),
)
_WRITTEN_BY_NAME: dict[str, Callable[[Any], Any]] = {
    "decimal.Decimal": str,
    "fractions.Fraction": lambda value: [hex(value.numerator), hex(value.denominator)],
    "datetime.date": lambda value: value.isoformat(),
    "datetime.datetime": lambda value: value.isoformat(),
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
}
"""Types whose modules take longer to import than most programs to run."""


def _dated(kind: str, inner: Any) -> Any:
    import datetime as dt  # noqa: PLC0415

    return dt.timedelta(*inner) if kind == "timedelta" else getattr(dt, kind).fromisoformat(inner)


def _exact(kind: str, inner: Any) -> Any:
    import decimal  # noqa: PLC0415
    import fractions  # noqa: PLC0415

    return decimal.Decimal(inner) if kind == "Decimal" else fractions.Fraction(*(int(each, 16) for each in inner))


def _number(inner: Any) -> Any:
    if type(inner) is not int:
        inner = int(inner["v"], 16)
    return inner


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda inner: int(inner, 16),
    "range": lambda inner: range(*map(_number, inner)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda inner: complex(*inner),
    "decimal.Decimal": lambda inner: _exact("Decimal", inner),
    "fractions.Fraction": lambda inner: _exact("Fraction", inner),
    "datetime.date": lambda inner: _dated("date", inner),
    "datetime.datetime": lambda inner: _dated("datetime", inner),
    "datetime.timedelta": lambda inner: _dated("timedelta", inner),
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "iterator": iter,
}


def decode(value: Any, other: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """Rebuild plain data from a message, as exact built-in types.

    Args:
        value: As json.loads made it.
        other: Decodes the tags that are not plain data, or raises Malformed.
        depth: Of `value` in the message.

    Raises:
        Malformed: It is not what `encode` makes.
    """
    if depth > MAX_DEPTH:
        raise Malformed(f"nested deeper than {MAX_DEPTH}")
    if type(value) is list:
        return [decode(item, other, depth + 1) for item in value]
    if type(value) is not dict:
        return value
    tag, inner = value.get("t"), value.get("v", ())
    if type(tag) is not str:
        raise Malformed("a value without a tag")
    try:
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](decode(item, other, depth + 1) for item in inner)
        if tag == "dict":
            return {decode(key, other, depth + 1): decode(item, other, depth + 1) for key, item in inner}
        if tag in _DECODERS:
            return _DECODERS[tag](inner)
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        raise Malformed(f"a {tag} that is none: {error}") from error
    return other(tag, value)


def _only_plain(tag: str, _value: Any) -> Any:
    raise Malformed(f"{tag} is not plain data")


def _refuse_objects(value: Any) -> Any:
    raise TypeError(f"an object of {type(value).__name__} is not plain data")


# -- the candidate's side of a session ---------------------------------------------------------------------------------------


def _await(value: Any) -> Any:
    async def result() -> Any:
        return await value

    return _loop().run_until_complete(result())


def _loop(loops: list[Any] = []) -> Any:  # noqa: B006 - one loop for a session
    import asyncio  # noqa: PLC0415 - takes as long to import as all of a simple program's run

    if not loops:
        loops.append(asyncio.new_event_loop())
    return loops[0]


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("eq", "lt", "le", "gt", "ge")
CONVERSIONS = ("len", "bool", "int", "float", "complex", "round", "iter", "next", "reversed", "hash", "divmod")
UNARY = ("neg", "pos", "invert", "abs")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*BINARY, *COMPARISONS, *UNARY)},
    **{f"i{name.rstrip('_')}": getattr(operator, f"i{name.rstrip('_')}") for name in BINARY},
    **{name: getattr(builtins, name) for name in (*CONVERSIONS, "str", "repr", "format", "isinstance", "issubclass")},
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", "delattr")},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains", "index")},
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context, *error: bool(type(context).__exit__(context, *error)),
    "await": _await,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
"""What a candidate does at a judge's request."""


class ProgramSession:
    """The candidate's end: performs what the judge asks for, with the program's objects kept by number."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def serve(self, namespace: dict[str, Any], names: list[str]) -> None:
        """Tell the names that were asked for, then serve until told to end."""
        told = {name: self.encode(namespace[name]) for name in names if name in namespace}
        self.pipe.write({"names": told})
        while True:
            frame = self.pipe.read()
            if frame["op"] == "end":
                os._exit(0)
            try:
                reply = self._perform(frame)
            except SessionOver:
                raise
            except BaseException as error:
                reply = {"raise": self._error(error)}
            self.pipe.write(reply)

    def encode(self, value: Any, as_object: bool = False) -> Any:
        """Return plain data as it is and anything else as a number under which it is kept."""
        return self._object(value) if as_object else encode(value, self._object)

    def _object(self, value: Any) -> Any:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        number = self.numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return {
                "t": "error class",
                "v": number,
                "name": value.__name__,
                "bases": [self._base(each) for each in value.__bases__],
            }
        return {"t": "object", "v": number}

    def _base(self, kind: type) -> Any:
        return kind.__name__ if kind.__module__ == "builtins" else self._object(kind)

    def _error(self, error: BaseException) -> Frame:
        try:
            args = [self.encode(each) for each in error.args]
        except ValueError:
            args = []
        return {"kind": self._base(type(error)), "text": str(error)[:1000], "args": args, "object": self._object(error)["v"]}

    def _perform(self, frame: Frame) -> Frame:
        args = [decode(each, self._decode_other) for each in frame["args"]]
        kwargs = {name: decode(each, self._decode_other) for name, each in frame["kwargs"].items()}
        value = OPERATIONS[frame["op"]](*args, **kwargs)
        changed = []
        for place, after in (*enumerate(args), *kwargs.items()):
            if isinstance(after, (list, dict, set, bytearray, collections.deque)):
                encoded = self.encode(after)
                if encoded != (frame["args"][place] if isinstance(place, int) else frame["kwargs"][place]):
                    changed.append([place, encoded])
        return {"value": self.encode(value, frame["as_object"]), "changed": changed}

    def _decode_other(self, tag: str, value: Any) -> Any:
        if tag == "yours":
            return self.objects[value["v"]]
        if tag == "built-in":
            return getattr(builtins, value["v"])
        number = value["v"]
        return lambda *args, **kwargs: self._call_back(number, args, kwargs)

    def _call_back(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the test."""
        self.pipe.write({
            "call": number,
            "args": [encode(each, _refuse_objects) for each in args],
            "kwargs": {name: encode(each, _refuse_objects) for name, each in kwargs.items()},
        })
        reply = self.pipe.read()
        if "value" in reply:
            return decode(reply["value"], _only_plain)
        kind = getattr(builtins, str(reply["raise"][0]), RuntimeError)
        raise kind(*reply["raise"][1:]) if issubclass(kind, Exception) else RuntimeError(*reply["raise"])


# -- the judge's side of a session -------------------------------------------------------------------------------------------


class JudgeSession:
    """The judge's end: asks the candidate, and serves calls of functions that are arguments of a call still running."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe, self.ended = pipe, False
        self.handles: dict[int, Handle] = {}
        self.error_classes: dict[int, type] = {}
        self.functions: dict[int, Callable[..., Any]] = {}

    def open(self, names: list[str]) -> dict[str, Any]:
        """Begin a session; return the values of those names that the program has."""
        self.pipe.write({"op": "session", "names": names})
        frame = self.pipe.read()
        told = frame.get("names")
        if type(told) is not dict:
            self.ended = "ended" in frame
            raise SessionOver("the program did not load")
        return {name: self._decode(told[name]) for name in names if name in told}

    def ask(self, operation: str, *args: Any, derived: bool = False, **kwargs: Any) -> Any:
        """Have the candidate perform an operation; return its value, raise its exception or SessionOver.

        `derived` keeps the value a handle, whatever it is.
        """
        passed: list[int] = []
        try:
            self.pipe.write({
                "op": operation,
                "args": [self._encode(each, passed) for each in args],
                "kwargs": {name: self._encode(each, passed) for name, each in kwargs.items()},
                "as_object": derived,
            })
            while "call" in (frame := self.pipe.read()):
                self.pipe.write(self._call(frame))
        finally:
            for number in passed:
                del self.functions[number]
        if "raise" in frame:
            raise self._error(frame["raise"], operation)
        if "value" not in frame:
            self.ended = "ended" in frame
            raise SessionOver("the program ended")
        if operation == "call":
            for place, after in frame.get("changed", ()):
                _replace_contents(args[place] if type(place) is int else kwargs[place], self._decode(after))
        value = self._decode(frame["value"])
        if not derived:
            return value
        if not isinstance(value, Handle):
            raise SessionOver("a value where an object was asked for")
        object.__setattr__(value, "_handle_derived", True)
        return value

    def close(self) -> None:
        """Tell the session to end and read up to the driver's word that it did."""
        with contextlib.suppress(SessionOver, OSError, ValueError):
            if not self.ended:
                self.pipe.write({"op": "end"})
            while not self.ended:
                self.ended = "ended" in self.pipe.read()

    def _encode(self, value: Any, passed: list[int]) -> Any:
        def other(each: Any) -> Any:
            if isinstance(each, Handle) or "_handle_number" in getattr(
                each, "__dict__", ()
            ):  # the second: an error, or its class
                return {"t": "yours", "v": each._handle_number}
            name = getattr(each, "__name__", "")
            if getattr(builtins, name, None) is each and not name.startswith("_"):
                return {"t": "built-in", "v": name}
            if callable(each):
                number = len(self.functions)
                while number in self.functions:
                    number += 1
                self.functions[number] = each
                passed.append(number)
                return {"t": "function", "v": number}
            if isinstance(each, _SEVERAL):
                return {"t": "iterator", "v": [self._encode(item, passed) for item in _as_list(each)]}
            raise TypeError(f"a test cannot hand an object of {type(each).__name__} to the program")

        return encode(value, other)

    def _decode(self, value: Any) -> Any:
        try:
            return decode(value, self._decode_other)
        except (Malformed, RecursionError) as error:
            raise SessionOver(f"not a value: {error}") from error

    def _decode_other(self, tag: str, value: Any, depth: int = 0) -> Any:
        number = value.get("v")
        if type(number) is not int or depth > 20:
            raise Malformed(f"{tag} without a number")
        if tag == "object":
            if number not in self.handles:
                self.handles[number] = Handle(self, number)
            return self.handles[number]
        if tag != "error class":
            raise Malformed(f"unknown tag {tag}")
        if number not in self.error_classes:
            bases = value.get("bases")
            if type(bases) is not list or not 0 < len(bases) <= 8:
                raise Malformed("an error class without bases")
            parents = tuple(_built_in_error(each) if type(each) is str else self._parent(each, depth) for each in bases)
            self.error_classes[number] = types.new_class(str(value.get("name"))[:100], parents, {}, _error_members(self, number))
        return self.error_classes[number]

    def _parent(self, value: Any, depth: int) -> Any:
        if type(value) is not dict or value.get("t") != "error class":
            return Exception  # a mixin that is no exception
        return self._decode_other("error class", value, depth + 1)

    def _call(self, frame: Frame) -> Frame:
        """Serve the one thing that a program may ask for."""
        function = self.functions.get(frame["call"]) if type(frame["call"]) is int else None
        if function is None:
            raise SessionOver("the program called a function that is no argument of a running call")
        try:
            args = [decode(each, _only_plain) for each in frame["args"]]
            kwargs = {name: decode(each, _only_plain) for name, each in frame["kwargs"].items()}
            return {"value": encode(function(*args, **kwargs), _refuse_objects)}
        except Exception as error:
            texts = [each for each in error.args if type(each) in (str, int, float)]
            return {"raise": [type(error).__name__, *texts]}

    def _error(self, told: Any, operation: str) -> BaseException:
        """Return the exception that the program raised, as one that the test can catch by name."""
        if type(told) is not dict or type(told.get("text")) is not str or type(told.get("args")) is not list:
            raise SessionOver("not an error")
        kind = told.get("kind")
        error_class = _built_in_error(kind) if type(kind) is str else self._parent(kind, 0)
        if issubclass(error_class, _iteration_ends) and operation != "next":
            # Raised in a test's `all(map(f, values))` it would end the loop, and with it the test.
            return RuntimeError(f"the program raised {error_class.__name__}")
        args = [self._decode(each) for each in told["args"]]
        if hasattr(error_class, "_handle_number") and type(told.get("object")) is int:
            error: BaseException = error_class.__new__(error_class, *args)
            error.__dict__.update(_handle_number=told["object"], _text=told["text"])
            return error
        try:
            return error_class(*args)  # type: ignore[no-any-return]
        except (TypeError, ValueError):
            return RuntimeError(told["text"])


def _built_in_error(name: str) -> Any:
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, (Exception, SystemExit)) else RuntimeError


def _error_members(session: JudgeSession, class_number: int) -> Callable[[dict[str, Any]], None]:
    """Return what a class that stands for one of the program's error classes has of its own."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        made = session.ask("call", session.error_classes[class_number], *args, **kwargs)
        self.__dict__.update(_handle_number=made._handle_number, _text=str(made))

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return session.ask("getattr", self, name)

    def fill(members: dict[str, Any]) -> None:
        members.update(_handle_number=class_number, __init__=construct, __getattr__=attribute, __str__=lambda self: self._text)

    return fill


def _replace_contents(target: Any, after: Any) -> None:
    """Bring a container that was passed by value to the state that the program left it in."""
    if type(target) is not type(after):
        return
    if isinstance(target, (list, bytearray)):
        target[:] = after
    elif isinstance(target, (dict, set, collections.deque)):
        target.clear()
        (target.extend if isinstance(target, collections.deque) else target.update)(after)


class Handle:
    """An object of the program's. Equal to another handle where the program says so; never equal to plain data."""

    __slots__ = ("_handle_derived", "_handle_number", "_handle_session")

    def __init__(self, session: JudgeSession, number: int) -> None:
        object.__setattr__(self, "_handle_session", session)
        object.__setattr__(self, "_handle_number", number)
        object.__setattr__(self, "_handle_derived", False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it where it lives."""
        return self._handle_session.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._handle_session.ask("getattr", self, name)

    def __await__(self) -> Generator[None, None, Any]:
        return self._handle_session.ask("await", self)
        yield

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        """Tell it how the block ended. It cannot swallow the error: that would skip what the test still has to check."""
        self._handle_session.ask("exit", self, *((None, None, None) if kind is None else (_plain_error(kind), None, None)))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and self._handle_session.ask("isinstance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and self._handle_session.ask("issubclass", value, self) is True

    def __bool__(self) -> bool:
        return self._convert("bool") is True

    def __format__(self, form: str) -> Any:
        return self._convert("format", form) if form else str(self)

    def __deepcopy__(self, _memo: Any) -> Any:
        return self._handle_session.ask("deepcopy", self)

    def __contains__(self, value: Any) -> bool:
        return self._convert("contains", value) is True

    def _convert(self, operation: str, *args: Any) -> Any:
        if self._handle_derived:
            raise TypeError(f"{operation} of what an operator made of a program's object and the test's data is not supported")
        return self._handle_session.ask(operation, self, *args)


def _plain_error(kind: type) -> Any:
    return next(each for each in kind.__mro__ if getattr(builtins, each.__name__, None) is each and each is not object)


def _asked(operation: str) -> Callable[..., Any]:
    return lambda self, *args: self._handle_session.ask(operation, self, *args)


def _converted(operation: str) -> Callable[..., Any]:
    def convert(self: Handle, *args: Any) -> Any:
        value = self._convert(operation, *args)
        if operation == "iter":
            return value if isinstance(value, Handle) else iter(value)
        return value

    return convert


def _unary(operation: str) -> Callable[..., Any]:
    return lambda self: self._handle_session.ask(operation, self, derived=self._handle_derived)


def _compared(operation: str) -> Callable[..., Any]:
    def compare(self: Handle, other: Any) -> Any:
        return self._handle_session.ask(operation, self, other) is True if isinstance(other, Handle) else NotImplemented

    return compare


def _combined(operation: str, reflected: bool) -> Callable[..., Any]:
    def combine(self: Handle, other: Any, *rest: Any) -> Any:
        if type(other).__module__ == "datetime":
            return NotImplemented  # a difference of dates is read by its attributes, which would then be the program's to invent
        derived = self._handle_derived or not isinstance(other, Handle) or other._handle_derived
        pair = (other, self) if reflected else (self, other)
        return self._handle_session.ask(operation, *pair, *rest, derived=derived)

    return combine


for _name in ("str", "repr", "setattr", "delattr", "getitem", "setitem", "delitem", "enter", "copy"):
    setattr(Handle, f"__{_name}__", _asked(_name))
for _name in ("len", "int", "float", "complex", "index", "round", "iter", "next", "reversed", "hash"):
    setattr(Handle, f"__{_name}__", _converted(_name))
for _name in UNARY:
    setattr(Handle, f"__{_name}__", _unary(_name))
for _name in COMPARISONS:
    setattr(Handle, f"__{_name}__", _compared(_name))
for _name in (*BINARY, "divmod"):
    _plain_name = _name.rstrip("_")
    setattr(Handle, f"__{_plain_name}__", _combined(_name, reflected=False))
    setattr(Handle, f"__r{_plain_name}__", _combined(_name, reflected=True))
    if _name != "divmod":
        setattr(Handle, f"__i{_plain_name}__", _combined(f"i{_plain_name}", reflected=False))


# -- the driver --------------------------------------------------------------------------------------------------------------


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
    exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


class Driver:
    """Forks one process for each test, waits for it, and ends what it left behind."""

    def __init__(self, pipe: Pipe, setup: Frame) -> None:
        self.pipe, self.setup = pipe, setup

    def fork(self) -> int:
        """Fork; the child comes back limited, in a process group of its own, and gets 0."""
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            limit_this_process(self.setup["limits"])
        else:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        return pid

    def wait(self, pid: int) -> int:
        """Wait for a forked test and end what it left running; return its exit status, negative for a signal."""
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Confined, every process in sight is the program's own.
            os.kill(-1, signal.SIGKILL) if self.setup["confined"] else os.killpg(pid, signal.SIGKILL)
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def run(self, frame: Frame) -> str | None:
        """Execute the program as a script, or call a function of it; reply with exit status and output.

        The child has none of the driver's descriptors. It writes to a file without a name, which is read after its end.

        Returns:
            In the child that is to run the program as a script: the program.
        """
        stdin_fd, output_fd = scratch_file(str(frame.get("stdin", "")).encode("utf-8", "replace")), scratch_file()
        pid = self.fork()
        if pid == 0:
            is_script = "stdin" in frame
            result_fd = -1 if is_script else os.dup(output_fd)
            detach_standard_streams(stdin_fd, output_fd if is_script else None)
            for descriptor in (self.pipe.read_fd, self.pipe.write_fd, stdin_fd, output_fd):
                os.close(descriptor)
            if is_script:
                return str(self.setup["code"])
            call_function(self.setup["code"], frame, result_fd)
        status = self.wait(pid)
        output = os.pread(output_fd, self.setup["output_bytes"], 0)
        for descriptor in (stdin_fd, output_fd):
            os.close(descriptor)
        self.pipe.write({"status": status, "output": output.decode("utf-8", "replace")})
        return None

    def session(self, frame: Frame) -> None:
        """Load the program and answer requests about it until told to end; then say how its process ended."""
        pid = self.fork()
        if pid == 0:
            try:
                detach_standard_streams()
                namespace = load_program(self.setup["code"], "solution")
                ProgramSession(self.pipe).serve(namespace, frame["names"])
            finally:
                os._exit(1)
        self.pipe.write({"ended": self.wait(pid)})

    def test(self, frame: Frame) -> None:
        """Run one piece of test code against the candidate; reply whether it reached its end."""
        candidate = Pipe(self.setup["candidate_in"], self.setup["candidate_out"], self.pipe.max_bytes)
        pid = self.fork()
        if pid == 0:
            try:
                detach_standard_streams()
                os._exit(PASSED if passes(candidate, frame) else FAILED)
            finally:
                os._exit(FAILED)
        status = self.wait(pid)
        if status not in (PASSED, FAILED):  # it was killed, and its session waits for more
            JudgeSession(candidate).close()
        self.pipe.write({"passed": status == PASSED})

    def serve(self) -> str | None:
        """Serve one operation after the other until the outside closes the pipe; return as `run`."""
        operations: dict[str, Callable[[Frame], str | None]] = {"run": self.run, "session": self.session, "test": self.test}
        self.pipe.write({"ready": True})
        while True:
            try:
                frame = self.pipe.read()
            except SessionOver:
                return None
            operation = operations.get(str(frame.get("op")))
            program = operation(frame) if operation else None
            if program is not None:
                return program


def scratch_file(content: bytes = b"") -> int:
    """Return the descriptor of a file without a name that holds `content`."""
    path = f"/tmp/.{os.getpid()}-{os.urandom(8).hex()}"  # noqa: S108 - in memory and private inside the sandbox
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def call_function(code: str, frame: Frame, result_fd: int) -> None:
    """Call `function` or `Class().method` of the program, write the value as JSON, and end the process."""
    try:
        namespace = load_program(code, "solution")
        name, method = frame["function"], frame["method"]
        function = getattr(namespace[name](), method) if method else namespace[name]
        value = function(*frame["args"], **frame["kwargs"])
        if hasattr(value, "__await__"):
            value = _await(value)
        text = json.dumps(encode(value, _refuse_objects, as_lists=True)).encode()
        while text:
            text = text[os.write(result_fd, text) :]
        os._exit(0)
    finally:
        os._exit(1)


def passes(candidate: Pipe, frame: Frame) -> bool:
    """Run a test with the program's names in scope; return whether it reached its end."""
    session = JudgeSession(candidate)
    try:
        values = session.open(frame["names"])
        solution = types.ModuleType("solution")
        vars(solution).update(values)
        sys.modules["solution"] = solution
        if "asyncio" in frame["code"]:
            _let_asyncio_run_handles()
        namespace = {**{name: values[name] for name in frame["globals"] if name in values}, "__name__": "__main__"}
        exec(compile(frame["code"], "<test>", "exec", dont_inherit=True), namespace)
        for name in frame["test_functions"]:
            result = namespace[name]()
            if hasattr(result, "__await__"):
                _await(result)
    except BaseException:
        return False
    finally:
        session.close()
    return True


def _let_asyncio_run_handles() -> None:
    """Let asyncio.run take a coroutine of the program's, which it would refuse."""
    import asyncio  # noqa: PLC0415

    run = asyncio.run

    def run_any(main: Any, **options: Any) -> Any:
        async def awaited() -> Any:
            return await main

        return run(awaited() if isinstance(main, Handle) else main, **options)

    asyncio.run = run_any


def main() -> None:
    """Take the pipe's descriptors and the largest message from the command line."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    read_fd, write_fd, max_bytes = map(int, sys.argv[1:4])
    pipe = Pipe(read_fd, write_fd, max_bytes, is_trusted=True)
    code = Driver(pipe, pipe.read()).serve()
    if code is not None:
        sys.argv[:] = ["program.py"]
        load_program(code, "__main__")


if __name__ == "__main__":
    main()
