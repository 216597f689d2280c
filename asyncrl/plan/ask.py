"""From what a user types to a Question. Called by the command line (`asyncrl plan`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.plan.hardware import parse_cluster
from asyncrl.plan.models import find_model
from asyncrl.plan.question import Algorithm, Placement, Question

NAMED_BY_OPTIONS = frozenset({"model", "cluster", "critic", "reward_model", "algorithm", "placement"})
OF_THE_CLUSTER: dict[str, type] = {"gpus_per_node": int, "dollars_per_hour": float}


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
    of Question or Cluster, or `dollars_per_hour=value`.

    Raises:
        ConfigError: Something is not what it should be; the message says what is allowed.
    """
    values = _overrides(overrides)
    cluster = parse_cluster(hardware, values.pop("gpus_per_node", 8))
    price = values.pop("dollars_per_hour", cluster.accelerator.dollars_per_hour)
    cluster = dataclasses.replace(cluster, accelerator=dataclasses.replace(cluster.accelerator, dollars_per_hour=price))
    policy = find_model(model)
    value_model = find_model(critic) if critic else policy
    return Question(
        model=policy,
        cluster=cluster,
        algorithm=algorithm,
        placement=placement,
        critic=value_model if algorithm == "ppo" else None,
        reward_model=find_model(reward_model) if reward_model else None,
        **({"has_reference": algorithm != "grpo"} | values),
    )


def _overrides(overrides: Sequence[str]) -> dict[str, Any]:
    fields = [item.name for item in dataclasses.fields(Question) if item.name not in NAMED_BY_OPTIONS] + list(OF_THE_CLUSTER)
    values = {}
    for text in overrides:
        name, _, value = text.partition("=")
        if name not in fields or not value:
            raise ConfigError(f"--set takes FIELD=VALUE with one of {', '.join(fields)}; got {text!r}")
        values[name] = _converted(name, value)
    return values


def _converted(name: str, value: str) -> object:
    allowed = None if name in OF_THE_CLUSTER else _annotation(name)
    wanted = OF_THE_CLUSTER.get(name) or _PLAIN_TYPES.get(type(allowed), str)
    try:
        converted: object = msgspec.convert(value, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set {name} takes {wanted.__name__}, got {value!r}") from error
    if isinstance(allowed, msgspec.inspect.LiteralType) and converted not in allowed.values:
        raise ConfigError(f"--set {name} takes one of {', '.join(map(str, allowed.values))}; got {value!r}")
    return converted


def _annotation(name: str) -> msgspec.inspect.Type:
    described = msgspec.inspect.type_info(Question)
    assert isinstance(described, msgspec.inspect.DataclassType)
    return next(item.type for item in described.fields if item.name == name)


_PLAIN_TYPES: dict[type, type] = {
    msgspec.inspect.IntType: int,
    msgspec.inspect.FloatType: float,
    msgspec.inspect.BoolType: bool,
}
