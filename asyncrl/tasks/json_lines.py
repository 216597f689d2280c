"""Reading a file of one JSON object a line, with complaints that name file and line. Called by the tasks that have such files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.tasks import JsonlTask, PreferencesTask, TaskConfig
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JsonLine:
    """One line that is not blank."""

    number: int
    """From 1."""
    where: str
    """File and line, for messages."""
    text: str
    fields: dict[str, Any]


def missing_files(config: TaskConfig) -> list[str]:
    """Return what is wrong with the files that a task names, before any is read; empty: nothing."""
    fields = ("path", "held_out_path") if isinstance(config, JsonlTask) else ("path",)
    named = {field: getattr(config, field) for field in fields if isinstance(config, JsonlTask | PreferencesTask)}
    return [f"task.{field}: there is no file {path}" for field, path in named.items() if path and not Path(path).is_file()]


def read_json_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the lines of a file, blank ones left out.

    Raises:
        ConfigError: The file cannot be read, or a line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read task file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"task file {path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield JsonLine(number, f"{path}:{number}", line.strip(), _fields(line, f"{path}:{number}"))


def text_of(line: JsonLine, name: str, knob: str) -> str:
    """Return a field as text; numbers are written out.

    Raises:
        ConfigError: The field is missing, or holds something else.
    """
    value = value_of(line, name, knob)
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{line.where}: field {name!r} ({knob}) must be text or a number, got {type(value).__name__}")


def value_of(line: JsonLine, name: str, knob: str) -> Any:  # noqa: ANN401 - any JSON
    """Return a field as it is.

    Raises:
        ConfigError: It is missing; the message lists those that are there.
    """
    if name not in line.fields:
        raise ConfigError(f"{line.where}: no field {name!r} ({knob}); this line has {', '.join(sorted(line.fields)) or 'none'}")
    return line.fields[name]


def _fields(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: a line must be a JSON object, got {type(fields).__name__}")
    return fields
