"""Scenarios as a user types them, one field over several values, and a table of what came of each.

Called by the command line (`asyncrl simulate`) and experiments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asyncrl.plan.fields import convert_field, split_assignments
from asyncrl.plan.scenario import Outcome, Scenario
from asyncrl.plan.simulate import simulate

COLUMNS = {
    "steps_per_s": "steps/s",
    "generated_tokens_per_s": "tokens/s",
    "mean_staleness": "staleness",
    "learner_idle": "learner idle",
    "slots_used": "slots used",
    "dollars_per_step": "$/step",
}


def scenario_of(base: Scenario, overrides: Sequence[str]) -> Scenario:
    """Return the scenario with `field=value` laid over it.

    Raises:
        ConfigError: No such field, or a value that it cannot take.
    """
    return dataclasses.replace(
        base, **{name: convert_field(Scenario, name, value) for name, value in split_assignments(overrides)}
    )


def sweep(base: Scenario, over: str) -> list[tuple[str, Outcome]]:
    """Return what comes of `field=a,b,c`, value by value; an empty `over`: of the scenario itself.

    Raises:
        ConfigError: As `scenario_of`.
    """
    if not over:
        return [("", simulate(base))]
    ((name, values),) = split_assignments([over])
    return [(value, simulate(scenario_of(base, [f"{name}={value}"]))) for value in values.split(",")]


def table(rows: Sequence[tuple[str, Outcome]], over: str) -> str:
    """Return the rows as text, one scenario a line."""
    name = over.partition("=")[0]
    lines = [f"{name:>18}" + "".join(f"{title:>14}" for title in COLUMNS.values())]
    lines += [f"{value:>18}" + "".join(f"{getattr(made, column):14,.4g}" for column in COLUMNS) for value, made in rows]
    return "\n".join(lines)
