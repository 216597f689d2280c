"""A plan and a sweep in words and columns, for people; as plain values, for programs. With the arithmetic people do on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.plan.memory import PHASES, GPUMemory
from asyncrl.plan.planner import Plan, advice
from asyncrl.plan.simulator.scenario import Outcome
from asyncrl.plan.spec import GIB, Question

NAME_WIDTH = 38


def plan_values(made: Plan) -> dict[str, Any]:
    """Return everything the plan says, in plain values with units in their names."""
    return {
        "model": made.question.model.name,
        "parameters": made.question.model.parameters,
        "placement": made.question.placement,
        "fits": made.fits,
        "usable_gib": made.usable_bytes / GIB,
        "memory_gib": {
            role.role: {phase: {name: size / GIB for name, size in parts.items()} for phase, parts in role.phases.items()}
            for role in made.memory
        },
        "host_gib_per_gpu": {role.role: {name: size / GIB for name, size in role.host.items()} for role in made.memory},
        "peak_gib": {role.role: role.peak_bytes / GIB for role in made.memory},
        "tensor_parallel": made.tensor_parallel,
        "generation_gpus": made.num_generation_gpus,
        "training_gpus": made.num_training_gpus,
        "generation_s": made.generation_s,
        "training_s": made.training_s,
        "step_s": made.step_s,
        "generated_tokens_per_s": made.generated_tokens_per_s,
        "trained_tokens_per_s": made.trained_tokens_per_s,
        "weight_sync_s": made.sync_s,
        "version_bytes": made.question.version_bytes,
        "mean_staleness": made.mean_staleness,
        "dollars_per_step": made.dollars_per_step,
        "advice": advice(made),
        "textbook_gb": textbook_gb(made.question),
    }


def plan_text(made: Plan) -> str:
    """Return the plan as a person reads it."""
    question = made.question
    cluster = question.cluster
    lines = [
        f"{question.model.name} ({question.model.parameters / 1e9:.2f} B parameters), {question.algorithm}, "
        f"{question.placement}, "
        f"{cluster.num_gpus} x {cluster.accelerator.name} on {cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)}",
        "",
    ]
    for role in made.memory:
        lines += [*_role_table(role, made), ""]
    lines += [*_verdict(made), "", *_speeds(made)]
    return "\n".join(lines)


def textbook_text(made: Plan) -> str:
    """Return the arithmetic on paper beside the device's memory."""
    parts = textbook_gb(made.question)
    total, memory = sum(parts.values()), made.question.cluster.accelerator.memory_bytes / 1e9
    models = {name: size for name, size in parts.items() if name in WHOLE_MODELS}
    rows = [f"{name:{NAME_WIDTH}}{size:10.1f} GB" for name, size in {**models, **parts}.items()]
    rows.insert(len(models), f"{f'models alone ({len(models)})':{NAME_WIDTH}}{sum(models.values()):10.1f} GB")
    verdict = "fits" if total <= memory else "does not fit"
    return "\n".join([*rows, f"{'together':{NAME_WIDTH}}{total:10.1f} GB of {memory:.0f}: {verdict} on one, by the textbook"])


def _role_table(role: GPUMemory, made: Plan) -> list[str]:
    phases = [phase for phase in PHASES if phase in role.phases]
    names = list(dict.fromkeys(name for phase in phases for name in role.phases[phase]))
    title = f"GiB on a GPU ({role.role})" if role.role != "all" else "GiB on every GPU"
    lines = [f"{title:{NAME_WIDTH}}" + "".join(f"{phase:>11}" for phase in phases)]
    for name in names:
        cells = (role.phases[phase].get(name) for phase in phases)
        lines.append(f"{name:{NAME_WIDTH}}" + "".join(f"{'':>11}" if size is None else f"{size / GIB:11.1f}" for size in cells))
    sums = "".join(f"{sum(role.phases[phase].values()) / GIB:11.1f}" for phase in phases)
    lines.append(f"{'together':{NAME_WIDTH}}{sums}   of {made.usable_bytes / GIB:.1f}")
    if role.host:
        lines.append(f"{'in host memory, for each GPU':{NAME_WIDTH}}{sum(role.host.values()) / GIB:11.1f}")
    return lines


def _verdict(made: Plan) -> list[str]:
    if made.fits:
        return ["fits"]
    return ["DOES NOT FIT. It would with:", *(f"  - {line}" for line in advice(made))]


def _speeds(made: Plan) -> list[str]:
    question = made.question
    split = f"{made.num_generation_gpus} GPUs generate (engines of {made.tensor_parallel}), {made.num_training_gpus} train"
    if question.placement != "disaggregated":
        split = f"all {made.num_training_gpus} GPUs generate (engines of {made.tensor_parallel}) and train"
    way = "side by side" if made.overlaps else "one after the other"
    return [
        split,
        f"generation {made.generation_s:.1f} s a step ({made.generated_tokens_per_s:,.0f} tokens/s), "
        f"training {made.training_s:.1f} s ({made.trained_tokens_per_s:,.0f} tokens/s), {way}: {made.step_s:.1f} s a step",
        f"weights: {question.version_bytes / GIB:.1f} GiB a version, {made.sync_s:.2f} s from publish to live",
        f"staleness: about {made.mean_staleness:.1f} of at most {question.max_staleness} versions",
        f"about ${made.dollars_per_step:.2f} a step at ${question.cluster.accelerator.dollars_per_hour:.2f} a GPU hour",
    ]


GB = 1e9
ACTIVATIONS_GB = 8.0
WHOLE_MODELS = ("policy", "reference", "reward model", "value model")
"""Parts that are a model's weights."""


def textbook_gb(question: Question) -> dict[str, float]:
    """Return decimal gigabytes of each part: bf16 models, 4 bytes of optimizer a trained parameter (8 bit: 2), 8 activations.

    Example:
        >>> from asyncrl.plan.hardware import parse_cluster
        >>> from asyncrl.plan.models import find_model
        >>> seven = find_model("7B")
        >>> ppo = Question(model=seven, cluster=parse_cluster("H100"), placement="colocated", algorithm="ppo",
        ...                critic=seven, reward_model=seven, has_reference=True)
        >>> round(sum(textbook_gb(ppo).values()))
        92
    """
    model = 2 * question.model.parameters / GB
    trained = (question.lora_parameters or question.model.parameters) / GB
    parts = {"policy": model, "optimizer": (4 if question.optimizer == "adamw" else 2) * trained, "activations": ACTIVATIONS_GB}
    if question.has_reference and not question.lora_rank:
        parts["reference"] = model
    if question.reward_model is not None:
        parts["reward model"] = 2 * question.reward_model.parameters / GB
    if question.critic is not None:
        parts["value model"] = 2 * question.critic.parameters / GB
    if question.lora_rank:
        parts["adapters"] = 2 * question.lora_parameters / GB
    return parts


COLUMNS = {
    "steps_per_s": "steps/s",
    "generated_tokens_per_s": "tokens/s",
    "mean_staleness": "staleness",
    "learner_idle": "learner idle",
    "slots_used": "slots used",
    "dollars_per_step": "$/step",
}


def table(rows: Sequence[tuple[str, Outcome]], over: str) -> str:
    """Return the rows as text, one scenario a line."""
    name = over.partition("=")[0]
    lines = [f"{name:>18}" + "".join(f"{title:>14}" for title in COLUMNS.values())]
    lines += [f"{value:>18}" + "".join(f"{getattr(made, column):14,.4g}" for column in COLUMNS) for value, made in rows]
    return "\n".join(lines)
