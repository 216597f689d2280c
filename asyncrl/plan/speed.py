"""How fast: tokens a second of engines, seconds of a training step and of a weight hand-over. First-order; docs/planning.md."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.plan.memory import engine_memory
from asyncrl.plan.spec import Question

DECODE_BANDWIDTH_SHARE = 0.6
"""Of the memory's speed that decoding reaches (vLLM on H100, published roofline studies: 0.5 to 0.75)."""
COMPUTE_SHARE = 0.4
"""Of the peak operations that training and prefill reach (model-FLOPs utilisation of FSDP on H100: 0.35 to 0.5)."""
LINK_SHARE = 0.8
COLLECTIVE_S = 12e-6
"""One all-reduce of a decode step inside a machine: latency, not bandwidth."""
MAX_SEQUENCES = 256
"""Most that one engine decodes at once (vLLM's `max_num_seqs`)."""


class EngineSpeed(NamedTuple):
    """One engine of `tensor_parallel` GPUs at the batch its cache allows."""

    batch: int
    step_s: float
    """One token of every sequence."""


def engine_speed(question: Question, tensor_parallel: int, most_sequences: float = MAX_SEQUENCES) -> EngineSpeed:
    """Return the speed of one engine.

    Args:
        question: The run.
        tensor_parallel: GPUs of the engine.
        most_sequences: Samples in flight there are for it.

    A decode step reads the weights that its tokens meet and the cache of every sequence, or computes, whichever is longer.
    """
    model, device = question.model, question.cluster.accelerator
    _, cache_bytes = engine_memory(question, tensor_parallel)
    context = question.prompt_tokens + question.response_tokens / 2
    per_sequence = context * 2 * model.cached_values / tensor_parallel
    batch = max(1, int(min(cache_bytes / per_sequence, MAX_SEQUENCES, most_sequences)))
    weights: float = model.active_parameters
    if model.num_experts:  # those that no token of the batch meets are not read
        asked = model.experts_per_token / model.num_experts
        met = 1 - (1 - asked) ** batch
        weights += model.layers * model.num_experts * model.expert_parameters * (met - asked)
    read = weights * question.bytes_per_weight / tensor_parallel + batch * per_sequence
    read_s = read / (device.memory_bytes_per_s * DECODE_BANDWIDTH_SHARE)
    compute_s = batch * model.forward_flops(context) / tensor_parallel / (device.bf16_flops * COMPUTE_SHARE)
    collective_s = 2 * model.layers * COLLECTIVE_S if tensor_parallel > 1 else 0.0
    return EngineSpeed(batch, max(read_s, compute_s) + collective_s)


def generation_s(question: Question, tensor_parallel: int, num_gpus: int) -> float:
    """Return the seconds in which `num_gpus` generate one step's samples, prompts prefilled once a group."""
    engines = max(1, num_gpus // tensor_parallel)
    in_flight = question.samples_per_step * (question.max_staleness + 1) / engines
    speed = engine_speed(question, tensor_parallel, in_flight)
    decode_s = question.samples_per_step * question.response_tokens * speed.step_s / (speed.batch * engines)
    prompts = question.groups_per_step * question.prompt_tokens
    prefill_flops = prompts * question.model.forward_flops(question.prompt_tokens / 2)
    device = question.cluster.accelerator
    return decode_s + prefill_flops / (engines * tensor_parallel * device.bf16_flops * COMPUTE_SHARE)


def training_s(question: Question, num_gpus: int) -> float:
    """Return the seconds of one training step: forward and twice that backward, again forward with checkpointing.

    Under LoRA the backward does not compute the base's gradients: once a forward instead of twice. A critic is also asked for its
    values before the step.
    """
    context = (question.prompt_tokens + question.response_tokens) / 2
    passes = 4.0 if question.gradient_checkpointing else 3.0
    flops = (passes - bool(question.lora_rank)) * question.model.forward_flops(context)
    if question.critic is not None:
        flops += (passes + 1) * question.critic.forward_flops(context)
    return question.tokens_per_step * flops / _compute(question, num_gpus)


def inference_s(question: Question, num_gpus: int) -> float:
    """Return the seconds of reference and reward model's forwards over one step's samples."""
    context = (question.prompt_tokens + question.response_tokens) / 2
    models = [question.model] if question.has_reference else []
    models += [question.reward_model] if question.reward_model is not None else []
    return question.tokens_per_step * sum(model.forward_flops(context) for model in models) / _compute(question, num_gpus)


def weight_sync_s(question: Question) -> float:
    """Return the seconds from publish to live.

    disaggregated: one sender's network share, all engines at once (broadcast). colocated: the device's own memory, read and
    written. hybrid: nothing moves but what tensor parallelism gathers inside a machine.
    """
    device, size = question.cluster.accelerator, question.version_bytes
    if question.placement == "hybrid":
        return 0.0
    if question.placement in {"colocated", "async_hybrid"}:
        return 2 * size / (device.memory_bytes_per_s * DECODE_BANDWIDTH_SHARE)
    is_far = question.cluster.num_nodes > 1
    return size / ((device.network_bytes_per_s if is_far else device.link_bytes_per_s) * LINK_SHARE)


def switch_s(question: Question, moved_bytes: float) -> float:
    """Return the seconds that moving `moved_bytes` of one GPU to host memory and back takes."""
    return 2 * moved_bytes / (question.cluster.accelerator.host_bytes_per_s * LINK_SHARE)


def _compute(question: Question, num_gpus: int) -> float:
    return num_gpus * question.cluster.accelerator.bf16_flops * COMPUTE_SHARE
