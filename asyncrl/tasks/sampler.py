"""The order in which prompts are issued: a pure function of the seed and a cursor.

Invariants: every prompt comes once per epoch; each epoch has an order of its own; index i gives the same prompt in every process
and after every restart, so the cursor (how many groups were ever issued) is all that a checkpoint has to remember; there is no
last index, so the end of the data never ends or hangs a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.schema.samples import Prompt, derive_seed

ROUNDS = 6
_WORD = (1 << 64) - 1


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
        """How many indices one epoch has."""

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
            left, right = right, left ^ (_mixed(right, seed + round_number) & half_mask)
        value = left << half_bits | right
        if value < size:
            return value


def _mixed(value: int, seed: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64) under a seed."""
    word = (value * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03) & _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
