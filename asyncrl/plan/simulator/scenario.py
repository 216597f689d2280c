"""The input of a simulation (generators, learner, rewards, weights, failures, as numbers or distributions) and its outcome.

A distribution is given by a shape or by measured values. On the command line: `fixed:0.3`, `uniform:1:9`,
`lognormal:MEAN:SIGMA[:MOST]`, `exponential:MEAN`. Fields of a Scenario, and of the planner's Question, are `FIELD=VALUE` there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError

Draw = Callable[[], float]
_AT_ONCE = 1024
MOST_AT_ONCE = 100_000
"""Maximum for counts of generators and other simulated items; a larger simulation would run for days."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A shape with its parameters, or measured values."""

    kind: str
    parameters: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    """Kind `measured`: drawn with replacement. Kind `recorded`: used in order, then drawn with replacement."""

    def drawer(self, rng: np.random.Generator) -> Draw:
        """Return a function that draws one value after the other, in blocks from `rng`."""
        block = list(reversed(self.values)) if self.kind == "recorded" else []

        def draw() -> float:
            if not block:
                block.extend(self._draw(rng, _AT_ONCE).tolist())
            return block.pop()

        return draw

    def _draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        match self.kind, self.parameters:
            case "fixed", (value,):
                return np.full(count, value)
            case "uniform", (low, high):
                return rng.uniform(low, high, count)
            case "exponential", (mean,):
                return rng.exponential(mean, count)
            case "lognormal", (mean, sigma, *most):
                drawn = rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
                return np.minimum(drawn, most[0]) if most else drawn
        return rng.choice(np.asarray(self.values), count)


_PARAMETERS = {"fixed": (1, 1), "uniform": (2, 2), "exponential": (1, 1), "lognormal": (2, 3)}


def fixed(value: float) -> Distribution:
    """Return the distribution that is always `value`."""
    return Distribution("fixed", (value,))


def recorded(values: Sequence[float]) -> Distribution:
    """Return measured values in order, so that a simulation of the same run gets the same draws."""
    return Distribution("recorded", values=tuple(map(float, values)))


def parse_distribution(text: str) -> Distribution:
    """Parse a distribution such as `lognormal:64:1`; a number alone is fixed.

    Raises:
        ConfigError: The shape is unknown, or its parameters are invalid.
    """
    kind, *rest = text.split(":") if ":" in text else ("fixed", text)
    try:
        numbers = tuple(map(float, rest))
    except ValueError:
        numbers = ()
    least, most = _PARAMETERS.get(kind, (1, 0))
    if not least <= len(numbers) <= most or any(not math.isfinite(number) or number < 0 for number in numbers):
        raise ConfigError(
            f"a distribution is a number, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEAN:SIGMA[:MOST]; got {text!r}"
        )
    if kind in {"lognormal", "exponential"} and numbers[0] == 0:
        raise ConfigError(f"the mean of {text!r} must be above 0")
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise ConfigError(f"uniform:LOW:HIGH needs LOW of at most HIGH, got {text!r}")
    return Distribution(kind, numbers)


WARM_UP = 0.2
"""Share of the first steps that the figures exclude, while pipelines fill."""
LENGTHS = Distribution("lognormal", (64.0, 1.0, 2000.0))
AT_ONCE, STEP = fixed(0.0), fixed(0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The parameters of a simulated run."""

    num_workers: int = 2
    """Number of generators, as `generate.num_workers` of a config."""
    num_slots: int = 64
    lengths: Distribution = LENGTHS
    """Number of tokens of a response."""
    decode_s: float = 0.002
    """Seconds of one decode step with one sequence."""
    decode_s_per_sequence: float = 0.0
    """Seconds that each further sequence of the batch adds."""
    sequence_s: float = 0.0
    """Seconds of a sequence in its slot besides its tokens."""
    prefill_s: float = 0.0
    """Seconds of a generator for a new group before its first token."""
    groups_per_step: int = 16
    group_size: int = 4
    max_staleness: int = 2
    ahead: Literal["as_needed", "as_allowed"] = "as_needed"
    """As `buffer.ahead` of a config."""
    policy: Literal["wait", "drop", "mask"] = "wait"
    max_running_groups: int = 0
    reward_s: Distribution = AT_ONCE
    reward_workers: int = 0
    """Number of samples scored at once; 0: no limit."""
    step_s: Distribution = STEP
    """Seconds of an optimizer step, from the batch to the new version."""
    step_s_per_token: float = 0.0
    """Seconds that each trained token adds."""
    steps_ahead: int = 2
    """Steps taken and not done: the current and a prefetched one (control/batch_feeder.py); an outside learner has 1."""
    sync_s: Distribution = AT_ONCE
    """Seconds from publishing until a generator has verified the bytes."""
    swap_s: float = 0.0
    """Seconds that a generator stops to load new weights."""
    hop_s: float = 0.0
    """Seconds from a message of a generator or worker to the controller's action."""
    failures_per_hour: float = 0.0
    """Failures of one generator."""
    restart_s: float = 30.0
    num_steps: int = 50
    generator_price: float = 0.0
    """Dollars per hour for each."""
    learner_price: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot be simulated."""
        least = dict.fromkeys(("num_workers", "num_slots", "groups_per_step", "group_size", "steps_ahead"), 1.0)
        least |= {"num_steps": 2, "decode_s": 1e-9}  # speeds are measured from the end of the first step
        for name, value in ((each.name, getattr(self, each.name)) for each in fields(self)):
            if isinstance(value, int | float) and value < (bound := least.get(name, 0)):
                raise ConfigError(f"{name} must be at least {bound:g}, got {value}")
        for name in ("num_workers", "num_slots", "groups_per_step", "group_size"):
            if getattr(self, name) > MOST_AT_ONCE:
                raise ConfigError(f"{name} must be at most {MOST_AT_ONCE}, got {getattr(self, name)}")


def typed_fields(kind: type, texts: Sequence[str], others: Mapping[str, type] = {}) -> dict[str, Any]:
    """Convert each `field=value` to the type of the dataclass's field.

    Args:
        kind: The dataclass; its fields without a text form (models, clusters) cannot be set.
        texts: The texts to convert.
        others: Further allowed names.

    Raises:
        ConfigError: A text has another form, a field is unknown, or a value does not fit its field.
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
    """Return the scenario with the `field=value` overrides.

    Raises:
        ConfigError: A field is unknown, or a value does not fit it.
    """
    return replace(base, **typed_fields(Scenario, overrides))


@dataclass(slots=True)
class Outcome:
    """The figures of a simulated run, without its warm-up; seconds are simulated time."""

    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    mean_staleness: float = 0.0
    """Staleness of samples, by their oldest token."""
    max_staleness: int = 0
    learner_idle: float = 0.0
    """Share of the time without a batch for the learner."""
    slots_used: float = 0.0
    """Share of the generators' slots with a running sequence."""
    dropped_groups: int = 0
    failed_groups: int = 0
    lost_generators: int = 0
    lost_groups: int = 0
    """Issued groups that are in no state; must be 0."""
    dollars_per_step: float = 0.0
    num_events: int = 0
    simulated_s: float = 0.0
    step_times_s: list[float] = field(default_factory=list)
    """The end time of each step."""
