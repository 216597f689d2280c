"""Makes a checked `RunConfig` from a TOML file and `--set a.b=c`. The only place that reads config from outside.

Every error is a `ConfigError` that names the field, the given value and what is allowed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncrl.config.algorithm import CHOSEN_BY_HAND
from asyncrl.config.check import MOST_FAULTS, RULES, Fault, faults_in
from asyncrl.config.places import at_node
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError

NODE_ADDRESS = "ASYNCRL_NODE_ADDRESS"
"""Environment variable in which a launcher gives the address where other machines reach this one."""
SHIPPED = Path(__file__).parent.parent / "shipped"
"""Folder of the configs that come with the package; in a checkout a link to configs/."""
# Looks removable, and is not: msgspec (0.22) looks into a type at its first use, and crashes where two threads do that at once.
msgspec.json.Decoder(RunConfig)


Overrides = Mapping[str, Any] | Sequence[str]
ConfigLike = RunConfig | Mapping[str, Any] | str | Path
"""A config, nested dicts, the path of a TOML file, or the name of a shipped config."""


ALARMS = "observe.alarms."
"""Prefix of an alarm's name in a field that sets the alarm's action."""


def load_config(path: str | Path, overrides: Overrides = (), presets: Sequence[Path] = ()) -> RunConfig:
    """Read a TOML file, apply `presets` and then `overrides`, and check the result.

    Args:
        path: The TOML file, or the name of a shipped config (`quickstart`).
        presets: TOML files applied one after the other: tables are merged, but a table with a
            `kind`, and every other value, is replaced (configs/algorithms/).
        overrides: `a.b=value` each, with a TOML value (or else taken as a string); or a mapping of `a.b` to values. `none` or
            `null` unsets what may be left out. Another `kind` replaces the whole table if there are several kinds of table for
            that place.

    Returns:
        The checked config.

    Raises:
        ConfigError: The file is missing or not TOML, a field is unknown, a value is out of range or contradicts another.
    """
    raw = read_toml(path)
    for preset in presets:
        raw = lay_over(raw, read_toml(preset))
    return resolve_config(raw, overrides, source=" + ".join(map(str, (path, *presets))))


def resolve_config(config: ConfigLike, overrides: Overrides = (), source: str = "config") -> RunConfig:
    """Return a checked config, whatever form it came in.

    Args:
        config: A config, nested dicts, or a TOML file.
        overrides: Values that replace the config's: `a.b=value` each, or a mapping of `a.b` to values.
        source: The config's name in messages.

    Raises:
        ConfigError: As in `load_config`, with all faults, one per line; a wrong override is named as it was given.
    """
    if isinstance(config, (str, Path)):
        return load_config(config, overrides)
    if not isinstance(config, (RunConfig, Mapping)):
        raise ConfigError(f"{source} must be a RunConfig, nested dicts, or the path of a TOML file, got {config!r}")
    raw = dict(msgspec.to_builtins(config))  # a copy of all of it
    pairs = pairs_of(overrides)
    empty_other_kinds(raw, ((key, value) for key, value, _ in pairs))
    for key, value, given in pairs:
        set_value(raw, key, value, given)
    checked, wrong, gone = take_values(raw)
    said = []
    for fault in wrong:
        below = f"{fault.field}."
        named = [(".".join(names_of(key)), text) for key, _, text in pairs]
        at_fault = [text for key, text in named if below.startswith(f"{key}.") or key.startswith(below)]
        said.append(f"{at_fault[-1] if at_fault else source}: {fault.allowed}")
    if checked is not None:
        said += [fault.allowed for fault in faults_beside(checked, gone)]
    if checked is None or said:
        raise ConfigError("\n".join(said))
    return checked


def take_values(raw: dict[str, Any]) -> tuple[RunConfig | None, list[Fault], set[str]]:
    """Return the config from tables without their invalid values, which are removed so that the rest can be checked.

    Returns:
        The config, or None if too much is wrong to make one; the faults of single values; the removed fields.
    """
    algorithm, wrong, gone = raw.get("algorithm"), list[Fault](), set[str]()
    if isinstance(algorithm, dict) and "kind" not in algorithm and CHOSEN_BY_HAND.keys() & algorithm.keys():
        raw["algorithm"] = {"kind": "policy", **algorithm}
    while len(wrong) < MOST_FAULTS:
        try:
            return msgspec.convert(raw, RunConfig), wrong, gone
        except msgspec.ValidationError as error:
            place, given, said = _fault_of(error, raw)
            given_at = _place_before(place, gone)
            field, missing = ".".join(map(str, given_at)), _MISSING_FIELD.search(said)
            if missing is None or f"{field}.{missing['field']}" not in gone:
                wrong.append(Fault(field, given, said.replace(_shown(place), _shown(given_at))))
            try:
                *parents, last = place
                del value_in(raw, parents)[last]
            except (KeyError, IndexError, TypeError, ValueError):  # there is nothing that could be removed
                break
            gone.add(field)
        except UnicodeEncodeError as error:
            wrong.append(_no_text(error))
            break
    return None, wrong, gone


def faults_beside(config: RunConfig, gone: Collection[str]) -> list[Fault]:
    """Return the other faults of a config from which these fields were removed."""
    broken = itertools.islice((said for rules in RULES for said in rules(config)), MOST_FAULTS)
    faults = faults_in(config, broken, gone)
    try:
        msgspec.json.encode(config)
    except UnicodeEncodeError as error:
        faults = [*(fault for fault in faults if fault.given != error.object), _no_text(error)]
    for field, value in leaves_of(msgspec.to_builtins(config)):
        if isinstance(value, str) and "\0" in f"{field}{value}":
            faults.append(Fault(field, value, f"{field} has a null character: {value!r}"))
    return faults


def value_in(tables: Any, place: Iterable[str | int]) -> Any:  # noqa: ANN401 - plain nested values
    """Return the value at a place in nested tables and lists."""
    return functools.reduce(operator.getitem, place, tables)


def leaves_of(table: Any, place: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - plain nested values
    """Yield every value that is neither table nor list, with its place, such as `a.b.0`."""
    if not isinstance(table, dict | list | tuple):
        yield place, table
        return
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        yield from leaves_of(value, f"{place}.{key}" if place else str(key))


def _no_text(error: UnicodeEncodeError) -> Fault:
    return Fault("config", ascii(error.object), f"the config, or an override, is not UTF-8 text: {error.object!r}")


def _place_before(place: Sequence[str | int], gone: Collection[str]) -> list[str | int]:
    """Return a place as it was given: in a list, items after removed ones have smaller numbers now."""
    given: list[str | int] = []
    for step in place:
        if isinstance(step, str):
            given.append(step)
        else:
            left = (number for number in itertools.count() if ".".join(map(str, (*given, number))) not in gone)
            given.append(next(itertools.islice(left, step, step + 1)))
    return given


def _shown(place: Sequence[str | int]) -> str:
    """Return a place in msgspec's form, up to the last number, because msgspec does not give the place of an unknown field."""
    numbers = [number for number, step in enumerate(place, 1) if isinstance(step, int)]
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place[: max(numbers, default=0)])


def pairs_of(overrides: Overrides) -> list[tuple[str, Any, str]]:
    """Return for each override its field, its value and the option as given.

    Raises:
        ConfigError: An override is not of the form a.b=value.
    """
    if isinstance(overrides, Mapping):
        return [(key, value, f"{key} = {value!r}") for key, value in overrides.items()]
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a list or a dict, [{overrides!r}]; got a text")
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(names_of(key.strip())):
            raise ConfigError(f"--set takes a.b=value, got {text!r}")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            parsed = value
        pairs.append((key.strip(), parsed, f"--set {text}"))
    return pairs


def names_of(field: str) -> list[str]:
    """Return the names that lead to a field. As in TOML, a name in quotes may contain dots; an alarm's name needs no quotes."""
    if '"' in field or "'" in field:
        with contextlib.suppress(ValueError):  # not TOML: the quotes are part of a name
            names, below = [], tomllib.loads(f"{field} = 0")
            while isinstance(below, dict):
                ((name, below),) = below.items()
                names.append(name)
            return names
    return ["observe", "alarms", field.removeprefix(ALARMS)] if field.startswith(ALARMS) else field.split(".")


def empty_other_kinds(raw: dict[str, Any], overrides: Iterable[tuple[str, Any]]) -> None:
    """Empty the tables that overrides give another `kind`; call it before any is set, so that their order does not matter."""
    for key, value in overrides:
        *place, last = names_of(key)
        with contextlib.suppress(KeyError, TypeError):  # there is no such table yet
            has_kinds = any(getattr(kind, "tag", None) is not None for kind in _kinds_at(place))  # structs, told apart by it
            if last == "kind" and value_in(raw, place)["kind"] != value and has_kinds:
                value_in(raw, place).clear()


def set_value(raw: dict[str, Any], key: str, value: Any, given: str) -> None:  # noqa: ANN401 - a TOML value
    """Set `a.b` in nested tables; `none` or `null` unsets what may be left out.

    Raises:
        ConfigError: `a` is not a table; `given` names the option.
    """
    *parents, last = names_of(key)
    if value in ("none", "null") and any(isinstance(kind, msgspec.inspect.NoneType) for kind in _kinds_at([*parents, last])):
        value = None
    for name in parents:
        if raw.get(name) is None:
            raw[name] = {}
        raw = raw[name]
        if not isinstance(raw, dict):
            raise ConfigError(f"{given}: {name} is not a table")
    raw[last] = value


def _fault_of(error: msgspec.ValidationError, raw: Any) -> tuple[list[str | int], Any, str]:  # noqa: ANN401 - plain values
    """Return the place of an invalid value, the value, and what is wrong with it."""
    said = str(error)
    path, unknown = _PATH.search(said), _UNKNOWN_FIELD.search(said)
    place = [int(index) if index else name for index, name in _STEP.findall(path["path"])] if path else []
    if known := _known(place, raw, is_field=unknown is not None):
        said += f"; known are {', '.join(known)}"
    if unknown is not None:
        place.append(unknown["field"])
    try:
        return place, value_in(raw, place), said
    except (KeyError, IndexError, TypeError):
        return place, None, said


def load_run_config(run_folder: Path) -> RunConfig:
    """Return a run's config for one of its processes: hosts given as `node` become this machine's address, from its launcher.

    Raises:
        ConfigError: As in `load_config`.
    """
    return at_node(load_config(run_folder / "config.toml"), os.environ.get(NODE_ADDRESS, "127.0.0.1"))


def parse_config(raw: dict[str, Any]) -> RunConfig:
    """Check a config given as plain nested dicts.

    Raises:
        ConfigError: As in `load_config`.
    """
    return resolve_config(raw)


def dump_config(config: RunConfig) -> str:
    """Return the config as TOML that `load_config` reads back to the same value.

    TOML has no None, so every field that may be None has it as its default (a test checks this); elsewhere `inf` means no limit.
    """
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def find_config(given: str | Path) -> Path:
    """Return the config file at this path, or the shipped config of this name (`quickstart`, `algorithms/gspo`)."""
    path = Path(given)
    if path.exists() or path.is_absolute():
        return path
    named = SHIPPED / path.with_name(path.name.removesuffix(".toml") + ".toml").as_posix().removeprefix("configs/")
    return named if named.is_file() else path


def read_config_text(path: Path) -> str:
    """Return a config's text; in a shipped config, paths of shipped data become absolute.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except OSError as error:
        shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.toml")))
        raise ConfigError(f"cannot read config {path}: {error.strerror}; shipped, by name, are {shipped}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return text.replace('"configs/', f'"{SHIPPED}/') if path.is_relative_to(SHIPPED) else text


def read_toml(given: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file, or of the shipped config of that name.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    path = find_config(given)
    text = read_config_text(path)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a plain ValueError
        raise ConfigError(f"{path} is not TOML: {error}") from error
    if not tables:  # of a run that is resumed: it would go on as another one
        raise ConfigError(f"{path} says nothing: it is empty, or was cut short")
    return tables


def lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` overridden by `above`: tables are merged, but a table with a `kind` replaces the table below."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, dict) and "kind" not in value:
            merged[key] = lay_over(under, value)
        else:
            merged[key] = value
    return merged


def _without_none(value: Any) -> Any:  # noqa: ANN401 - plain nested TOML values
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\[(\d+)\]|\.([A-Za-z_]\w*)")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `(?P<field>[^`]*)`")


def _members(kind: msgspec.inspect.Type) -> Sequence[msgspec.inspect.Type]:
    """Return the alternatives of a field's type, or the type itself."""
    kind = kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _kinds_at(place: Sequence[str]) -> Sequence[msgspec.inspect.Type]:
    """Return what may be at this place: all alternatives of its type."""
    members = _members(msgspec.inspect.type_info(RunConfig))
    for name in place:
        structs = (member for member in members if isinstance(member, msgspec.inspect.StructType))
        fields = (field.type for struct in structs for field in struct.fields if field.encode_name == name)
        members = [member for kind in fields for member in _members(kind)]
    return members


def _known(steps: Sequence[str | int], raw: Any, *, is_field: bool) -> list[str]:  # noqa: ANN401 - plain nested TOML values
    """Return the allowed fields, kinds or values if the error is about a name; else nothing."""
    place: msgspec.inspect.Type = msgspec.inspect.type_info(RunConfig)
    for step in (*steps, None):
        members = _members(place)
        structs = {member.tag: member for member in members if isinstance(member, msgspec.inspect.StructType)}
        named = structs.get(raw.get("kind") if isinstance(raw, dict) and None not in structs else None)
        fields = {item.encode_name: item.type for item in named.fields} if named else {}
        if step is None:
            literals = (member for member in members if isinstance(member, msgspec.inspect.LiteralType))
            return sorted(fields) if is_field else [str(value) for literal in literals for value in literal.values]
        if step == "kind" and None not in structs:
            return [str(tag) for tag in structs]
        lists = [member.item_type for member in members if isinstance(member, msgspec.inspect.VarTupleType)]
        below = [fields[step]] if step in fields else lists if isinstance(step, int) else []
        if not below:
            return []
        place, raw = below[0], raw[step]
    return []
