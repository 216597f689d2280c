"""`FIELD=VALUE` as a user types it, into a Question of the planner or a Scenario of the simulator, and sweeps over one field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.plan.simulator.engine import simulate
from asyncrl.plan.simulator.scenario import Distribution, Outcome, Scenario, parse_distribution
from asyncrl.plan.spec import Accelerator, Algorithm, Cluster, Placement, Question, find_model, parse_cluster

OF_OTHERS: dict[str, type] = {"gpus_per_node": Cluster, "dollars_per_hour": Accelerator}
"""Overrides that are no fields of Question, and whose they are."""


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
    pairs = split_assignments(overrides)
    values = {name: convert_field(OF_OTHERS.get(name, Question), name, value) for name, value in pairs}
    cluster = parse_cluster(hardware, values.pop("gpus_per_node", 8))
    price = values.pop("dollars_per_hour", cluster.accelerator.dollars_per_hour)
    cluster = dataclasses.replace(cluster, accelerator=dataclasses.replace(cluster.accelerator, dollars_per_hour=price))
    policy = find_model(model)
    value_model = find_model(critic) if critic else policy
    return Question(
        model=policy,
        cluster=cluster,
        critic=value_model if algorithm == "ppo" else None,
        reward_model=find_model(reward_model) if reward_model else None,
        **({"has_reference": algorithm != "grpo", "algorithm": algorithm, "placement": placement} | values),
    )


_PLAIN_TYPES: dict[type, type] = {
    msgspec.inspect.IntType: int,
    msgspec.inspect.FloatType: float,
    msgspec.inspect.BoolType: bool,
}


def split_assignments(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (field, value) of each.

    Raises:
        ConfigError: One is not of that form.
    """
    pairs = [tuple(text.split("=", 1)) for text in texts]
    for text, pair in zip(texts, pairs, strict=True):
        if len(pair) != 2 or not pair[1]:
            raise ConfigError(f"--set takes FIELD=VALUE, got {text!r}")
    return [(pair[0], pair[1]) for pair in pairs]


def convert_field(kind: type, name: str, value: str) -> Any:  # noqa: ANN401 - whatever the field's type is
    """Return `value` as the type that the dataclass's field has.

    Raises:
        ConfigError: There is no such field that can be typed, or the value does not fit it.
    """
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.DataclassType)
    fields = {item.name: item.type for item in described.fields if _can_be_typed(item.type)}
    if name not in fields:
        raise ConfigError(f"there is no field {name!r}; there are {', '.join(fields)}")
    allowed = fields[name]
    if isinstance(allowed, msgspec.inspect.DataclassType):
        return parse_distribution(value)
    wanted = _PLAIN_TYPES.get(type(allowed), str)
    try:
        converted: object = msgspec.convert(value, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} takes {wanted.__name__}, got {value!r}") from error
    if isinstance(allowed, msgspec.inspect.LiteralType) and converted not in allowed.values:
        raise ConfigError(f"{name} takes one of {', '.join(map(str, allowed.values))}; got {value!r}")
    return converted


def _can_be_typed(allowed: msgspec.inspect.Type) -> bool:
    if isinstance(allowed, msgspec.inspect.DataclassType):
        return allowed.cls is Distribution
    return isinstance(allowed, msgspec.inspect.LiteralType) or type(allowed) in _PLAIN_TYPES


def scenario_of(base: Scenario, overrides: Sequence[str]) -> Scenario:
    """Return the scenario with `field=value` laid over it.

    Raises:
        ConfigError: No such field, or a value that it cannot take.
    """
    return dataclasses.replace(
        base, **{name: convert_field(Scenario, name, value) for name, value in split_assignments(overrides)}
    )


def sweep(base: Scenario, over: str, on_step: Callable[[str, int, int], None] | None = None) -> list[tuple[str, Outcome]]:
    """Return what comes of `field=a,b,c`, value by value; an empty `over`: of the scenario itself.

    Args:
        base: What is simulated.
        over: The field and its values.
        on_step: Told the value, how many steps are done, and of how many.

    Raises:
        ConfigError: As `scenario_of`.
    """
    ((name, values),) = split_assignments([over]) if over else [("", "")]
    scenarios = [(value, scenario_of(base, [f"{name}={value}"] if name else [])) for value in values.split(",")]

    def watched(value: str, scenario: Scenario) -> Outcome:
        return simulate(scenario, None if on_step is None else lambda step: on_step(value, step, scenario.num_steps))

    return [(value, watched(value, scenario)) for value, scenario in scenarios]
