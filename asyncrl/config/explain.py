"""What a config may say at the place where it says something else: msgspec's message plus the names that are known there.

Called by config/load.py.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]*)`")


def explained(error: msgspec.ValidationError, raw: dict[str, Any], root: type) -> str:
    """Return the error's message, with the kinds, values or fields that are known there where it is about a name.

    Args:
        error: From `msgspec.convert(raw, root)`.
        raw: What was converted.
        root: The config struct.
    """
    message = str(error)
    found = _PATH.search(message)
    keys = re.findall(r"\[(\d+)\]|\.([A-Za-z_]\w*)", found["path"]) if found else []
    steps: list[str | int] = [int(index) if index else name for index, name in keys]
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown is not None:
        known = _fields(_at(root, raw, steps))
    elif message.startswith(("Invalid value", "Invalid enum value")) and steps:
        known = _values(root, raw, steps)
    else:
        known = []
    return f"{message}; known are {', '.join(known)}" if known else message


def _values(root: type, raw: Any, steps: list[str | int]) -> list[str]:  # noqa: ANN401 - plain nested TOML values
    """Return the tags (where the last step is a tag field) or literal values allowed at the end of `steps`."""
    holder = _at(root, raw, steps[:-1], choose=False)
    tags = [str(member.tag) for member in _members(holder) if isinstance(member, msgspec.inspect.StructType) and member.tag]
    if tags and steps[-1] == "kind":
        return tags
    return [
        str(value)
        for member in _members(_at(root, raw, steps))
        if isinstance(member, msgspec.inspect.LiteralType)
        for value in member.values
    ]


def _fields(place: msgspec.inspect.Type | None) -> list[str]:
    for member in _members(place):
        if isinstance(member, msgspec.inspect.StructType):
            return sorted(field.encode_name for field in member.fields)
    return []


def _at(root: type, raw: Any, steps: list[str | int], *, choose: bool = True) -> msgspec.inspect.Type | None:  # noqa: ANN401
    """Return the type at the end of `steps`; of a union of structs the one whose tag `raw` names, where `choose` says so."""
    place: msgspec.inspect.Type | None = msgspec.inspect.type_info(root)
    for step in steps:
        place = _below(_chosen(place, raw), step)
        raw = _item(raw, step)
    return _chosen(place, raw) if choose else place


def _below(place: msgspec.inspect.Type | None, step: str | int) -> msgspec.inspect.Type | None:
    for member in _members(place):
        if isinstance(member, msgspec.inspect.StructType):
            field = next((field for field in member.fields if field.encode_name == step), None)
            if field is not None:
                return field.type
        elif isinstance(member, msgspec.inspect.VarTupleType | msgspec.inspect.ListType) and isinstance(step, int):
            return member.item_type
    return None


def _chosen(place: msgspec.inspect.Type | None, raw: Any) -> msgspec.inspect.Type | None:  # noqa: ANN401
    tag = raw.get("kind") if isinstance(raw, dict) else None
    named = [member for member in _members(place) if isinstance(member, msgspec.inspect.StructType) and member.tag == tag]
    return named[0] if named and tag is not None else place


def _members(place: msgspec.inspect.Type | None) -> list[msgspec.inspect.Type]:
    if place is None:
        return []
    if isinstance(place, msgspec.inspect.Metadata):
        return _members(place.type)
    return list(place.types) if isinstance(place, msgspec.inspect.UnionType) else [place]


def _item(raw: Any, step: str | int) -> Any:  # noqa: ANN401
    if isinstance(raw, dict):
        return raw.get(step)
    return raw[step] if isinstance(raw, list | tuple) and isinstance(step, int) and step < len(raw) else None
