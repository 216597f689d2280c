"""A reasoning-gym family as a task: generated offline, duplicates removed, worked examples shown as earlier chat turns.

Invariants: no question is in two of {shots, held-out, train}; the same config and seed give the same three.
The only file of this stage that imports reasoning_gym (the `tasks` extra); the reward has its own.
"""

from __future__ import annotations

import json
import random
from typing import Any

from asyncrl.config.tasks import ReasoningGymTask
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import ChatMessage, Prompt, derive_seed
from asyncrl.tasks.task import TaskData, alphabet_of

INSTALL_HINT = "reasoning-gym is not installed; pip install 'asyncrl[tasks]'"


def build_reasoning_gym(config: ReasoningGymTask, seed: int) -> TaskData:
    """Generate `config.size` problems of a family and split the distinct ones: shots, held-out, train.

    Raises:
        ConfigError: reasoning-gym is missing, the family or an option is unknown, too few problems are distinct, or the
            family's scorer does not accept its own reference answers (then no completion could ever be right).
    """
    entries = _distinct_entries(config, seed)
    needed = config.shots + config.held_out + 1
    if len(entries) < needed:
        gave = f"{len(entries)} distinct problems of {config.size}, and shots, held_out and 1 to train need {needed}"
        instead = "raise task.size, widen task.family_options, or lower task.held_out"
        raise ConfigError(f"task.family {config.family!r} gave {gave}: {instead}")
    random.Random(derive_seed(seed, "reasoning_gym", "split")).shuffle(entries)
    opening: tuple[ChatMessage, ...] = (ChatMessage("system", config.system_prompt),) if config.system_prompt else ()
    for shot in entries[: config.shots]:  # the form that the strict reward reads
        opening += (ChatMessage("user", shot["question"]), ChatMessage("assistant", f"<answer>{shot['answer']}</answer>"))
    rest = entries[config.shots :]
    held_out = [_prompt(config, opening, entry, "held_out") for entry in rest[: config.held_out]]
    train = [_prompt(config, opening, entry, "train") for entry in rest[config.held_out :]]
    return TaskData(train=train, held_out=held_out, alphabet=alphabet_of([*train, *held_out]))


def _distinct_entries(config: ReasoningGymTask, seed: int) -> list[dict[str, Any]]:
    """Generate the family's entries, first of each question, and make sure that they can be answered right."""
    try:
        import reasoning_gym  # noqa: PLC0415 - an extra, and it is slow to import
        from reasoning_gym.factory import DATASETS  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(INSTALL_HINT) from error
    if config.family not in DATASETS:
        raise ConfigError(f"task.family {config.family!r} is not one of reasoning-gym's: {', '.join(sorted(DATASETS))}")
    options = dict(config.family_options)
    dataset_seed = derive_seed(seed, "reasoning_gym", config.family) % 2**31
    try:
        dataset = reasoning_gym.create_dataset(config.family, seed=dataset_seed, size=config.size, **options)
        entries = list({entry["question"]: entry for entry in reversed(list(dataset))}.values())
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning-gym refused task.family_options {options} of {config.family!r}: {error}") from error
    first = entries[0]
    if first["answer"] is None or dataset.score_answer(str(first["answer"]), json.loads(_entry_json(first))) < 1:
        why = "no single reference answer that its own scorer takes as right, so nothing is scored strictly: choose another"
        raise ConfigError(f"task.family {config.family!r} has {why}")
    return entries


def _prompt(config: ReasoningGymTask, opening: tuple[ChatMessage, ...], entry: dict[str, Any], split: str) -> Prompt:
    reference = {"family": config.family, "family_options": config.family_options, "entry": entry}
    return Prompt(
        prompt_id=f"{config.family}/{split}/{entry['metadata']['source_index']}",
        messages=(*opening, ChatMessage("user", entry["question"])),
        answer=str(entry["answer"]),
        reference_json=_entry_json(reference),
    )


def _entry_json(value: dict[str, Any]) -> str:
    """Return JSON; what JSON cannot hold (a date, a fraction) is kept as its text."""
    return json.dumps(value, default=str, ensure_ascii=False)
