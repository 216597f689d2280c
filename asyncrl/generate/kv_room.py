"""How many requests an engine could run now, by the KV blocks that are free: what admission is told instead of a fixed number.

Owns the running estimate of how long a sequence gets, and the number told last. Pure: no clock, no engine; whoever owns the
engine feeds it. For an engine with paged KV (vLLM): once a step `update(free blocks, requests in the batch)` from the scheduler's
statistics, once a finished request `note_finished(prompt + response tokens)`, and `num_slots` is what `Engine.num_slots` returns.

Invariants: `1 <= num_slots <= most`; it moves only when the answer has moved by at least an eighth (so that a block more or less
is no news), or to `most`. Too low a number leaves the batch with gaps, too high a one makes groups wait inside the engine while
their weights grow old; neither is ever wrong, since the staleness rule does not depend on it.

Called by generate/vllm_engine.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MEAN_OVER = 256
"""Finished sequences over which the mean length is taken, roughly: older ones count less and less."""
NOTICEABLE = 8
"""A change of less than one in so many is no news."""


def requests_that_fit(*, free_blocks: int, running: int, blocks_each: int) -> int:
    """Return how many requests could run at once: those that do, and as many more as find room for a whole sequence.

    Every running request is given one block first: it will ask for one within the next block's worth of tokens, and who gets none
    is thrown out and computed again. Beyond that, what running requests will still need is taken to be what others give back by
    ending, as it is once they are out of step.

    Args:
        free_blocks: KV blocks that nobody holds; blocks of cached prefixes count as free.
        running: Requests in the batch; those that wait inside the engine are not among them.
        blocks_each: Blocks that a sequence of mean length holds at its end; at least 1.

    Returns:
        At least 0; less than `running` where the blocks do not last.
    """
    return max(0, running + int((free_blocks - running) / blocks_each))


@dataclass(slots=True)
class KVRoom:
    """The room of one engine; see the module.

    Args:
        most: Never more than this (config's num_slots).
        block_tokens: Tokens of a KV block.
        expected_tokens: Prompt and response of a sequence, until some have finished: the longest allowed is the careful guess.

    Example:
        >>> room = KVRoom(most=256, block_tokens=16, expected_tokens=160)
        >>> room.update(free_blocks=320, running=0)
        32
        >>> room.note_finished(num_tokens=80)
        >>> room.update(free_blocks=320, running=0)
        64
    """

    most: int
    block_tokens: int
    expected_tokens: int
    _mean_tokens: float = field(init=False, default=0.0)
    _num_finished: int = field(init=False, default=0)
    _told: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._told = self.most

    @property
    def num_slots(self) -> int:
        """Most requests that should run at once, as of the last `update`; `most` before the first."""
        return self._told

    def note_finished(self, num_tokens: int) -> None:
        """Take a finished sequence's length (prompt and response) into the mean."""
        self._num_finished += 1
        self._mean_tokens += (num_tokens - self._mean_tokens) / min(self._num_finished, MEAN_OVER)

    def update(self, free_blocks: int, running: int) -> int:
        """Return the number of slots by what is free now; see `requests_that_fit`."""
        tokens = self._mean_tokens if self._num_finished else float(self.expected_tokens)
        fits = requests_that_fit(free_blocks=free_blocks, running=running, blocks_each=math.ceil(tokens / self.block_tokens))
        now = min(self.most, max(1, fits))
        if now == self.most or abs(now - self._told) * NOTICEABLE >= self._told:
            self._told = now
        return self._told
