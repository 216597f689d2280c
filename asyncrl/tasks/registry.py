"""The table of task builders by config kind, and the short builders. A new task is a function, a config struct and a row here.

The only file of this stage that imports reasoning_gym (the `tasks` extra); the reward has its own.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from asyncrl.config.run import AdditionTask, JsonlTask, PreferencesTask, PythonTask, ReasoningGymTask, TaskConfig
from asyncrl.errors import ConfigError, kind_of
from asyncrl.schema.samples import ChatMessage, Prompt, derive_seed
from asyncrl.tasks.json_lines import build_jsonl, build_preferences
from asyncrl.tasks.task import ComputedSequence, TaskData, alphabet_of
from asyncrl.user_code import TASK_ARGUMENTS, load_function


def build_addition(config: AdditionTask, seed: int) -> TaskData:
    """Split all pairs of numbers of `config.digits` digits by `seed`: `12+34=` -> `46`. (b, a) is another pair than (a, b).

    Raises:
        ConfigError: Holding out that many pairs leaves none to train on.
    """
    lowest = 0 if config.digits == 1 else 10 ** (config.digits - 1)
    num_operands = 10**config.digits - lowest
    num_pairs = num_operands**2
    if config.held_out >= num_pairs:
        raise ConfigError(
            f"task.held_out must be under {num_pairs}, the number of pairs with {config.digits} digit(s), got {config.held_out}"
        )
    drawn = random.Random(derive_seed(seed, "addition", config.digits)).sample(range(num_pairs), config.held_out)
    # The i-th code that is not held out is i plus the number of held-out codes below it.
    offsets = [code - rank for rank, code in enumerate(sorted(drawn))]

    def prompt(code: int, split: str) -> Prompt:
        first, second = (lowest + part for part in divmod(code, num_operands))
        return Prompt(prompt_id=f"addition/{split}/{first}+{second}", text=f"{first}+{second}=", answer=str(first + second))

    def train(index: int) -> Prompt:
        return prompt(index + bisect_right(offsets, index), "train")

    num_train = num_pairs - config.held_out
    return TaskData(
        train=ComputedSequence(num_train, train),
        held_out=[prompt(code, "held_out") for code in drawn],
        alphabet="+0123456789=",
        worked_examples=ComputedSequence(num_train, lambda index: (train(index).text, train(index).answer)),
    )


def build_reasoning_gym(config: ReasoningGymTask, seed: int) -> TaskData:
    """Generate `config.size` problems of a reasoning-gym family, and split the distinct ones: shots, held-out, train.

    Shots are shown as earlier chat turns. No question is in two of the three; the same config and seed give the same three.

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
    """Generate the family's entries, the first of each question, and check that its scorer accepts a reference answer."""
    try:
        import reasoning_gym  # noqa: PLC0415 - an extra, and it is slow to import
        from reasoning_gym.factory import DATASETS  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("reasoning-gym is not installed; pip install 'asyncrl[tasks]'") from error
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
    if first["answer"] is None or dataset.score_answer(str(first["answer"]), json.loads(json.dumps(first, default=str))) < 1:
        why = "no single reference answer that its own scorer accepts, so no completion can be right: choose another"
        raise ConfigError(f"task.family {config.family!r} has {why}")
    return entries


def _prompt(config: ReasoningGymTask, opening: tuple[ChatMessage, ...], entry: dict[str, Any], split: str) -> Prompt:
    # Values that JSON cannot hold (a date, a fraction) are stored as text.
    reference = {"family": config.family, "family_options": config.family_options, "entry": entry}
    return Prompt(
        prompt_id=f"{config.family}/{split}/{entry['metadata']['source_index']}",
        messages=(*opening, ChatMessage("user", entry["question"])),
        answer=str(entry["answer"]),
        reference_json=json.dumps(reference, default=str, ensure_ascii=False),
    )


def build_python(config: PythonTask, seed: int) -> TaskData:
    """Call the user's function with the run's seed.

    The prompts of a list or tuple are checked now, and the task's alphabet gets their characters. The prompts of another sequence
    are checked when they are read.

    Raises:
        ConfigError: The path names no function, the function raised or returned no usable TaskData, a field of a prompt has a
            wrong type, or a prompt is in both lists.
    """
    function = load_function(config.path, "task.path", TASK_ARGUMENTS)
    where = f"task.path {config.path!r}"
    try:
        task = function(seed)
    except (Exception, SystemExit) as error:  # the boundary: whatever a user's function raises
        raise ConfigError(f"{where} raised {kind_of(error)}: {error}") from error
    if not isinstance(task, TaskData):
        raise ConfigError(f"{where} must return asyncrl.tasks.task.TaskData, got {type(task).__name__}")
    for name, prompts in (("train", task.train), ("held_out", task.held_out)):
        if not (hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")):
            kind = type(prompts).__name__
            raise ConfigError(f"{where}: {name} must be a list or another sequence, got {kind}: write list(...) around it")
    if not task.train:
        raise ConfigError(f"{where} returned no prompts to train on")

    def checked(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        as_read = ComputedSequence[Prompt](len(prompts), lambda index: _as_it_travels(prompts[index], where))
        return list(as_read) if isinstance(prompts, list | tuple) else as_read

    train, held_out = checked(task.train), checked(task.held_out)
    listed = [prompt for prompts in (train, held_out) if isinstance(prompts, list) for prompt in prompts]
    if isinstance(held_out, list) and isinstance(train, list):
        known = {(prompt.text, prompt.messages, prompt.token_ids) for prompt in held_out}
        if both := [prompt.prompt_id for prompt in train if (prompt.text, prompt.messages, prompt.token_ids) in known]:
            raise ConfigError(
                f"{where}: {len(both)} prompts of train are in held_out too ({', '.join(both[:3])}): leave them out of one"
            )
    return replace(task, train=train, held_out=held_out, alphabet="".join(sorted({*task.alphabet, *alphabet_of(listed)})))


def _as_it_travels(prompt: object, where: str) -> Prompt:
    """Return a prompt as other processes decode it. Only decoding checks types: a Prompt can be built from any values."""
    if not isinstance(prompt, Prompt):
        raise ConfigError(f"{where} must give prompts as asyncrl.schema.samples.Prompt, got {type(prompt).__name__}")
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: the prompt {prompt.prompt_id!r} cannot be used: {error}") from error


BUILDERS: dict[type[TaskConfig], Callable[[Any, int], TaskData]] = {
    AdditionTask: build_addition,
    ReasoningGymTask: build_reasoning_gym,
    JsonlTask: build_jsonl,
    PreferencesTask: build_preferences,
    PythonTask: build_python,
}


def build_task(config: TaskConfig, seed: int) -> TaskData:
    """Build the task that a run's config describes.

    Args:
        config: Any variant of `[task]`.
        seed: The run's seed; it determines the split and the shots.

    Returns:
        The same task for the same arguments, in every process.

    Raises:
        ConfigError: The task cannot be built as configured; the message names the field.
    """
    return BUILDERS[type(config)](config, seed)
