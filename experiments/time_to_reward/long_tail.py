"""Answers of log-normal length and a reward that takes its time: `b12=` -> `bbbbbbbbbbbb`.

The length has a median of 8 and a sigma of 0.9, cut to [1, 64]. The reward waits 50 ms on average (exponential, by the sample's
text), as one does that asks a server.
"""

from __future__ import annotations

import asyncio
import math
import random
import zlib

from asyncrl import Prompt, TaskData

LETTERS = "abcdefgh"
LONGEST = 64
MEAN_S = 0.05


def build(seed: int) -> TaskData:
    """The problems, lengths drawn anew for each; every eighth pair of letter and length is held out."""
    rng = random.Random(seed)

    def prompt(split: str, index: int) -> Prompt:
        while True:
            letter, length = rng.choice(LETTERS), min(LONGEST, max(1, round(rng.lognormvariate(math.log(8), 0.9))))
            if ((LETTERS.index(letter) + length) % 8 == 0) == (split == "held_out"):
                return Prompt(prompt_id=f"long_tail/{split}/{index}", text=f"{letter}{length}=", answer=letter * length)

    train = [prompt("train", index) for index in range(20_000)]
    held_out = [prompt("held_out", index) for index in range(512)]
    examples = [(one.text, one.answer) for one in train]
    return TaskData(train=train, held_out=held_out, alphabet=LETTERS + "0123456789=", worked_examples=examples)


async def score(prompt: Prompt, text: str) -> float:
    """1 for the right answer, after a while."""
    await asyncio.sleep(random.Random(zlib.crc32((prompt.answer + text).encode())).expovariate(1 / MEAN_S))
    return float(text == prompt.answer)
