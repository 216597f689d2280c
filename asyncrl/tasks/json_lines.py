"""Tasks from files of one JSON object a line: prompts with answers (`jsonl`), and preferences (`preferences`).

Files are read at run time; nothing of them is kept or shipped. Invariants: no prompt is in two of {shots, held-out, train},
repeated lines included; every complaint names file and line.

Preferences: one JSON object a line with a prompt, the answer chosen and the one rejected. Prompts and answers are text, or lists
of chat messages `{"role", "content"}`: an answer's last message is the assistant's and is the answer; messages before it, if any,
are the prompt again, and the prompt field may then be missing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.tasks import JsonlTask, PreferencesTask, TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import ChatMessage, PreferenceAnswers, Prompt, derive_seed
from asyncrl.tasks.task import TaskData, alphabet_of


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


@dataclass(frozen=True, slots=True)
class _Record:
    """One usable line."""

    line_number: int
    question: str
    solution: str
    """The answer field, whole."""
    answer: str
    """What the reward compares with."""
    source_json: str


def build_jsonl(config: JsonlTask, seed: int) -> TaskData:
    """Read `config.path` (and `held_out_path`) and split the distinct problems.

    Raises:
        ConfigError: A file cannot be read, a line is not as configured, or too few problems are left to train on.
    """
    pattern = _compiled(config.answer_regex)
    pool = _read(Path(config.path), config, pattern)
    random.Random(derive_seed(seed, "jsonl", "split")).shuffle(pool)
    shots, pool = pool[: config.shots], pool[config.shots :]
    if config.held_out_path:
        shown = {record.question for record in shots}
        held_out = [r for r in _read(Path(config.held_out_path), config, pattern) if r.question not in shown]
        held_out_questions = {record.question for record in held_out}
        train = [record for record in pool if record.question not in held_out_questions]
    else:
        held_out, train = pool[: config.held_out], pool[config.held_out :]
    if not train:
        raise ConfigError(
            f"{config.path}: {len(pool) + len(shots)} distinct problems leave none to train on after {len(shots)} shots and "
            f"{len(held_out)} held out; lower task.held_out or task.shots"
        )
    opening = _opening(config, shots)
    train_prompts = [_jsonl_prompt(config, opening, record, "train") for record in train]
    held_out_prompts = [_jsonl_prompt(config, opening, record, "held_out") for record in held_out]
    return TaskData(
        train=train_prompts,
        held_out=held_out_prompts,
        alphabet=alphabet_of([*train_prompts, *held_out_prompts]),
        worked_examples=[] if config.chat else [(p.text, r.solution) for p, r in zip(train_prompts, train, strict=True)],
    )


def _compiled(answer_regex: str) -> re.Pattern[str] | None:
    if not answer_regex:
        return None
    try:
        pattern = re.compile(answer_regex)
    except re.error as error:
        raise ConfigError(f"task.answer_regex {answer_regex!r} is not a regular expression: {error}") from error
    if pattern.groups < 1:
        raise ConfigError(f"task.answer_regex {answer_regex!r} needs a group, ( ), around the part that is the answer")
    return pattern


def _read(path: Path, config: JsonlTask, pattern: re.Pattern[str] | None) -> list[_Record]:
    """Return the file's records, first of each prompt; blank lines are skipped."""
    records: dict[str, _Record] = {}
    for line in read_json_lines(path):
        record = _record(line, config, pattern)
        records.setdefault(record.question, record)
    if not records:
        raise ConfigError(f"task file {path} holds no problems")
    return list(records.values())


def _record(line: JsonLine, config: JsonlTask, pattern: re.Pattern[str] | None) -> _Record:
    question = text_of(line, config.prompt_field, "task.prompt_field")
    solution = text_of(line, config.answer_field, "task.answer_field")
    answer = solution
    if pattern is not None:
        match = pattern.search(solution)
        if match is None or match.group(1) is None:
            raise ConfigError(f"{line.where}: task.answer_regex {pattern.pattern!r} finds nothing in {solution[-80:]!r}")
        answer = match.group(1).strip()
    return _Record(line.number, question, solution, answer, line.text)


def _opening(config: JsonlTask, shots: list[_Record]) -> tuple[ChatMessage, ...]:
    """Return the turns before the problem; without chat, the shots are one user turn's worth of text (see `_jsonl_prompt`)."""
    system = (ChatMessage("system", config.system_prompt),) if config.system_prompt else ()
    turns = [turn for shot in shots for turn in (ChatMessage("user", shot.question), ChatMessage("assistant", shot.solution))]
    return (*system, *turns)


def _jsonl_prompt(config: JsonlTask, opening: tuple[ChatMessage, ...], record: _Record, split: str) -> Prompt:
    prompt_id = f"{Path(config.path).stem}/{split}/{record.line_number}"
    if config.chat:
        return Prompt(
            prompt_id=prompt_id,
            messages=(*opening, ChatMessage("user", record.question)),
            answer=record.answer,
            reference_json=record.source_json,
        )
    text = _plain_opening(opening) + record.question
    return Prompt(prompt_id=prompt_id, text=text, answer=record.answer, reference_json=record.source_json)


def _plain_opening(opening: tuple[ChatMessage, ...]) -> str:
    """Lay system text and shots out as text: a question and its solution run on, a blank line between problems."""
    parts = [message.content + ("" if message.role == "user" else "\n\n") for message in opening]
    return "".join(parts)


Messages = tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    """One line."""

    line_number: int
    text: str
    messages: Messages
    answers: PreferenceAnswers


def build_preferences(config: PreferencesTask, seed: int) -> TaskData:
    """Read `config.path` and hold out `config.held_out` prompts with all their pairs.

    Raises:
        ConfigError: The file cannot be read, a line is not as configured, or nothing is left to train on.
    """
    pairs = [_pair(line, config) for line in read_json_lines(Path(config.path))]
    if not pairs:
        raise ConfigError(f"{config.path}: there are no preferences in it")
    prompts = list(dict.fromkeys((pair.text, pair.messages) for pair in pairs))
    if len(prompts) <= config.held_out:
        raise ConfigError(
            f"{config.path}: {len(prompts)} distinct prompts leave none to train on after {config.held_out} held out; lower "
            "task.held_out"
        )
    random.Random(derive_seed(seed, "preferences", "split")).shuffle(prompts)
    held = set(prompts[: config.held_out])
    train = [pair for pair in pairs if (pair.text, pair.messages) not in held]
    train_prompts = [_preference_prompt(config, pair, "train") for pair in train]
    held_out_prompts = [_preference_prompt(config, pair, "held_out") for pair in pairs if (pair.text, pair.messages) in held]
    rejected = "".join(pair.answers.rejected for pair in pairs)
    return TaskData(
        train=train_prompts,
        held_out=held_out_prompts,
        alphabet="".join(sorted({*alphabet_of([*train_prompts, *held_out_prompts]), *rejected})),
        worked_examples=[] if config.chat else [(pair.text, pair.answers.chosen) for pair in train],
    )


def _preference_prompt(config: PreferencesTask, pair: _Pair, split: str) -> Prompt:
    return Prompt(
        prompt_id=f"{Path(config.path).stem}/{split}/{pair.line_number}",
        text=pair.text,
        messages=pair.messages,
        answer=pair.answers.chosen,
        reference_json=msgspec.json.encode(pair.answers).decode(),
    )


def _pair(line: JsonLine, config: PreferencesTask) -> _Pair:
    text = ""
    messages: Messages = ()
    if config.chat:
        messages, answers = _chat_pair(line, config)
    else:
        opening = f"{config.system_prompt}\n\n" if config.system_prompt else ""
        text = opening + text_of(line, config.prompt_field, "task.prompt_field")
        chosen = text_of(line, config.chosen_field, "task.chosen_field")
        answers = PreferenceAnswers(chosen, text_of(line, config.rejected_field, "task.rejected_field"))
    if answers.chosen == answers.rejected:
        raise ConfigError(f"{line.where}: the chosen and the rejected answer are the same")
    if not text and not messages:
        raise ConfigError(f"{line.where}: the prompt is empty")
    return _Pair(line.number, text, messages, answers)


def _chat_pair(line: JsonLine, config: PreferencesTask) -> tuple[Messages, PreferenceAnswers]:
    before_chosen, chosen = _answer(line, config.chosen_field, "task.chosen_field")
    before_rejected, rejected = _answer(line, config.rejected_field, "task.rejected_field")
    if config.prompt_field in line.fields or not before_chosen:
        messages = _messages(line, config.prompt_field, "task.prompt_field")
    else:
        messages = before_chosen
    for before, field in ((before_chosen, config.chosen_field), (before_rejected, config.rejected_field)):
        if before and before != messages:
            raise ConfigError(f"{line.where}: the messages of field {field!r} before its answer are not those of the prompt")
    if config.system_prompt and messages and messages[0].role != "system":
        messages = (ChatMessage("system", config.system_prompt), *messages)
    return messages, PreferenceAnswers(chosen, rejected)


def _answer(line: JsonLine, name: str, knob: str) -> tuple[Messages, str]:
    """Return what is before an answer, and the answer."""
    if not isinstance(value_of(line, name, knob), list):
        return (), text_of(line, name, knob)
    messages = _messages(line, name, knob)
    if not messages or messages[-1].role != "assistant":
        raise ConfigError(f"{line.where}: the last message of field {name!r} ({knob}) must be the assistant's")
    return messages[:-1], messages[-1].content


def _messages(line: JsonLine, name: str, knob: str) -> Messages:
    """Return a field as chat messages; text is one turn of the user."""
    value = value_of(line, name, knob)
    if not isinstance(value, list):
        return (ChatMessage("user", text_of(line, name, knob)),)
    try:
        return msgspec.convert(value, Messages)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{line.where}: field {name!r} ({knob}) is not a list of chat messages: {error}") from error
