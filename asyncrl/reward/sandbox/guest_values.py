"""Encoding of plain data in messages between the two sandboxes of a test and the scoring process.

Sent as text into the sandbox (guest.py): standard library only, Python 3.9 and later, and as few imports as possible, because
each import takes as long as a simple program. A message is a length of 4 bytes, little-endian, then JSON. `decode` rebuilds exact
built-in types for all types of the other side; the caller decodes unknown tags, or raises Malformed.
"""
# ruff: noqa: ANN401 - values of any kind

from __future__ import annotations

import collections
import itertools
import json
import operator
import os
import struct
from collections import abc

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes 10 ms to import
    from collections.abc import Callable
    from typing import Any

    Frame = dict[str, Any]

SEVERAL = (abc.Iterator, abc.KeysView, abc.ValuesView, abc.ItemsView)
MAX_DEPTH = 100
MAX_ITEMS = 1_000_000
SAFE_INT = 1 << 53


class SessionOver(BaseException):
    """The other end of the pipe has ended or violates the protocol."""


class Malformed(Exception):  # noqa: N818 - of a message
    """A message does not have the form of plain data."""


class Pipe:
    """Messages over a blocking socket, of at most `max_bytes`; a trusted end may send larger ones."""

    def __init__(self, fd: int, max_bytes: int, is_trusted: bool = False) -> None:
        self.fd, self.max_bytes, self.is_trusted = fd, max_bytes, is_trusted

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
        """Send a message; raise ValueError if it is too large for the other end, SessionOver if the other end is closed."""
        payload = json.dumps(frame).encode()
        if len(payload) > self.max_bytes:
            raise ValueError(f"message of {len(payload)} bytes, {self.max_bytes} are allowed")
        try:
            write_all(self.fd, struct.pack("<I", len(payload)) + payload)
        except OSError as error:
            raise SessionOver(f"nobody reads: {error}") from error

    def _exactly(self, size: int) -> bytes:
        chunks = []
        while size:
            try:
                chunk = os.read(self.fd, min(size, 1 << 20))
            except OSError:  # reset by the other end, which has ended
                chunk = b""
            if not chunk:
                raise SessionOver("end of file")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


def write_all(fd: int, payload: bytes) -> None:
    """Write all bytes to a descriptor that may accept only a part at a time."""
    left = memoryview(payload)
    while left:
        left = left[os.write(fd, left) :]


def encode(value: Any, other: Callable[[Any], Any], as_lists: bool = False, depth: int = 0) -> Any:
    """Return a value in JSON form: numbers, text and lists unchanged, other types as `{"t": tag, "v": ...}`.

    Args:
        value: Anything.
        other: Encodes values that are not plain data, or raises.
        as_lists: Write iterators, views and ranges as lists.
        depth: The nesting depth of `value`.

    Raises:
        ValueError: It is nested too deep or has too many items.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")

    def items_of(values: Any) -> list[Any]:
        return [encode(item, other, as_lists, depth + 1) for item in values]

    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return _bounded_hex(int.__int__(value))
    if isinstance(value, (float, str)):
        return float.__float__(value) if isinstance(value, float) else str.__str__(value)
    if isinstance(value, list) or (as_lists and isinstance(value, (*SEVERAL, range))):
        return items_of(value if isinstance(value, list) else as_list(value))
    for tag, (kind, _) in _CONTAINERS.items():
        if isinstance(value, kind):
            fields = getattr(type(value), "_fields", None) if tag == "tuple" else None
            return {"t": tag, "v": items_of(value), **({"fields": list(fields)} if type(fields) is tuple else {})}
    if isinstance(value, dict):
        counts = {"counts": True} if isinstance(value, collections.Counter) else {}
        return {"t": "dict", "v": [items_of(pair) for pair in dict.items(value)], **counts}
    for kind in type(value).__mro__:
        name = f"{kind.__module__}.{kind.__name__}"
        if name in _WRITTEN:
            return {"t": name, "v": _WRITTEN[name](value)}
    return other(value)


def as_list(value: Any) -> list[Any]:
    """Return the items of an iterator, a view or a range, up to MAX_ITEMS."""
    items = list(itertools.islice(value, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items")
    return items


def _bounded_hex(number: Any) -> Any:
    return number if type(number) is not int or -SAFE_INT < number < SAFE_INT else {"t": "int", "v": hex(number)}


def _number(inner: Any) -> Any:
    return int(inner["v"], 16) if type(inner) is dict else inner


def _named(tag: str, inner: list[Any]) -> Any:
    """Rebuild an object of a type of `_WRITTEN`."""
    module, name = tag.split(".")
    kind = getattr(__import__(module), name)
    values = [*map(_number, inner)]
    if name == "Fraction":
        values = [*map(operator.index, values)]  # Never from text: 1E+999999999 would be expanded to every digit.
    return getattr(kind, "fromisoformat", getattr(kind, "fromhex", kind))(*values)


_CONTAINERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "deque": (collections.deque, collections.deque),
    "keys": (type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    "values": (type({}.values()), lambda items: dict(enumerate(items)).values()),
    "items": (type({}.items()), lambda items: dict(items).items()),
    "iterator": ((), iter),
}
"""By tag what is written so (an iterator by the judge alone), and what makes it of its items."""
_WRITTEN: dict[str, Callable[[Any], list[Any]]] = {
    "builtins.range": lambda value: [_bounded_hex(each) for each in (value.start, value.stop, value.step)],
    "builtins.bytes": lambda value: [bytes.hex(value)],
    "builtins.bytearray": lambda value: [bytearray.hex(value)],
    "builtins.complex": lambda value: [value.real, value.imag],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [_bounded_hex(value.numerator), _bounded_hex(value.denominator)],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    **dict.fromkeys(("datetime.date", "datetime.time", "datetime.datetime"), lambda value: [value.isoformat()]),
}
"""By type name, since importing some modules takes longer than most programs run: the parts to rebuild such an object."""
_DECODERS: dict[str, Callable[[str, Any], Any]] = {
    "int": lambda _, inner: int(inner, 16),
    "slice": lambda _, inner: slice(*map(_number, inner)),
    **dict.fromkeys(_WRITTEN, _named),
}


def decode(value: Any, other: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """Rebuild plain data from a message, as exact built-in types.

    Args:
        value: The result of json.loads.
        other: Decodes the tags that are not plain data, or raises Malformed.
        depth: The nesting depth of `value` in the message.

    Raises:
        Malformed: `encode` cannot have produced it.
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
            kind = _with_names(value["fields"]) if tag == "tuple" and "fields" in value else _CONTAINERS[tag][1]
            return kind([decode(item, other, depth + 1) for item in inner])
        if tag == "dict":
            pairs = {decode(key, other, depth + 1): decode(item, other, depth + 1) for key, item in inner}
            return collections.Counter(pairs) if "counts" in value else pairs
        if tag in _DECODERS:
            return _DECODERS[tag](tag, inner)
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        raise Malformed(f"a {tag} that is none: {error}") from error
    return other(tag, value)


_named_tuples: dict[tuple[str, ...], type] = {}


def _with_names(fields: list[str]) -> Callable[[Any], Any]:
    """Return a tuple class with named items, like a namedtuple; built without evaluating the names, which are untrusted."""
    names = tuple(fields)
    if names not in _named_tuples:
        if not all(type(name) is str and name.isidentifier() and not name.startswith("_") for name in names):
            raise ValueError("names that are none")
        members = {name: property(operator.itemgetter(place)) for place, name in enumerate(names)}
        _named_tuples[names] = type("Named", (tuple,), {"__slots__": (), "_fields": names, **members})
    return _named_tuples[names]


def only_plain(tag: str, _value: Any) -> Any:
    """Refuse to decode a tag that is not plain data."""
    raise Malformed(f"{tag} is not plain data")


def refuse_objects(value: Any) -> Any:
    """Refuse to encode a value that is not plain data."""
    raise TypeError(f"an object of {type(value).__name__} is not plain data")
