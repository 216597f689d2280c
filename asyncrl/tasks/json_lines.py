"""Tasks from files of one JSON object a line: prompts with answers (`jsonl`), and preferences (`preferences`).

Files are read at run time; their content is not stored or shipped. Invariants: no prompt is in two of {shots, held-out, train},
repeated lines included; every error names file and line.

Preferences: one JSON object a line with a prompt, the answer chosen and the one rejected. Prompts and answers are text, or lists
of chat messages `{"role", "content"}`: an answer's last message is the assistant's and is the answer; messages before it, if any,
are the prompt again, and the prompt field may then be missing.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.run import JsonlTask, PreferencesTask
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import ChatMessage, PreferenceAnswers, Prompt, derive_seed
from asyncrl.tasks.task import TaskData, alphabet_of

Messages = tuple[ChatMessage, ...]
FORM = "a task file has one JSON object a line, as `Dataset.to_json` of `datasets` writes it"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JsonLine:
    """One line that is not blank."""

    number: int
    """From 1."""
    where: str
    """File and line, for messages."""
    text: str
    fields: dict[str, Any]


def read_json_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the lines of a file, blank ones left out.

    Raises:
        ConfigError: The file cannot be read, or a line is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read task file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"task file {path} is not UTF-8: {error}; {FORM}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            # Use the parser of `prompt.columns`: json.loads accepts NaN, 1e400 and half of a surrogate pair.
            fields = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}; {FORM}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}:{number}: a line must be a JSON object, got {type(fields).__name__}")
        yield JsonLine(number, f"{path}:{number}", line.strip(), fields)


def text_of(line: JsonLine, name: str, knob: str) -> str:
    """Return a field as text; a number is converted to text.

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
        ConfigError: The field is missing; the message lists the fields of the line.
    """
    if name not in line.fields:
        raise ConfigError(f"{line.where}: no field {name!r} ({knob}); this line has {', '.join(sorted(line.fields)) or 'none'}")
    return line.fields[name]


def build_jsonl(config: JsonlTask, seed: int) -> TaskData:
    """Read `config.path` (and `held_out_path`) and split the distinct problems.

    Raises:
        ConfigError: A file cannot be read, a line is not as configured, or too few problems are left to train on.
    """
    pool = _read(Path(config.path), config)
    random.Random(derive_seed(seed, "jsonl", "split")).shuffle(pool)
    shots, pool = pool[: config.shots], pool[config.shots :]
    if config.held_out_path:
        shown = {problem.text for problem, _ in shots}
        held_out = [each for each in _read(Path(config.held_out_path), config) if each[0].text not in shown]
        random.Random(derive_seed(seed, "jsonl", "held_out")).shuffle(held_out)
        held_out_questions = {problem.text for problem, _ in held_out}
        train = [each for each in pool if each[0].text not in held_out_questions]
    else:
        held_out, train = pool[: config.held_out], pool[config.held_out :]
    if not train:
        instead = "take problems out of task.held_out_path" if config.held_out_path else "lower task.held_out"
        taken = f"{len(shots)} shots and {len(held_out)} held out; {instead} or lower task.shots"
        raise ConfigError(f"{config.path}: {len(pool) + len(shots)} distinct problems leave none to train on after {taken}")
    opening: Messages = (ChatMessage("system", config.system_prompt),) if config.system_prompt else ()
    for problem, solution in shots:
        opening += (ChatMessage("user", problem.text), ChatMessage("assistant", solution))
    # Without chat: a question and its solution run on, a blank line between problems.
    text = "".join(message.content + ("" if message.role == "user" else "\n\n") for message in opening)

    def prompt(problem: Prompt, split: str) -> Prompt:
        return msgspec.structs.replace(
            problem,
            prompt_id=f"{Path(config.path).stem}/{split}/{problem.prompt_id}",
            text="" if config.chat else text + problem.text,
            messages=(*opening, ChatMessage("user", problem.text)) if config.chat else (),
        )

    train_prompts, held_out_prompts = [prompt(p, "train") for p, _ in train], [prompt(p, "held_out") for p, _ in held_out]
    worked_examples = [] if config.chat else [(p.text, each[1]) for p, each in zip(train_prompts, train, strict=True)]
    solutions = "".join(solution for _, solution in worked_examples)
    return TaskData(
        train=train_prompts,
        held_out=held_out_prompts,
        alphabet="".join(sorted({*alphabet_of([*train_prompts, *held_out_prompts]), *solutions})),
        worked_examples=worked_examples,
    )


def _read(path: Path, config: JsonlTask) -> list[tuple[Prompt, str]]:
    """Return the distinct problems (id: line number; with the question as text) and their whole solutions."""
    try:
        pattern = re.compile(config.answer_regex)
    except re.error as error:
        raise ConfigError(f"task.answer_regex {config.answer_regex!r} is not a regular expression: {error}") from error
    if config.answer_regex and pattern.groups < 1:
        raise ConfigError(f"task.answer_regex {config.answer_regex!r} needs a group, ( ), around the part that is the answer")
    problems: dict[str, tuple[Prompt, str]] = {}
    doubtful = list[str]()
    for line in read_json_lines(path):
        question = text_of(line, config.prompt_field, "task.prompt_field")
        if not question.strip():
            raise ConfigError(f"{line.where}: field {config.prompt_field!r} (task.prompt_field) is empty")
        answer = solution = text_of(line, config.answer_field, "task.answer_field")
        if config.answer_regex:
            match = pattern.search(solution)
            if match is None or match.group(1) is None:
                raise ConfigError(f"{line.where}: task.answer_regex {pattern.pattern!r} finds nothing in {solution[-80:]!r}")
            answer = match.group(1).strip()
        problem = Prompt(str(line.number), question, answer=answer, reference_json=line.text)
        first, _ = problems.setdefault(question, (problem, solution))
        if first.answer != answer:
            doubtful.append(f"{first.prompt_id} and {line.number}")
    if doubtful:
        said = "%s: %d lines repeat a prompt with another answer and are left out (lines %s)"
        log.warning(said, path, len(doubtful), ", ".join(doubtful[:3]))
    if not problems:
        raise ConfigError(f"task file {path} holds no problems")
    return list(problems.values())


def build_preferences(config: PreferencesTask, seed: int) -> TaskData:
    """Read `config.path` and hold out `config.held_out` prompts with all their pairs.

    Raises:
        ConfigError: The file cannot be read, a line is not as configured, or nothing is left to train on.
    """
    pairs = [_pair(line, config) for line in read_json_lines(Path(config.path))]
    if not pairs:
        raise ConfigError(f"{config.path}: there are no preferences in it")
    distinct = list(dict.fromkeys((prompt.text, prompt.messages) for prompt, _ in pairs))
    if len(distinct) <= config.held_out:
        taken = f"{config.held_out} held out; lower task.held_out"
        raise ConfigError(f"{config.path}: {len(distinct)} distinct prompts leave none to train on after {taken}")
    random.Random(derive_seed(seed, "preferences", "split")).shuffle(distinct)
    held = set(distinct[: config.held_out])
    splits: dict[str, list[Prompt]] = {"train": [], "held_out": []}
    for prompt, _ in pairs:
        split = "held_out" if (prompt.text, prompt.messages) in held else "train"
        prompt_id = f"{Path(config.path).stem}/{split}/{prompt.prompt_id}"
        splits[split].append(msgspec.structs.replace(prompt, prompt_id=prompt_id))
    rejected = "".join(answers.rejected for _, answers in pairs)
    return TaskData(
        **splits,
        alphabet="".join(sorted({*alphabet_of(prompt for prompt, _ in pairs), *rejected})),
        worked_examples=[] if config.chat else [(prompt.text, prompt.answer) for prompt in splits["train"]],
    )


def _pair(line: JsonLine, config: PreferencesTask) -> tuple[Prompt, PreferenceAnswers]:
    """Return the prompt of a line (id: line number) and its answers."""
    text = ""
    messages: Messages = ()
    before_chosen, chosen = _answer(line, config.chosen_field, "task.chosen_field", chat=config.chat)
    before_rejected, rejected = _answer(line, config.rejected_field, "task.rejected_field", chat=config.chat)
    if not config.chat:
        opening = f"{config.system_prompt}\n\n" if config.system_prompt else ""
        text = opening + text_of(line, config.prompt_field, "task.prompt_field")
    elif config.prompt_field in line.fields or not before_chosen:
        messages = _messages(line, config.prompt_field, "task.prompt_field")
    else:
        messages = before_chosen
    for before, field in ((before_chosen, config.chosen_field), (before_rejected, config.rejected_field)):
        if before and before != messages:
            raise ConfigError(f"{line.where}: the messages of field {field!r} before its answer are not those of the prompt")
    if config.system_prompt and messages and messages[0].role != "system":
        messages = (ChatMessage("system", config.system_prompt), *messages)
    if chosen == rejected:
        raise ConfigError(f"{line.where}: the chosen and the rejected answer are the same")
    if not text and not messages:
        raise ConfigError(f"{line.where}: the prompt is empty")
    answers = PreferenceAnswers(chosen, rejected)
    return Prompt(str(line.number), text, messages, answer=chosen, reference_json=msgspec.json.encode(answers).decode()), answers


def _answer(line: JsonLine, name: str, knob: str, *, chat: bool) -> tuple[Messages, str]:
    """Return the messages before an answer, and the answer."""
    if not chat or not isinstance(value_of(line, name, knob), list):
        return (), text_of(line, name, knob)
    messages = _messages(line, name, knob)
    if not messages or messages[-1].role != "assistant":
        raise ConfigError(f"{line.where}: the last message of field {name!r} ({knob}) must be the assistant's")
    return messages[:-1], messages[-1].content


def _messages(line: JsonLine, name: str, knob: str) -> Messages:
    """Return a field as chat messages; text becomes one user message."""
    value = value_of(line, name, knob)
    if not isinstance(value, list):
        return (ChatMessage("user", text_of(line, name, knob)),)
    try:
        return msgspec.convert(value, Messages)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{line.where}: field {name!r} ({knob}) is not a list of chat messages: {error}") from error
