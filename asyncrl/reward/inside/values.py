"""Plain values as JSON, and `Remote` for all that is not plain.

`Wire` is one end of a session: what it has handed out, what it has received.
"""
# ruff: noqa: ANN401 - values of any kind are its business

from __future__ import annotations

import collections
import decimal
import fractions
from collections.abc import Callable
from typing import Any, Protocol

SAFE_INT = 1 << 53


class Asking(Protocol):
    """What a `Remote` needs of the peer it came from."""

    def ask(self, name: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Have the other end perform an operation on an object of its own."""


class Wire:
    """Plain values as JSON: numbers, text and lists as they are, everything else as `{"t": tag, "v": ...}`.

    What is not plain stays where it is and travels as a number: `theirs` is an object of the sender, `yours` one of the receiver.
    """

    def __init__(self, make_remote: Callable[[int], Remote]) -> None:
        self.make_remote = make_remote
        self.exported: list[Any] = []
        self.export_ids: dict[int, int] = {}
        self.remotes: dict[int, Remote] = {}

    def encode(self, value: Any) -> Any:
        """Return the value as JSON can hold it."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, Remote):
            return {"t": "yours", "v": value._remote_id}  # noqa: SLF001 - two halves of one protocol
        for kind, encode in _ENCODERS:
            if isinstance(value, kind):
                return encode(self, value)
        if id(value) not in self.export_ids:
            self.export_ids[id(value)] = len(self.exported)
            self.exported.append(value)
        return {"t": "theirs", "v": self.export_ids[id(value)]}

    def decode(self, value: Any) -> Any:
        """Return what `encode` was given at the other end."""
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


def _encode_int(_: Wire, value: Any) -> Any:
    value = int.__int__(value)
    return value if -SAFE_INT < value < SAFE_INT else {"t": "int", "v": hex(value)}


def _tagged(tag: str, items: Callable[[Any], Any]) -> Callable[[Wire, Any], Any]:
    return lambda wire, value: {"t": tag, "v": [wire.encode(item) for item in items(value)]}


_ENCODERS: tuple[tuple[type, Callable[[Wire, Any], Any]], ...] = (
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

_DECODERS: dict[str, Callable[[Wire, Any], Any]] = {
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


class Remote:
    """An object that lives in the candidate's process. Never equal to, and never combined with, a plain value."""

    __slots__ = ("_peer", "_remote_id")

    def __init__(self, peer: Asking, remote_id: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_remote_id", int(remote_id))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it where it lives."""
        return self._peer.ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._peer.ask("getattr", self, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, (name, value))

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, (key,))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self, (key, value))

    def __delitem__(self, key: Any) -> None:
        self._peer.ask("delitem", self, (key,))

    def __len__(self) -> int:
        return int(self._peer.ask("len", self))

    def __iter__(self) -> Any:
        iterator = self._peer.ask("iter", self)
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __next__(self) -> Any:
        return self._peer.ask("next", self)

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self) is True

    def __str__(self) -> str:
        return str(self._peer.ask("str", self))

    def __repr__(self) -> str:
        return str(self._peer.ask("repr", self))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._peer.ask("isinstance", self, (value,)) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._peer.ask("eq", self, (other,)) is True

    def __hash__(self) -> int:
        return hash(self._remote_id)


def _between_remotes(name: str) -> Callable[[Remote, Any], Any]:
    def combine(self: Remote, other: Any) -> Any:
        return self._peer.ask(name, self, (other,)) if isinstance(other, Remote) else NotImplemented

    return combine


for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "matmul"):
    setattr(Remote, f"__{_name}__", _between_remotes(_name))
