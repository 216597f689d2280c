"""Any file of prompts and answers, one JSON object a line, as a task. Read at run time; nothing of it is kept or shipped.

Invariants: no prompt text is in two of {shots, held-out, train}, repeated lines included; every complaint names file and line.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.tasks import JsonlTask
from asyncrl.errors import ConfigError
from asyncrl.schema.ids import derive_seed
from asyncrl.schema.samples import ChatMessage, Prompt
from asyncrl.tasks.json_lines import JsonLine, read_json_lines, text_of
from asyncrl.tasks.task import TaskData, alphabet_of


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
    train_prompts = [_prompt(config, opening, record, "train") for record in train]
    held_out_prompts = [_prompt(config, opening, record, "held_out") for record in held_out]
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
    """Return the turns before the problem; without chat, the shots are one user turn's worth of text (see `_prompt`)."""
    system = (ChatMessage("system", config.system_prompt),) if config.system_prompt else ()
    turns = [turn for shot in shots for turn in (ChatMessage("user", shot.question), ChatMessage("assistant", shot.solution))]
    return (*system, *turns)


def _prompt(config: JsonlTask, opening: tuple[ChatMessage, ...], record: _Record, split: str) -> Prompt:
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
