"""Where prompts come from. Variants by the tag `kind`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.config import NonNegativeInt, PositiveInt, _Variant


class AdditionTask(_Variant, frozen=True, tag="addition"):
    """`12+34=` -> `46`, all pairs of numbers of `digits` digits, split by seed; the smallest task that shows learning."""

    digits: Annotated[int, Meta(ge=1, le=4)] = 2
    held_out: PositiveInt = 512
    """Pairs that are never trained on, in the warm start neither."""


class ReasoningGymTask(_Variant, frozen=True, tag="reasoning_gym"):
    """A reasoning-gym family, strict scoring (0.99 and above is right), duplicates removed, held-out split."""

    family: str = "chain_sum"
    family_options: dict[str, int | float | str | bool | list[int | float | str]] = {}
    size: PositiveInt = 2000
    """Problems generated before duplicates are removed."""
    held_out: PositiveInt = 200
    shots: NonNegativeInt = 3
    """Worked examples shown as chat turns before the problem, taken from neither split."""
    system_prompt: str = ""


class JsonlTask(_Variant, frozen=True, tag="jsonl"):
    """One JSON object a line; any file of prompts and answers."""

    path: str
    prompt_field: str = "question"
    answer_field: str = "answer"
    answer_regex: str = ""
    """Where given, its first group taken from the answer field is the reference answer (GSM8K: `#### (.+)`)."""
    held_out_path: str = ""
    """Empty: `held_out` lines are taken from `path`, by seed."""
    held_out: NonNegativeInt = 200
    shots: NonNegativeInt = 0
    system_prompt: str = ""
    chat: bool = True
    """False: the prompt field is the text itself."""


class PreferencesTask(_Variant, frozen=True, tag="preferences"):
    """A file of preferences, one JSON object a line: prompt, chosen and rejected answer. Trained offline by DPO."""

    path: str
    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    held_out: NonNegativeInt = 0
    system_prompt: str = ""
    chat: bool = True
    """False: the prompt field is the text itself."""


class PythonTask(_Variant, frozen=True, tag="python"):
    """A user's own task: `module:function`, called with the run's seed, returns a `TaskData`."""

    path: str


TaskConfig = AdditionTask | ReasoningGymTask | JsonlTask | PreferencesTask | PythonTask
