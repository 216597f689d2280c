"""What is simulated: generators, a learner, rewards, weights, failures, in distributions. And what came of it.

Called by plan/simulate.py, plan/sweep.py, plan/validate.py and the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncrl.errors import ConfigError
from asyncrl.plan.distributions import Distribution, fixed

WARM_UP = 0.2
"""Of the steps, at the start, left out of the figures while pipelines fill."""
LENGTHS = Distribution("lognormal", (64.0, 1.0, 2000.0))
AT_ONCE, STEP = fixed(0.0), fixed(0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run to be."""

    num_generators: int = 2
    num_slots: int = 64
    lengths: Distribution = LENGTHS
    """Tokens of a response."""
    decode_s: float = 0.002
    """One decode step with one sequence."""
    decode_s_per_sequence: float = 0.0
    """What each further sequence of the batch adds to it."""
    sequence_s: float = 0.0
    """What a sequence takes in its slot beside its tokens."""
    prefill_s: float = 0.0
    """What a new group costs its generator before its first token."""
    groups_per_step: int = 16
    group_size: int = 4
    max_staleness: int = 2
    policy: Literal["wait", "drop", "mask"] = "wait"
    max_running_groups: int = 0
    reward_s: Distribution = AT_ONCE
    reward_workers: int = 0
    """Samples scored at once; 0: no limit."""
    step_s: Distribution = STEP
    """Optimizer step, from batch in hand to new version."""
    step_s_per_token: float = 0.0
    """What each trained token adds to it."""
    steps_ahead: int = 2
    """Steps taken and not yet done: the one in hand and a prefetched one, as control/feed.py has it; an outside learner has 1."""
    sync_s: Distribution = AT_ONCE
    """From publish to bytes verified on a generator."""
    swap_s: float = 0.0
    """How long a generator stands still for it."""
    hop_s: float = 0.0
    """From a generator's or worker's word to the controller's deed."""
    failures_per_hour: float = 0.0
    """Of one generator."""
    restart_s: float = 30.0
    num_steps: int = 50
    generator_price: float = 0.0
    """Dollars an hour, each."""
    learner_price: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        for name in ("num_generators", "num_slots", "groups_per_step", "group_size", "num_steps", "steps_ahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.decode_s <= 0:
            raise ConfigError(f"decode_s must be above 0, got {self.decode_s}")
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be at least 0, got {self.max_staleness}")


@dataclass(slots=True)
class Outcome:
    """What a simulated run did, without its warm-up; seconds are the run's, not the simulation's."""

    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    mean_staleness: float = 0.0
    """Of samples, by their oldest token."""
    max_staleness: int = 0
    learner_idle: float = 0.0
    """Share of the time in which the learner had no batch."""
    slots_used: float = 0.0
    """Share of the generators' slots that held a running sequence."""
    dropped_groups: int = 0
    failed_groups: int = 0
    lost_generators: int = 0
    lost_groups: int = 0
    """Issued and in no state: must be 0."""
    dollars_per_step: float = 0.0
    num_events: int = 0
    simulated_s: float = 0.0
    step_times_s: list[float] = field(default_factory=list)
    """When each step was done."""
