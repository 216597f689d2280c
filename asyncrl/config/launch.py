"""Where the processes of a run come from: this machine, or a Ray cluster; and how many generators there may be.

What follows from these fields, and what does not go with others, is in launch_rules.py.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.config.fields import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, _Stage, _Variant


class ElasticConfig(_Stage, frozen=True):
    """Generators come and go between two bounds, by how much the learner waits and how full the engines are."""

    min_generators: PositiveInt = 1
    max_generators: PositiveInt = 4
    decide_every_s: PositiveFloat = 15.0
    """What was measured is averaged over so long."""
    patience: PositiveInt = 2
    """So many verdicts in a row must agree before the number changes."""
    learner_idle_above: Fraction = 0.1
    """A learner that waits for samples for more than this share of the time wants more generators."""
    slots_used_below: Fraction = 0.6
    """Engines that use less of their slots than this, while the learner is busy, are too many."""


class ProcessNeeds(_Stage, frozen=True):
    """What one process asks of the node it is placed on."""

    num_cpus: NonNegativeFloat = 0.25
    """Ray counts places, it limits nobody: by default four processes go on a core."""
    num_gpus: NonNegativeFloat | None = None
    """None: as many as its devices say, learner.ranks on `cuda`, say."""
    memory_gib: NonNegativeFloat = 0.0
    """Host memory that Ray reserves; 0: none is."""
    resources: dict[str, NonNegativeFloat] = {}
    """Of the cluster's own names, `{ accelerator_type:H100 = 0.001 }`."""
    labels: dict[str, str] = {}
    """Which nodes will do: `{ "asyncrl/role" = "rewards" }`, or Ray's `in(a,b)` and `!a`, against `ray start --labels`."""


class RayEnvironment(_Stage, frozen=True):
    """What Ray makes on every node before a process starts there; left out, what `ray job submit` was given."""

    working_dir: str = ""
    py_modules: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    env_vars: dict[str, str] = {}


class LocalLaunch(_Variant, frozen=True, tag="local"):
    """Processes of this machine."""

    elastic: ElasticConfig | None = None
    """None: generate.num_workers generators, always."""


class RayLaunch(_Variant, frozen=True, tag="ray"):
    """One Ray actor for each process, in placement groups, on any number of nodes. Extra `ray`; see docs/scale.md."""

    address: str = "auto"
    """Of a running cluster: `auto` finds the one this machine is part of (RAY_ADDRESS, or `ray start`), else HOST:PORT."""
    strategy: Literal["PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """How the processes that a run begins with are laid over the nodes that will do."""
    learner: ProcessNeeds = ProcessNeeds()
    generator: ProcessNeeds = ProcessNeeds()
    reward: ProcessNeeds = ProcessNeeds()
    inference: ProcessNeeds = ProcessNeeds()
    environment: RayEnvironment = RayEnvironment()
    elastic: ElasticConfig | None = None
    """None: generate.num_workers generators, always."""


LaunchConfig = LocalLaunch | RayLaunch


def has_own_environment(launch: LaunchConfig) -> bool:
    """Return whether the run's processes see other folders and packages than the process that starts it."""
    return isinstance(launch, RayLaunch) and launch.environment != RayEnvironment()
