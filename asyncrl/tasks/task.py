"""A task: problems to train on, held-out problems, the alphabet and examples for a scratch model, and the order of prompts.

Invariants: `train` and `held_out` share no problem; both are random access and never change once built; the same config and
seed give the same task in every process and after every restart (a resume depends on it). No torch, no network.
Built by tasks/registry.py, once, in the controller (prompts) and in the learner (alphabet and worked examples).

The order in which prompts are issued is a pure function of the seed and a cursor: every prompt comes once per epoch; each epoch
has an order of its own; index i gives the same prompt in every process and after every restart, so the cursor (how many groups
were ever issued) is all that a checkpoint has to store; there is no last index, so the end of the data never ends a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncrl.schema.samples import Prompt, derive_seed

T = TypeVar("T")
ROUNDS = 6
MOST_EXAMPLES = 200_000
"""Maximum number of worked examples for a warm start."""
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TaskData:
    """All that a run uses of its task."""

    train: Sequence[Prompt]
    """Problems to train on; at least one."""
    held_out: Sequence[Prompt]
    """Problems for evaluation only; may be empty."""
    alphabet: str = ""
    """Every character that prompts and answers use; the vocabulary of a scratch model's tokenizer. In a task of `kind = "python"`
    the characters of prompts that are in a list are added."""
    worked_examples: Sequence[tuple[str, str]] = ()
    """Prompt text and full correct completion, without an end token, from the train split only; for a warm start."""


class ComputedSequence(Sequence[T], Generic[T]):
    """A sequence that computes each item on access, so that 80 million problems use no memory.

    Example:
        >>> list(ComputedSequence(3, lambda index: index * index))
        [0, 1, 4]
    """

    def __init__(self, length: int, item: Callable[[int], T]) -> None:
        """Make a sequence of `length` items; `item` is a pure function of an index in [0, length)."""
        self._length, self._item = length, item

    def __len__(self) -> int:
        """Return the number of items."""
        return self._length

    def __getitem__(self, index: int | slice) -> Any:  # noqa: ANN401 - T or a list of T
        """Return one item, or a list of them for a slice; negative indices count from the end."""
        try:
            chosen = range(self._length)[index]
        except IndexError:
            raise IndexError(f"index {index} is outside a sequence of {self._length}") from None
        return [*map(self._item, chosen)] if isinstance(chosen, range) else self._item(chosen)


def alphabet_of(prompts: Iterable[Prompt]) -> str:
    """Return the sorted characters that these prompts and their answers use."""
    characters: set[str] = set()
    for prompt in prompts:
        characters.update(prompt.text, prompt.answer, *(message.content for message in prompt.messages))
    return "".join(sorted(characters))


def warm_start_examples(task: TaskData, seed: int) -> list[tuple[str, str]]:
    """Return the task's worked examples in order; if there are more than `MOST_EXAMPLES`, that many, drawn by `seed`."""
    examples = task.worked_examples
    if len(examples) <= MOST_EXAMPLES:
        return list(examples)
    drawn = random.Random(derive_seed(seed, "worked examples")).sample(range(len(examples)), MOST_EXAMPLES)
    return [examples[index] for index in drawn]


class PromptSequence:
    """An endless, random-access sequence of prompts, reshuffled each epoch.

    Example:
        >>> prompts = [Prompt(prompt_id=str(i)) for i in range(3)]
        >>> order = PromptSequence(prompts, seed=0)
        >>> sorted(order[i].prompt_id for i in range(3, 6))
        ['0', '1', '2']
    """

    def __init__(self, train: Sequence[Prompt], seed: int) -> None:
        """Order `train`, at least one, by `seed`."""
        self._train, self._seed = train, seed
        self.epoch_length = len(train)
        """Number of indices in one epoch."""

    def __getitem__(self, index: int) -> Prompt:
        """Return the prompt at `index`, any integer from 0 up."""
        epoch, position = divmod(index, self.epoch_length)
        return self._train[permuted(position, self.epoch_length, derive_seed(self._seed, "epoch", epoch))]


def permuted(position: int, size: int, seed: int) -> int:
    """Return where `position` goes in a pseudo-random permutation of range(size), without building it.

    A Feistel network over the next even number of bits, walked until it lands inside the range (at most 4 tries on average).

    Args:
        position: In [0, size).
        size: At least 1.
        seed: Chooses the permutation.

    Returns:
        An integer in [0, size); two positions never share one.

    Source:
        Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), section 4, cycle walking.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    value = position
    while True:
        left, right = value >> half_bits, value & half_mask
        for round_number in range(ROUNDS):
            # The finaliser of splitmix64 scrambles the right half.
            word = (right * 0x9E3779B97F4A7C15 + (seed + round_number) * 0xD1B54A32D192ED03) & _WORD
            word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
            word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
            left, right = right, left ^ ((word ^ (word >> 31)) & half_mask)
        value = left << half_bits | right
        if value < size:
            return value
