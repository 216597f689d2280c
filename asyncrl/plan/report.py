"""A plan and a sweep as text, table and picture for people, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.plan.planner import PHASES, Plan, advice
from asyncrl.plan.simulator.scenario import Outcome
from asyncrl.plan.spec import GIB

NAME_WIDTH = 38


def plan_values(made: Plan) -> dict[str, Any]:
    """Return the whole plan as plain values with units in their names."""
    names = (
        "fits", "why_not_run", "tensor_parallel", "generation_s", "training_s", "step_s", "generated_tokens_per_s",
        "trained_tokens_per_s", "mean_staleness", "dollars_per_step",
    )  # fmt: skip
    return {name: getattr(made, name) for name in names} | {
        "model": made.question.model.name,
        "parameters": made.question.model.parameters,
        "placement": made.question.placement,
        "usable_gib": made.usable_bytes / GIB,
        "memory_gib": {role.role: {phase: _gib(parts) for phase, parts in role.phases.items()} for role in made.memory},
        "host_gib_per_gpu": {role.role: _gib(role.host) for role in made.memory},
        "peak_gib": {role.role: role.peak_bytes / GIB for role in made.memory},
        "generation_gpus": made.num_generation_gpus,
        "training_gpus": made.num_training_gpus,
        "weight_sync_s": made.sync_s,
        "version_bytes": made.question.version_bytes,
        "advice": advice(made),
    }


def _gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def plan_text(made: Plan) -> str:
    """Return the plan as text for people."""
    question, cluster, apart = made.question, made.question.cluster, made.question.placement == "disaggregated"
    lines = [
        f"{question.model.name} ({question.model.parameters / 1e9:.2f} B parameters), {question.algorithm}, "
        f"{question.placement}, {cluster.num_gpus} x "
        f"{cluster.accelerator.name} on {cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)}",
        "",
    ]
    for role in made.memory:
        phases = [phase for phase in PHASES if phase in role.phases]
        title = f"GiB on a GPU ({role.role})" if role.role != "all" else "GiB on every GPU"
        lines.append(f"{title:{NAME_WIDTH}}" + "".join(f"{phase:>11}" for phase in phases))
        for name in dict.fromkeys(name for phase in phases for name in role.phases[phase]):
            sizes = (role.phases[phase].get(name) for phase in phases)
            lines.append(
                f"{name:{NAME_WIDTH}}" + "".join(f"{'':>11}" if size is None else f"{size / GIB:11.1f}" for size in sizes)
            )
        sums = "".join(f"{sum(role.phases[phase].values()) / GIB:11.1f}" for phase in phases)
        lines.append(f"{'together':{NAME_WIDTH}}{sums}   of {made.usable_bytes / GIB:.1f}")
        if role.host:
            lines.append(f"{'in host memory, for each GPU':{NAME_WIDTH}}{sum(role.host.values()) / GIB:11.1f}")
        lines.append("")
    lines += ["fits"] if made.fits else ["DOES NOT FIT. It would with:", *(f"  - {line}" for line in advice(made))]
    lines += [made.why_not_run] if made.why_not_run else []
    generate = f"{made.num_generation_gpus if apart else f'all {made.num_training_gpus}'} GPUs generate"
    train = f"{made.num_training_gpus} train" if apart else "and train"
    way = "side by side" if made.overlaps else "one after the other"
    return "\n".join([
        *lines,
        "",
        f"{generate} (engines of {made.tensor_parallel}), {train}",
        f"generation {made.generation_s:.1f} s a step ({made.generated_tokens_per_s:,.0f} tokens/s), "
        f"training {made.training_s:.1f} s ({made.trained_tokens_per_s:,.0f} tokens/s), {way}: {made.step_s:.1f} s a step",
        f"weights: {question.version_bytes / GIB:.1f} GiB a version, {made.sync_s:.2f} s from publish to live",
        f"staleness: about {made.mean_staleness:.1f} of at most {question.max_staleness} versions",
        f"about ${made.dollars_per_step:.2f} a step at ${cluster.accelerator.dollars_per_hour:.2f} a GPU hour",
    ])


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


def plot(rows: Sequence[tuple[str, Outcome]], over: str, path: Path) -> None:
    """Draw steps/s, staleness and utilisation of learner and slots over the values of a sweep.

    Raises:
        ConfigError: The sweep has fewer than two values.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and only a picture needs it

    if len(rows) < 2:
        raise ConfigError("a picture needs a sweep over at least two values: --sweep FIELD=A,B,C")
    shown = ("steps_per_s", "mean_staleness", "learner_idle", "slots_used")
    figure = Figure(figsize=(4 * len(shown), 3.2), layout="constrained")
    for axis, column in zip(figure.subplots(1, len(shown)), shown, strict=True):
        axis.plot([value for value, _ in rows], [getattr(made, column) for _, made in rows], marker="o", color="#20639b", lw=1.8)
        axis.set_xlabel(over.partition("=")[0])
        axis.set_title(COLUMNS[column])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
