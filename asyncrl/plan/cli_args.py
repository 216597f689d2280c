"""`FIELD=VALUE` as a user types it, into a Question of the planner or a Scenario of the simulator, and sweeps over one field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.scenario import Distribution, Outcome, Scenario, parse_distribution
from asyncrl.plan.spec import Algorithm, Placement, Question, find_model, parse_cluster

OF_CLUSTER = {"gpus_per_node": int, "dollars_per_hour": float}
"""Overrides that are no fields of Question."""


def ask(
    model: str,
    hardware: str,
    *,
    algorithm: Algorithm = "grpo",
    placement: Placement = "disaggregated",
    critic: str = "",
    reward_model: str = "",
    overrides: Sequence[str] = (),
) -> Question:
    """Return the question; models as `find_model` takes them, hardware as `parse_cluster`.

    PPO has a critic like the policy unless another is named, and a reference; DPO has a reference. Overrides are `field=value`
    of Question, `gpus_per_node=value` or `dollars_per_hour=value`.

    Raises:
        ConfigError: Something is not what it should be; the message says what is allowed.
    """
    values = typed_fields(Question, overrides, OF_CLUSTER)
    cluster = parse_cluster(hardware, values.pop("gpus_per_node", 8))
    price = values.pop("dollars_per_hour", cluster.accelerator.dollars_per_hour)
    policy = find_model(model)
    return Question(
        model=policy,
        cluster=dataclasses.replace(cluster, accelerator=dataclasses.replace(cluster.accelerator, dollars_per_hour=price)),
        critic=(find_model(critic) if critic else policy) if algorithm == "ppo" else None,
        reward_model=find_model(reward_model) if reward_model else None,
        **({"has_reference": algorithm != "grpo", "algorithm": algorithm, "placement": placement} | values),
    )


def typed_fields(kind: type, texts: Sequence[str], others: Mapping[str, type] = {}) -> dict[str, Any]:
    """Return `field=value` each as the type that the dataclass's field has.

    Args:
        kind: The dataclass; fields that no text can be (models, clusters) are not among its own.
        texts: What was typed.
        others: Names that are allowed beside its fields.

    Raises:
        ConfigError: A text is not of that form, there is no such field, or the value does not fit it.
    """
    own = get_type_hints(kind).items()
    hints = {name: hint for name, hint in own if hint in {int, float, bool, Distribution} or get_origin(hint) is Literal}
    hints |= dict(others)
    values: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not value:
            raise ConfigError(f"--set takes FIELD=VALUE, got {text!r}")
        if name not in hints:
            raise ConfigError(f"there is no field {name!r}; there are {', '.join(hints)}")
        wanted = hints[name]
        try:
            values[name] = parse_distribution(value) if wanted is Distribution else msgspec.convert(value, wanted, strict=False)
        except msgspec.ValidationError as error:
            allowed = " or ".join(map(str, get_args(wanted))) or wanted.__name__
            raise ConfigError(f"{name} takes {allowed}, got {value!r}") from error
        if isinstance(values[name], float) and not math.isfinite(values[name]):
            raise ConfigError(f"{name} takes a finite number, got {value!r}")
    return values


def scenario_of(base: Scenario, overrides: Sequence[str]) -> Scenario:
    """Return the scenario with `field=value` laid over it.

    Raises:
        ConfigError: No such field, or a value that it cannot take.
    """
    return dataclasses.replace(base, **typed_fields(Scenario, overrides))


def sweep(base: Scenario, over: str, on_step: Callable[[str, int, int], None] | None = None) -> list[tuple[str, Outcome]]:
    """Return what comes of `field=a,b,c`, value by value; an empty `over`: of the scenario itself.

    Args:
        base: What is simulated.
        over: The field and its values.
        on_step: Told the value, how many steps are done, and of how many.

    Raises:
        ConfigError: As `scenario_of`.
    """
    name, _, values = over.partition("=")
    scenarios = {value: scenario_of(base, [f"{name}={value}"] if over else []) for value in values.split(",")}
    return [(value, simulate(made, on_step and partial(on_step, value))) for value, made in scenarios.items()]
