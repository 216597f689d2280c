"""The planner: does it fit, how are the GPUs split, how fast is it, and what would make it fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.plan.memory import GPUMemory, gpu_memory
from asyncrl.plan.spec import Question
from asyncrl.plan.speed import engine_speed, generation_s, inference_s, switch_s, training_s, weight_sync_s

MAX_GPUS_SEARCHED = 4096
MAX_ADVICE = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """What came of a question."""

    question: Question
    tensor_parallel: int
    num_generation_gpus: int
    num_training_gpus: int
    memory: list[GPUMemory]
    generation_s: float
    """Seconds in which the generation GPUs make one step's samples."""
    training_s: float
    """Seconds of one step's inference forwards, training and, where phases take turns, switching."""
    sync_s: float
    generated_tokens_per_s: float
    trained_tokens_per_s: float

    @property
    def usable_bytes(self) -> float:
        """Return what of one GPU's memory may be planned with."""
        return self.question.cluster.accelerator.memory_bytes * self.question.memory_share

    @property
    def overflow_bytes(self) -> float:
        """Return by how much the worst role does not fit; 0 where all do."""
        return max(0.0, *(role.peak_bytes - self.usable_bytes for role in self.memory))

    @property
    def fits(self) -> bool:
        """Return whether every role fits in every phase."""
        return self.overflow_bytes == 0

    @property
    def overlaps(self) -> bool:
        """Return whether generation goes on while training does."""
        return self.question.placement in {"disaggregated", "async_hybrid"} and self.question.max_staleness > 0

    @property
    def step_s(self) -> float:
        """Return the seconds from one step to the next."""
        if self.overlaps:
            return max(self.generation_s, self.training_s)
        return self.generation_s + self.training_s + self.sync_s

    @property
    def mean_staleness(self) -> float:
        """Return the mean age of a sample's oldest token when it is trained, in versions.

        Generation runs ahead as far as it is needed (`buffer.ahead`): a sample is as old as it took to make, plus half a step of
        waiting for its batch, and one version at least.
        """
        bound = float(self.question.max_staleness) if self.overlaps else 0.0
        sample_s = self.question.response_tokens * engine_speed(self.question, self.tensor_parallel).step_s
        return min(bound, max(1.0, sample_s / self.step_s + 0.5))

    @property
    def dollars_per_step(self) -> float:
        """Return what one step costs at the device's usual price."""
        cluster = self.question.cluster
        return cluster.num_gpus * cluster.accelerator.dollars_per_hour * self.step_s / 3600


def plan(question: Question) -> Plan:
    """Return the best plan for the hardware asked about: one that fits, if any does, and of those the fastest.

    Raises:
        ConfigError: There are too few GPUs to divide, whatever fits.
    """
    total, chosen = question.cluster.num_gpus, question.num_generation_gpus
    most = min(total, question.cluster.gpus_per_node)
    plans = []
    for size in [question.tensor_parallel] if question.tensor_parallel else [2**power for power in range(most.bit_length())]:
        if question.placement == "disaggregated":
            splits = [chosen] if chosen else range(size, total, size)
            plans += [_plan_with(question, size, here, total - here) for here in splits if size <= here < total]
        elif total % size == 0:
            plans.append(_plan_with(question, size, total, total))
    if not plans:
        raise ConfigError(f"{question.placement} needs at least 2 GPUs, one to generate and one to train; got {total}")
    return min(plans, key=lambda made: (made.overflow_bytes, made.step_s, made.tensor_parallel))


def advice(made: Plan) -> list[str]:
    """Return what would make the plan fit: single changes, or else pairs and triples of them; then the fewest GPUs as it is."""
    question, lines = made.question, list[str]()
    if made.fits:
        return lines
    changes = [(text, fields) for text, fields_of in _CHANGES if (fields := fields_of(question))]
    for size in (1, 2, 3):
        for combination in itertools.combinations(changes, size):
            merged = {name: value for _, fields in combination for name, value in fields.items()}
            is_apart = len(merged) == sum(len(fields) for _, fields in combination)
            if len(lines) < MAX_ADVICE and is_apart and _fits(dataclasses.replace(question, **merged)):
                lines.append(" and ".join(text for text, _ in combination))
        if lines:
            break
    count = question.cluster.num_gpus * 2
    while count <= MAX_GPUS_SEARCHED:
        cluster = dataclasses.replace(question.cluster, num_gpus=count)
        if _fits(dataclasses.replace(question, cluster=cluster, num_generation_gpus=0)):
            return [*lines, f"{count} GPUs of this kind instead of {question.cluster.num_gpus}"]
        count *= 2
    return lines or ["no three changes are enough: take larger devices or more of them"]


def _plan_with(question: Question, tensor_parallel: int, num_generation: int, num_training: int) -> Plan:
    memory = gpu_memory(question, tensor_parallel, num_training)
    generating_s = generation_s(question, tensor_parallel, num_generation)
    training = training_s(question, num_training) + inference_s(question, num_training)
    if question.placement in {"colocated", "hybrid"}:
        training += switch_s(question, sum(size for name, size in memory[0].host.items() if name.startswith("offloaded")))
    if question.placement == "async_hybrid":
        # Both share the devices' compute and memory speed: each goes as fast as if it had its share of the time.
        generating_s, training = generating_s + training / 2, training + generating_s / 2
    return Plan(
        question=question,
        tensor_parallel=tensor_parallel,
        num_generation_gpus=num_generation,
        num_training_gpus=num_training,
        memory=memory,
        generation_s=generating_s,
        training_s=training,
        sync_s=weight_sync_s(question),
        generated_tokens_per_s=question.samples_per_step * question.response_tokens / generating_s,
        trained_tokens_per_s=question.tokens_per_step / training,
    )


def _fits(question: Question) -> bool:
    try:
        return plan(question).fits
    except ConfigError:
        return False


_CHANGES: tuple[tuple[str, Callable[[Question], dict[str, Any]]], ...] = (
    ("gradient checkpointing", lambda q: {} if q.gradient_checkpointing else {"gradient_checkpointing": True}),
    (
        "rows as short as the longest sample",
        lambda q: {"tokens_per_row": q.max_sequence_tokens} if q.tokens_per_row > q.max_sequence_tokens else {},
    ),
    ("an 8-bit optimizer", lambda q: {"optimizer": "adamw_8bit"} if q.optimizer == "adamw" else {}),
    ("optimizer state in host memory", lambda q: {} if q.offload_optimizer else {"offload_optimizer": True}),
    ("no critic (GRPO instead of PPO)", lambda q: {"critic": None, "algorithm": "grpo"} if q.critic is not None else {}),
    ("LoRA of rank 32 (its base is the reference too)", lambda q: {} if q.lora_rank else {"lora_rank": 32}),
    ("placement = colocated", lambda q: {"placement": "colocated"} if q.placement != "colocated" else {}),
    ("placement = hybrid", lambda q: {"placement": "hybrid"} if q.placement != "hybrid" else {}),
    ("placement = disaggregated", lambda q: {"placement": "disaggregated"} if q.placement != "disaggregated" else {}),
)
"""What can be changed, cheapest first: in words, and the fields that it sets; none where it is so already."""
