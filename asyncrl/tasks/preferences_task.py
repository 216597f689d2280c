"""A file of preferences as a task: one JSON object a line with a prompt, the answer chosen and the answer rejected.

Prompts and answers are text, or lists of chat messages `{"role", "content"}` as preference data sets have them: an answer's last
message is the assistant's and is the answer; messages before it, if any, are the prompt again, and the prompt field may then be
missing. Invariants: no prompt is in two splits, however many pairs it has; every complaint names file and line.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.config.tasks import PreferencesTask
from asyncrl.errors import ConfigError
from asyncrl.schema.ids import derive_seed
from asyncrl.schema.samples import ChatMessage, PreferenceAnswers, Prompt
from asyncrl.tasks.json_lines import JsonLine, read_json_lines, text_of, value_of
from asyncrl.tasks.task import TaskData, alphabet_of

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
    train_prompts = [_prompt(config, pair, "train") for pair in train]
    held_out_prompts = [_prompt(config, pair, "held_out") for pair in pairs if (pair.text, pair.messages) in held]
    rejected = "".join(pair.answers.rejected for pair in pairs)
    return TaskData(
        train=train_prompts,
        held_out=held_out_prompts,
        alphabet="".join(sorted({*alphabet_of([*train_prompts, *held_out_prompts]), *rejected})),
        worked_examples=[] if config.chat else [(pair.text, pair.answers.chosen) for pair in train],
    )


def _prompt(config: PreferencesTask, pair: _Pair, split: str) -> Prompt:
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
