"""Addition of two numbers of a fixed number of digits: `12+34=` -> `46`. The smallest task on which learning shows.

Invariants: a pair (a, b) is in exactly one split; (b, a) is another pair. Nothing is stored but the held-out pairs.
"""

from __future__ import annotations

import random
from bisect import bisect_right

from asyncrl.config.tasks import AdditionTask
from asyncrl.errors import ConfigError
from asyncrl.schema.samples import Prompt, derive_seed
from asyncrl.tasks.task import ComputedSequence, TaskData

ALPHABET = "+0123456789="


def build_addition(config: AdditionTask, seed: int) -> TaskData:
    """Split all pairs of numbers of `config.digits` digits by `seed`.

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
    held_out_codes = sorted(drawn)
    # The i-th code that is not held out is i plus the number of held-out codes below it.
    offsets = [code - rank for rank, code in enumerate(held_out_codes)]

    def prompt(code: int, split: str) -> Prompt:
        first, second = (lowest + part for part in divmod(code, num_operands))
        return Prompt(prompt_id=f"addition/{split}/{first}+{second}", text=f"{first}+{second}=", answer=str(first + second))

    def train(index: int) -> Prompt:
        return prompt(index + bisect_right(offsets, index), "train")

    def worked_example(index: int) -> tuple[str, str]:
        return train(index).text, train(index).answer

    num_train = num_pairs - config.held_out
    return TaskData(
        train=ComputedSequence(num_train, train),
        held_out=[prompt(code, "held_out") for code in drawn],
        alphabet=ALPHABET,
        worked_examples=ComputedSequence(num_train, worked_example),
    )
