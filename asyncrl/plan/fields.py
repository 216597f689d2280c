"""`FIELD=VALUE` as a user types it, into the fields of a dataclass. Called by plan/ask.py and plan/sweep.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.plan.distributions import Distribution, parse_distribution

_PLAIN_TYPES: dict[type, type] = {
    msgspec.inspect.IntType: int,
    msgspec.inspect.FloatType: float,
    msgspec.inspect.BoolType: bool,
}


def split_assignments(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (field, value) of each.

    Raises:
        ConfigError: One is not of that form.
    """
    pairs = [tuple(text.split("=", 1)) for text in texts]
    for text, pair in zip(texts, pairs, strict=True):
        if len(pair) != 2 or not pair[1]:
            raise ConfigError(f"--set takes FIELD=VALUE, got {text!r}")
    return [(pair[0], pair[1]) for pair in pairs]


def convert_field(kind: type, name: str, value: str) -> Any:  # noqa: ANN401 - whatever the field's type is
    """Return `value` as the type that the dataclass's field has.

    Raises:
        ConfigError: There is no such field that can be typed, or the value does not fit it.
    """
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.DataclassType)
    fields = {item.name: item.type for item in described.fields if _can_be_typed(item.type)}
    if name not in fields:
        raise ConfigError(f"there is no field {name!r}; there are {', '.join(fields)}")
    allowed = fields[name]
    if isinstance(allowed, msgspec.inspect.DataclassType):
        return parse_distribution(value)
    wanted = _PLAIN_TYPES.get(type(allowed), str)
    try:
        converted: object = msgspec.convert(value, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} takes {wanted.__name__}, got {value!r}") from error
    if isinstance(allowed, msgspec.inspect.LiteralType) and converted not in allowed.values:
        raise ConfigError(f"{name} takes one of {', '.join(map(str, allowed.values))}; got {value!r}")
    return converted


def _can_be_typed(allowed: msgspec.inspect.Type) -> bool:
    if isinstance(allowed, msgspec.inspect.DataclassType):
        return allowed.cls is Distribution
    return isinstance(allowed, msgspec.inspect.LiteralType) or type(allowed) in _PLAIN_TYPES
