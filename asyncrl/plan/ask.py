"""From what a user types to a Question. Called by the command line (`asyncrl plan`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asyncrl.plan.fields import convert_field, split_assignments
from asyncrl.plan.hardware import Accelerator, Cluster, parse_cluster
from asyncrl.plan.models import find_model
from asyncrl.plan.question import Algorithm, Placement, Question

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
