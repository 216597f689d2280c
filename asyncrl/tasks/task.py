"""What a task is: problems to train on, problems held out, and what a model made from nothing needs to know of them.

Invariants: `train` and `held_out` share no problem; both are random access and never change once built; the same config and
seed give the same task in every process and after every restart (a resume depends on it). No torch, no network.
Built by tasks/registry.py, once, in the controller (prompts) and in the learner (alphabet and worked examples).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from asyncrl.schema.samples import Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskData:
    """Everything a run asks of its task."""

    train: Sequence[Prompt]
    """Problems the policy is trained on; at least one."""
    held_out: Sequence[Prompt]
    """Problems that are only evaluated on; may be empty."""
    alphabet: str = ""
    """Every character that prompts and answers use, sorted; the vocabulary of a scratch model's tokenizer."""
    worked_examples: Sequence[tuple[str, str]] = ()
    """Prompt text and full right completion, without an end token, of the train split only; for a warm start."""


class ComputedSequence(Sequence[T], Generic[T]):
    """A sequence whose items are made when asked for, so that 80 million problems cost no memory.

    Example:
        >>> list(ComputedSequence(3, lambda index: index * index))
        [0, 1, 4]
    """

    def __init__(self, length: int, item: Callable[[int], T]) -> None:
        """Make a sequence of `length` items; `item` is a pure function of an index in [0, length)."""
        self._length = length
        self._item = item

    def __len__(self) -> int:
        """Return the number of items."""
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return one item, or a list of them for a slice; negative indices count from the end."""
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(self._length))]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"index {index} is outside a sequence of {self._length}")
        return self._item(position)


def alphabet_of(prompts: Iterable[Prompt]) -> str:
    """Return the sorted characters that these prompts and their answers use."""
    characters: set[str] = set()
    for prompt in prompts:
        characters.update(prompt.text, prompt.answer, *(message.content for message in prompt.messages))
    return "".join(sorted(characters))
