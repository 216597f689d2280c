"""Bytes on one GPU, component by component and phase by phase. Formulas and sources: docs/planning.md.

Training state is divided over all training GPUs (FSDP2), an engine over its tensor-parallel group. Everything is in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.config.learner import LearnerConfig
from asyncrl.models.memory import ModelShape, forward_row, trained_parts, training_row
from asyncrl.plan.spec import Question
from asyncrl.schema.control import Phase

PHASES: tuple[Phase, ...] = ("rollout", "inference", "train")
Components = dict[str, float]

ENGINE_OVERHEAD_BYTES = 2.5e9
"""CUDA context, graphs and activations of an engine's forward; vLLM logs about this much for models up to 70B."""
CONTEXT_BYTES = 1.0e9
"""CUDA context and the allocator's slack of a training process."""
LOGPROB_CHUNK_TOKENS = 512
MIN_CACHED_SEQUENCES = 8
"""An engine whose cache holds fewer of the longest samples is not worth starting."""


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """What one GPU of a role holds in each phase."""

    role: str
    phases: Mapping[Phase, Components]
    host: Components = field(default_factory=dict)
    """What lies in the machine's memory, for each such GPU."""

    @property
    def peak_bytes(self) -> float:
        """Return the most that any phase needs, cache that grows into free room counted at its least."""
        return max((sum(parts.values()) for parts in self.phases.values()), default=0.0)


def training_state(question: Question, model: ModelShape, num_gpus: int, *, is_policy: bool) -> tuple[Components, Components]:
    """Return (on the GPU, in host memory) of a model that is trained: one GPU's share.

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
    """Return the activations of one row of `tokens_per_row` in forward and backward, the most of it at one time."""
    row = training_row(
        model, question.tokens_per_row, question.bytes_per_weight,
        checkpointing=question.gradient_checkpointing, chunk_tokens=LOGPROB_CHUNK_TOKENS,
    )  # fmt: skip
    return sum(row.values())


def engine_memory(question: Question, tensor_parallel: int) -> tuple[Components, float]:
    """Return an engine's components on one GPU, with the least useful cache, and the bytes left there for all of its cache."""
    model, device = question.model, question.cluster.accelerator
    weights = (model.parameters + question.lora_parameters) * question.bytes_per_weight / tensor_parallel
    least = MIN_CACHED_SEQUENCES * question.max_sequence_tokens * 2 * model.cached_values / tensor_parallel
    parts: Components = {"engine weights": weights, "engine overhead": ENGINE_OVERHEAD_BYTES, "KV cache (least)": least}
    return parts, device.memory_bytes * question.memory_share - weights - ENGINE_OVERHEAD_BYTES


def gpu_memory(question: Question, tensor_parallel: int, num_training_gpus: int) -> list[GPUMemory]:
    """Return what one GPU of each role holds, by the placement; reference and reward model are divided over the training GPUs."""
    trained: Components = {}
    host: Components = {}
    for name, model in (("policy", question.model), ("critic", question.critic)):
        if model is not None:
            on_gpu, in_host = training_state(question, model, num_training_gpus, is_policy=name == "policy")
            trained |= {f"{name} {part}": size for part, size in on_gpu.items()}
            host |= {f"{name} {part}": size for part, size in in_host.items()}
    engine, _ = engine_memory(question, tensor_parallel)
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
            return [GPUMemory("all", {"train": trained | frozen | step | engine}, host)]
