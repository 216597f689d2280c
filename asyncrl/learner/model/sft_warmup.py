"""A short supervised training of a scratch model on the task's own worked examples, before version 0 exists.

Cross-entropy on completion and end-of-sequence, token mean. It can end early at a given accuracy. It is seeded, so that the same
config gives the same version 0. The learning rate rises over the first tenth of the steps, then a cosine reduces it to a tenth.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from asyncrl.config.learner import LearnerConfig, WarmStart
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learner.model.policy import run_row
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.step.microbatch import Row, prepare
from asyncrl.schema.samples import PackedRow, PackedSample, StepBatch

log = logging.getLogger(__name__)

LOG_EVERY = 50
FINAL_RATE_SHARE = 0.1
WARMUP_SHARE = 0.1
ACCURACY_BATCHES = 8
"""Number of batches over which the accuracy is averaged."""


class StartAbandoned(Exception):  # noqa: N818 - not an error: the stop was requested
    """The learner was told to stop before version 0 existed."""


Example = tuple[NDArray[np.int32], NDArray[np.int32]]
"""A worked example as tokens: prompt, and completion with its end-of-sequence token."""


def tokenise(examples: Sequence[tuple[str, str]], tokenizer: Any) -> list[Example]:  # noqa: ANN401 - transformers' class
    """Turn (prompt, completion) texts into tokens, end-of-sequence appended."""
    told = [(tokenizer(text, add_special_tokens=False)["input_ids"] for text in example) for example in examples]
    end = [tokenizer.eos_token_id]
    return [(np.array(prompt, dtype=np.int32), np.array([*text, *end], dtype=np.int32)) for prompt, text in told]


def warm_start(
    model: PreTrainedModel,
    examples: Sequence[Example],
    config: WarmStart,
    learner: LearnerConfig,
    seed: int,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Train the model in place.

    Args:
        model: From `made_ready`.
        examples: Each batch is drawn from these without replacement.
        config: Steps, batch size, learning rate.
        learner: Other optimizer settings (betas, clipping) and chunking.
        seed: Seed of the draw.
        stopped: Called before every step.

    Returns:
        `warm_start/loss` (nats per token, mean of the last ten steps), `warm_start/accuracy` (of the last batches, before they
        were trained) and `warm_start/steps` (number of steps done).

    Raises:
        ConfigError: There are no examples.
        LearnerError: The loss is not finite.
        StartAbandoned: `stopped` returned true.
    """
    if not examples:
        raise ConfigError("model.warm_start: this task has no worked examples; remove warm_start or choose another task")
    schedule = LearnerConfig(
        learning_rate=config.learning_rate,
        min_learning_rate_ratio=FINAL_RATE_SHARE,
        warmup_steps=max(1, int(config.steps * WARMUP_SHARE)),
        betas=learner.betas,
        epsilon=learner.epsilon,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
    )
    optimizer = PolicyOptimizer(model.named_parameters(), schedule, config.steps)
    rng = np.random.default_rng(seed)
    losses: list[float] = []
    accuracies: deque[float] = deque(maxlen=ACCURACY_BATCHES)
    for step in range(config.steps):
        if stopped():
            raise StartAbandoned(f"stopped at warm start step {step} of {config.steps}; the next start begins again")
        drawn = rng.choice(len(examples), size=min(config.batch_size, len(examples)), replace=False)
        drawn_examples = [examples[index] for index in drawn]
        row = _row(drawn_examples).to(model.device)
        logprobs = run_row(model, row, temperature=1.0, chunk_tokens=learner.logprob_chunk_tokens).logprobs
        loss = -logprobs.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.clip()
        optimizer.step(step)
        losses.append(loss.item())
        if not np.isfinite(losses[-1]):
            raise LearnerError(f"warm start: loss {losses[-1]} at step {step}; lower model.warm_start.learning_rate")
        # Mean probability of the worked completion, end included, when sampling at temperature 1.
        parts = torch.split(logprobs.detach(), [len(completion) for _, completion in drawn_examples])
        accuracies.append(float(np.mean([part.sum().exp().item() for part in parts])))
        is_full = len(accuracies) == ACCURACY_BATCHES
        done = step == config.steps - 1 or (0 < config.until_accuracy <= np.mean(accuracies) and is_full)
        if step % LOG_EVERY == 0 or done:
            log.info("warm start step %d of %d: loss %.3f, accuracy %.3f", step + 1, config.steps, losses[-1], accuracies[-1])
        if done:
            break
    return {
        "warm_start/loss": float(np.mean(losses[-10:])),
        "warm_start/accuracy": float(np.mean(accuracies)),
        "warm_start/steps": float(len(losses)),
    }


def _row(examples: list[Example]) -> Row:
    """Concatenate examples in one row; every token of a completion is a target."""
    samples, start = [], 0
    for group_id, (prompt_ids, completion_ids) in enumerate(examples):
        sizes = len(prompt_ids), len(completion_ids)
        samples.append(PackedSample(group_id, 0, 0, start, *sizes, reward=0.0, oldest_version=0))
        start += sum(sizes)
    parts = [part for example in examples for part in example]
    mask = np.concatenate([np.full(len(part), position % 2, dtype=np.uint8) for position, part in enumerate(parts)])
    row = PackedRow(
        token_ids=np.concatenate(parts).astype("<i4").tobytes(),
        loss_mask=mask.tobytes(),
        behaviour_logprobs=np.zeros(len(mask), dtype="<f4").tobytes(),
        versions=b"",
    )
    return prepare(StepBatch(0, tuple(samples), (row,), int(mask.sum()), 1.0)).rows[0]
