"""An external arm of a sweep that learns in an instant: a policy over ten answers, one of which is right, trained by REINFORCE.

python bandit_cell.py LEARNING_RATE SEED OUT
"""

import json
import math
import random
import sys
from pathlib import Path

NUM_STEPS, NUM_SAMPLES, ANSWERS, RIGHT = 60, 32, range(10), 3


def chances_of(logits: list[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(logit) / total for logit in logits]


def main(rate: float, seed: int, out: Path) -> None:
    drawing, logits, rewards = random.Random(seed), [0.0] * len(ANSWERS), []
    for _ in range(NUM_STEPS):
        chances = chances_of(logits)
        drawn = drawing.choices(ANSWERS, chances, k=NUM_SAMPLES)
        mean = drawn.count(RIGHT) / NUM_SAMPLES
        for answer in ANSWERS:
            gradient = sum(((one == RIGHT) - mean) * ((one == answer) - chances[answer]) for one in drawn)
            logits[answer] += rate * gradient / NUM_SAMPLES
        rewards.append(mean)
    seconds = [step + 1.0 for step in range(NUM_STEPS)]
    found = {"seconds": seconds, "rewards": rewards, "accuracy": [0.1, chances_of(logits)[RIGHT]]}
    (out / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
