"""The planner: memory, the split of the GPUs, speed, and changes that make a run fit. Formulas: docs/planning.md.

Bytes are per GPU, by component and phase: training state is divided over all training GPUs (FSDP2), an engine over its
tensor-parallel group. Speeds are first-order estimates: tokens/s of engines, seconds of a training step and of a weight update.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.models.memory import ModelShape, forward_row, trained_parts, training_row
from asyncrl.plan.spec import Question
from asyncrl.schema.control import Phase
from asyncrl.weights.media.base import NUM_SLOTS

PHASES: tuple[Phase, ...] = ("rollout", "inference", "train")
Components = dict[str, float]

ENGINE_OVERHEAD_BYTES = 2.5e9
"""CUDA context, graphs and activations of an engine's forward pass; vLLM logs about this much for models up to 70B."""
CONTEXT_BYTES = 1.0e9
"""CUDA context and the allocator's slack of a training process."""
LOGPROB_CHUNK_TOKENS = 512
MIN_CACHED_SEQUENCES = 8
"""Minimum number of the longest samples that an engine's KV cache must hold."""
LEAST_CACHE = "KV cache (least)"
MAX_GPUS_SEARCHED = 4096
MAX_ADVICE = 6
DECODE_BANDWIDTH_SHARE = 0.6
"""Share of the memory bandwidth that decoding reaches (vLLM on H100, published roofline studies: 0.5 to 0.75)."""
COMPUTE_SHARE = 0.4
"""Share of the peak FLOPs that training and prefill reach (model-FLOPs utilisation of FSDP on H100: 0.35 to 0.5)."""
LINK_SHARE = 0.8
COLLECTIVE_S = 12e-6
"""Latency of one all-reduce of a decode step inside a machine, in seconds."""
MAX_SEQUENCES = 256
"""Maximum number of sequences that one engine decodes at once (vLLM's `max_num_seqs`)."""


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """What one GPU of a role holds in each phase."""

    role: str
    phases: Mapping[Phase, Components]
    host: Components = field(default_factory=dict)
    """Bytes in host memory for each such GPU."""

    @property
    def peak_bytes(self) -> float:
        """Return the maximum over the phases; a cache that grows into free memory counts at its minimum."""
        return max((sum(parts.values()) for parts in self.phases.values()), default=0.0)


def training_state(question: Question, model: ModelShape, num_gpus: int, *, is_policy: bool) -> tuple[Components, Components]:
    """Return one GPU's share of the training state of a model: (on the GPU, in host memory).

    Weights in the compute dtype; float32 gradients; float32 masters where the compute dtype is shorter or the state is offloaded;
    two moments of 4 bytes, or of 1. As asyncrl/learner/optim/master_weights.py and optim.py hold them.
    """
    adapters = question.lora_parameters if is_policy else 0
    learner = LearnerConfig(dtype=question.dtype, optimizer=question.optimizer, offload_optimizer=question.offload_optimizer)
    trained, frozen = (adapters, model.parameters) if adapters else (model.parameters, 0)
    on_gpu: Components = {}
    in_host: Components = {}
    for part in trained_parts(trained, frozen, learner):
        side = on_gpu if part.place == "device" else in_host
        side[part.name.split()[-1]] = part.num_bytes / num_gpus
    if num_gpus > 1:
        largest = max(model.block_parameters, model.vocabulary * model.hidden / 2)
        on_gpu["gathered layers"] = 2 * largest * question.bytes_per_weight
    return on_gpu, in_host


def activations(question: Question, model: ModelShape) -> float:
    """Return the peak activation bytes of one row of `tokens_per_row` in the forward and backward passes."""
    row = training_row(
        model, question.tokens_per_row, question.bytes_per_weight,
        checkpointing=question.gradient_checkpointing, chunk_tokens=LOGPROB_CHUNK_TOKENS,
    )  # fmt: skip
    return sum(row.values())


def gpu_memory(question: Question, tensor_parallel: int, num_training_gpus: int) -> list[GPUMemory]:
    """Return the memory of one GPU of each role; reference and reward models are divided over the training GPUs."""
    trained: Components = {}
    host: Components = {}
    for name, model in (("policy", question.model), ("critic", question.critic)):
        if model is not None:
            on_gpu, in_host = training_state(question, model, num_training_gpus, is_policy=name == "policy")
            trained |= {f"{name} {part}": size for part, size in on_gpu.items()}
            host |= {f"{name} {part}": size for part, size in in_host.items()}
    engine: Components = {
        "engine weights": (question.model.parameters + question.lora_parameters) * question.bytes_per_weight / tensor_parallel,
        "engine overhead": ENGINE_OVERHEAD_BYTES,
        LEAST_CACHE: MIN_CACHED_SEQUENCES * question.max_sequence_tokens * 2 * question.model.cached_values / tensor_parallel,
    }
    share = question.bytes_per_weight / num_training_gpus
    frozen: Components = {}
    if question.has_reference:
        frozen["reference"] = 0.0 if question.lora_rank else question.model.parameters * share
    if question.reward_model is not None:
        frozen["reward model"] = question.reward_model.parameters * share
    step = {"activations": activations(question, question.model), "CUDA context": CONTEXT_BYTES}
    forward_bytes = forward_row(question.model, question.tokens_per_row, question.bytes_per_weight, LOGPROB_CHUNK_TOKENS)
    forward = {"CUDA context": CONTEXT_BYTES, "activations of a forward": forward_bytes}
    kept = {name: size for name, size in (trained | frozen).items() if "gathered" not in name and "gradients" not in name}
    match question.placement:
        case "disaggregated":
            return [
                GPUMemory("generation", {"rollout": engine}),
                GPUMemory("training", {"inference": trained | frozen | forward, "train": trained | frozen | step}, host),
            ]
        case "colocated":
            away = host | {f"offloaded {name}": size for name, size in kept.items()}
            phases: dict[Phase, Components] = {"rollout": engine, "inference": frozen | forward, "train": trained | step}
            return [GPUMemory("all", phases, away)]
        case "hybrid":
            weights, engine_weights = trained["policy weights"], engine.pop("engine weights")
            shared: Components = {"policy weights": weights}
            whole = {"policy weights, gathered for the engine": max(0.0, engine_weights - weights)}
            away = host | {f"offloaded {name}": size for name, size in kept.items() if name not in shared | frozen}
            phases = {"rollout": shared | whole | engine, "inference": shared | frozen | forward, "train": trained | step}
            return [GPUMemory("all", phases, away)]
        case "async_hybrid":
            # An engine on the learner's only GPU opens versions there (the medium cuda_ipc); an engine elsewhere receives them.
            fetched = {"weight versions to fetch": NUM_SLOTS * question.version_bytes} if num_training_gpus == 1 else {}
            return [GPUMemory("all", {"train": trained | frozen | step | engine | fetched}, host)]


def cache_bytes(question: Question, tensor_parallel: int) -> float:
    """Return the bytes of one GPU that remain for the KV cache of its engine during generation."""
    phases = gpu_memory(question, tensor_parallel, question.cluster.num_gpus)[0].phases
    parts = phases["train" if question.placement == "async_hybrid" else "rollout"]
    beside = sum(size for name, size in parts.items() if name != LEAST_CACHE)
    return question.cluster.accelerator.memory_bytes * question.memory_share - beside


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a Question."""

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
        """Return the bytes of one GPU that the plan may use."""
        return self.question.cluster.accelerator.memory_bytes * self.question.memory_share

    @property
    def overflow_bytes(self) -> float:
        """Return the bytes that the largest role needs beyond its GPU; 0 if all fit."""
        return max(0.0, *(role.peak_bytes - self.usable_bytes for role in self.memory))

    @property
    def fits(self) -> bool:
        """Return whether every role fits in every phase."""
        return self.overflow_bytes == 0

    @property
    def why_not_run(self) -> str:
        """Return why no run can use this split; empty if one can."""
        ranks, gpus_per_node, placement = self.num_training_gpus, self.question.cluster.gpus_per_node, self.question.placement
        if ranks > 1 and placement in {"colocated", "hybrid"}:
            return f"no run can use this split: placement {placement} is for one GPU, and {ranks} train"
        if ranks > gpus_per_node:
            return f"no run can use this split: {ranks} GPUs train, and the learner is on one machine, which has {gpus_per_node}"
        return ""

    @property
    def overlaps(self) -> bool:
        """Return whether generation and training run at the same time."""
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

        Generation runs ahead only as far as needed (`buffer.ahead`): a sample's age is its generation time plus half a step of
        waiting for its batch, and at least one version.
        """
        bound = float(self.question.max_staleness) if self.overlaps else 0.0
        sample_s = self.question.response_tokens * engine_speed(self.question, self.tensor_parallel).step_s
        return min(bound, max(1.0, sample_s / self.step_s + 0.5))

    @property
    def dollars_per_step(self) -> float:
        """Return the cost of one step at the device's usual price."""
        cluster = self.question.cluster
        return cluster.num_gpus * cluster.accelerator.dollars_per_hour * self.step_s / 3600


def plan(question: Question) -> Plan:
    """Return the best plan for the question's hardware: the fastest of the plans that fit, if any fits.

    Raises:
        ConfigError: The GPUs cannot be divided as asked.
    """
    total, chosen = question.cluster.num_gpus, question.num_generation_gpus
    most = min(total, question.cluster.gpus_per_node)
    plans = []
    usual = [size for power in range(most.bit_length()) if question.model.heads % (size := 2**power) == 0]
    for size in [question.tensor_parallel] if question.tensor_parallel else usual:
        if question.placement == "disaggregated":
            splits = [chosen] if chosen else range(size, total, size)
            plans += [_plan_with(question, size, here, total - here) for here in splits if size <= here < total]
        elif total % size == 0:
            plans.append(_plan_with(question, size, total, total))
    if not plans:
        if total > 1 and (question.tensor_parallel or chosen):
            fields = f"tensor_parallel = {question.tensor_parallel or 'as fits'} and num_generation_gpus = {chosen or 'as fits'}"
            wants = "some must be left to train" if question.placement == "disaggregated" else "all must be in whole engines"
            raise ConfigError(f"{total} GPUs cannot be divided with {fields}: {wants}; change them, or set them to 0")
        raise ConfigError(f"{question.placement} needs at least 2 GPUs, one to generate and one to train; got {total}")
    return min(plans, key=lambda made: (made.overflow_bytes, bool(made.why_not_run), made.step_s, made.tensor_parallel))


def advice(made: Plan) -> list[str]:
    """Return what makes the plan fit: single changes, else pairs or triples of them; then the fewest GPUs without a change.

    Plans that no run can use are left out if there are others.
    """
    question, lines, usable = made.question, list[str](), list[str]()
    if made.fits:
        return lines
    changes = [(text, fields) for text, fields_of in _CHANGES if (fields := fields_of(question))]
    for size in (1, 2, 3):
        for combination in itertools.combinations(changes, size):
            merged = {name: value for _, fields in combination for name, value in fields.items()}
            is_apart = len(merged) == sum(len(fields) for _, fields in combination)
            if len(lines) < MAX_ADVICE and is_apart and (other := _fitting(question, **merged)):
                lines.append(" and ".join(text for text, _ in combination))
                usable += [] if other.why_not_run else lines[-1:]
        if lines:
            break
    count = question.cluster.num_gpus * 2
    while count <= MAX_GPUS_SEARCHED:
        cluster = dataclasses.replace(question.cluster, num_gpus=count)
        if other := _fitting(question, cluster=cluster, num_generation_gpus=0):
            lines.append(f"{count} GPUs of this kind instead of {question.cluster.num_gpus}")
            usable += [] if other.why_not_run else lines[-1:]
            break
        count *= 2
    return usable or lines or ["no three changes are enough: take larger devices or more of them"]


def _plan_with(question: Question, tensor_parallel: int, num_generation: int, num_training: int) -> Plan:
    memory = gpu_memory(question, tensor_parallel, num_training)
    generating_s = generation_s(question, tensor_parallel, num_generation)
    training = training_s(question, num_training)
    if question.placement in {"colocated", "hybrid"}:
        moved_bytes = sum(size for name, size in memory[0].host.items() if name.startswith("offloaded"))
        training += 2 * moved_bytes / (question.cluster.accelerator.host_bytes_per_s * LINK_SHARE)  # there and back
    if question.placement == "async_hybrid":
        # Both share the devices' compute and memory bandwidth: each runs as fast as if it had its share of the time.
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


def _fitting(question: Question, **changes: Any) -> Plan | None:  # noqa: ANN401 - of the fields' types
    try:
        made = plan(dataclasses.replace(question, **changes))
    except ConfigError:
        return None
    return made if made.fits else None


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
"""Possible changes, cheapest first: a description, and the fields to set (none if the question has the change already)."""


class EngineSpeed(NamedTuple):
    """One engine of `tensor_parallel` GPUs at the batch its cache allows."""

    batch: int
    step_s: float
    """Seconds for one token of every sequence."""


def engine_speed(question: Question, tensor_parallel: int, most_sequences: float = MAX_SEQUENCES) -> EngineSpeed:
    """Return the speed of one engine.

    Args:
        question: The run.
        tensor_parallel: GPUs of the engine.
        most_sequences: Maximum number of samples in flight for it.

    The time of a decode step is the longer of two: reading the weights its tokens use and every sequence's cache, or computing.
    """
    model, device = question.model, question.cluster.accelerator
    context = question.prompt_tokens + question.response_tokens / 2
    per_sequence = context * 2 * model.cached_values / tensor_parallel
    batch = max(1, int(min(cache_bytes(question, tensor_parallel) / per_sequence, MAX_SEQUENCES, most_sequences)))
    weights: float = model.active_parameters
    if model.num_experts:  # experts that no token of the batch selects are not read
        asked = model.experts_per_token / model.num_experts
        met = 1 - (1 - asked) ** batch
        weights += model.layers * model.num_experts * model.expert_parameters * (met - asked)
    read = weights * question.bytes_per_weight / tensor_parallel + batch * per_sequence
    read_s = read / (device.memory_bytes_per_s * DECODE_BANDWIDTH_SHARE)
    compute_s = batch * model.forward_flops(context) / tensor_parallel / (device.bf16_flops * COMPUTE_SHARE)
    collective_s = 2 * model.layers * COLLECTIVE_S if tensor_parallel > 1 else 0.0
    return EngineSpeed(batch, max(read_s, compute_s) + collective_s)


def generation_s(question: Question, tensor_parallel: int, num_gpus: int) -> float:
    """Return the seconds that `num_gpus` take to generate one step's samples, with one prefill per group."""
    engines = max(1, num_gpus // tensor_parallel)
    in_flight = question.samples_per_step * (question.max_staleness + 1) / engines
    speed = engine_speed(question, tensor_parallel, in_flight)
    decode_s = question.samples_per_step * question.response_tokens * speed.step_s / (speed.batch * engines)
    prompts = question.groups_per_step * question.prompt_tokens
    prefill_flops = prompts * question.model.forward_flops(question.prompt_tokens / 2)
    device = question.cluster.accelerator
    return decode_s + prefill_flops / (engines * tensor_parallel * device.bf16_flops * COMPUTE_SHARE)


def training_s(question: Question, num_gpus: int) -> float:
    """Return the seconds of one step: a forward, a backward of twice its cost, and a second forward with checkpointing.

    With LoRA the backward computes no gradients of the base: it costs one forward instead of two. A critic also computes its
    values before the step. The reference and reward models run a forward over the step's samples.
    """
    context = (question.prompt_tokens + question.response_tokens) / 2
    passes = 4.0 if question.gradient_checkpointing else 3.0
    num_forwards = passes - bool(question.lora_rank) + question.has_reference
    flops = num_forwards * question.model.forward_flops(context)
    if question.critic is not None:
        flops += (passes + 1) * question.critic.forward_flops(context)
    if question.reward_model is not None:
        flops += question.reward_model.forward_flops(context)
    return question.tokens_per_step * flops / (num_gpus * question.cluster.accelerator.bf16_flops * COMPUTE_SHARE)


def weight_sync_s(question: Question) -> float:
    """Return the seconds from publishing a version to its use in the engines.

    disaggregated: one sender's share of the network, all engines at once (broadcast). colocated: a read and a write in the
    device's own memory. hybrid: only the gather of tensor parallelism inside a machine.
    """
    device, size = question.cluster.accelerator, question.version_bytes
    if question.placement == "hybrid":
        return 0.0
    if question.placement in {"colocated", "async_hybrid"}:
        return 2 * size / (device.memory_bytes_per_s * DECODE_BANDWIDTH_SHARE)
    is_far = question.cluster.num_nodes > 1
    return size / ((device.network_bytes_per_s if is_far else device.link_bytes_per_s) * LINK_SHARE)
