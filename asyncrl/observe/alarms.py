"""Trouble said before it is too late: rules over the reports of steps, each with a threshold, its source and advice.

Pure. A rule is met in a step, or not; it raises its alarm once it was met in `needed` of its last `of` steps, and ends it once
it was met in none of them. So one odd step raises nothing, and an alarm does not flicker. docs/observability.md has the same
table, and a test compares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from asyncrl.observe.steps import StepReport
from asyncrl.schema.status import Alarm, AlarmLevel

REMEMBERED = 50
"""Steps that a rule may look back on."""
FIRST = 20
"""Steps from which a run's own beginning is known."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What rules look at: the newest steps, oldest first, and what the run began with."""

    steps: Sequence[StepReport]
    groups_per_step: int
    first_entropy: float | None
    """Median over the run's first FIRST steps."""
    best_reward: float | None
    """Best median over ten steps so far."""
    least_reward: float
    """Least of any sample so far."""
    most_reward: float

    def now(self, name: str) -> float | None:
        """Return a metric of the newest step."""
        return self.steps[-1].metrics.get(name)

    def before(self, name: str) -> float | None:
        """Return the median of a metric over the steps before the newest; None where there are too few."""
        values = [step.metrics[name] for step in list(self.steps)[:-1] if name in step.metrics]
        return median(values) if len(values) >= FIRST else None

    def recent_reward(self) -> float:
        """Return the median reward of the last ten steps."""
        return median(step.reward_mean for step in list(self.steps)[-10:])


Look = Callable[[Seen], "tuple[float, float] | None"]
"""From what is seen to value and threshold where the rule is met."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    name: str
    level: AlarmLevel
    needed: int
    of: int
    look: Look
    meets: str
    """When it is met, in words."""
    source: str
    """Where the threshold comes from."""
    advice: str


def _over(metric: str, most: float) -> Look:
    def look(seen: Seen) -> tuple[float, float] | None:
        value = seen.now(metric)
        return (value, most) if value is not None and value > most else None

    return look


def _under(metric: str, least: float) -> Look:
    def look(seen: Seen) -> tuple[float, float] | None:
        value = seen.now(metric)
        return (value, least) if value is not None and value < least else None

    return look


def _ratio_mean(seen: Seen) -> tuple[float, float] | None:
    value = seen.now("ratio/mean")
    if value is None or 0.5 <= value <= 2.0:
        return None
    return value, 0.5 if value < 0.5 else 2.0


def _grad_spike(seen: Seen) -> tuple[float, float] | None:
    value, usual = seen.now("policy/grad_norm"), seen.before("policy/grad_norm")
    return (value, 10 * usual) if value is not None and usual and value > 10 * usual else None


def _kl_of_sequence(seen: Seen) -> tuple[float, float] | None:
    kl, tokens = seen.now("kl/reference_mean"), seen.now("data/response_tokens_mean")
    value = None if kl is None or tokens is None else kl * tokens
    return (value, 10.0) if value is not None and value > 10 else None


def _sync_lag(seen: Seen) -> tuple[float, float] | None:
    value, step_s = seen.now("weights/sync_ms"), seen.before("time/step_s")
    return (value, 5000 * step_s) if value is not None and step_s and value > 5000 * step_s else None


def _reward_equal(seen: Seen) -> tuple[float, float] | None:
    least, most = seen.now("reward/min"), seen.now("reward/max")
    equal = least is not None and least == most and least < seen.most_reward - 0.1 * (seen.most_reward - seen.least_reward)
    never = seen.most_reward == seen.least_reward and len(seen.steps) >= 3
    return (least or 0.0, least or 0.0) if equal or (never and least is not None) else None


def _reward_dead(seen: Seen) -> tuple[float, float] | None:
    value, middle = seen.now("reward/zero_spread_fraction"), (seen.least_reward + seen.most_reward) / 2
    return (value, 0.5) if value is not None and value >= 0.5 and seen.steps[-1].reward_mean < middle else None


def _reward_collapse(seen: Seen) -> tuple[float, float] | None:
    if seen.best_reward is None or len(seen.steps) < 10:
        return None
    gained, fallen = seen.best_reward - seen.least_reward, seen.recent_reward() - seen.least_reward
    is_large = gained > 0.1 * (seen.most_reward - seen.least_reward) > 0
    return (seen.recent_reward(), seen.least_reward + gained / 2) if is_large and fallen < gained / 2 else None


def _entropy_collapse(seen: Seen) -> tuple[float, float] | None:
    value, first = seen.now("policy/entropy"), seen.first_entropy
    if value is None or not first or value >= 0.1 * first:
        return None
    near_best = seen.most_reward - seen.recent_reward() <= 0.1 * (seen.most_reward - seen.least_reward)
    return None if near_best else (value, 0.1 * first)


def _lost_groups(seen: Seen) -> tuple[float, float] | None:
    if len(seen.steps) < FIRST:
        return None
    first, last = list(seen.steps)[-FIRST], seen.steps[-1]
    lost = sum(last.dropped.values()) - sum(first.dropped.values())
    share = lost / max(lost + seen.groups_per_step * (last.step - first.step), 1)
    return (share, 0.05) if share > 0.05 else None


def _starved(seen: Seen) -> tuple[float, float] | None:
    last = seen.steps[-1]
    return (last.generators_idle, 0.5) if last.generators_idle > 0.5 and last.groups_ready >= seen.groups_per_step else None


RULES: tuple[Rule, ...] = (
    Rule("weights.mismatch", "warning", 5, 10, _over("mismatch/kl_k3", 0.01), "`mismatch/kl_k3` > 0.01",
         "Tinker's guide: stable below 0.01",
         "engine and learner differ over the same version: use one dtype for both, or add the correction tis_token"),
    Rule("weights.lag", "warning", 5, 10, _sync_lag, "`weights/sync_ms` > 5 times the median step",
         "own: a version that is five steps late adds five to staleness",
         "send less (broadcast.delta, learner.lora) or faster (broadcast.medium.kind = \"auto\")"),
    Rule("gradient.spike", "warning", 2, 10, _grad_spike, "`policy/grad_norm` > 10 times its median over 50 steps",
         "arXiv 2602.17616: unstable gradient norms come before collapse",
         "lower learner.learning_rate, clip harder (learner.max_grad_norm), or lower buffer.max_staleness"),
    Rule("off_policy.ess", "warning", 5, 10, _under("ratio/ess", 0.3), "`ratio/ess` < 0.3",
         "verl, docs on rollout correction: health of the ratios",
         "lower buffer.max_staleness, fewer updates a step, or algorithm.kind = \"auto\""),
    Rule("off_policy.lost", "error", 5, 10, _under("ratio/ess", 0.1), "`ratio/ess` < 0.1", "the same",
         "training goes on with a tenth of the data's worth: lower buffer.max_staleness now, or go back to a checkpoint"),
    Rule("off_policy.ratio", "warning", 5, 10, _ratio_mean, "`ratio/mean` outside 0.5 to 2", "the same",
         "the samples are of another policy: lower buffer.max_staleness, add a rejection correction, check weights.mismatch"),
    Rule("kl.reference", "warning", 5, 10, _kl_of_sequence, "`kl/reference_mean` times the mean length > 10 nat",
         "TRL, how to train: 0 to 10 a sequence",
         "raise algorithm.kl.coefficient, or lower learner.learning_rate"),
    Rule("reward.equal", "error", 3, 3, _reward_equal, "all rewards of a step are equal, and not the best there is",
         "own: nothing is learnt from such a step",
         "look at a sample (`asyncrl inspect RUN --sample`): does the reward read the answer's form? is the task too hard?"),
    Rule("reward.dead", "warning", 10, 10, _reward_dead, "groups without spread >= 0.5, with rewards in the lower half",
         "Miles, advisory: 0.5",
         "easier prompts, higher generate.sampling.temperature, larger groups, algorithm.dynamic_sampling"),
    Rule("reward.collapse", "error", 10, 10, _reward_collapse, "the median reward of 10 steps lost half of what was gained",
         "experiments/off_policy: what counts as collapsed",
         "resume from the checkpoint before the fall with a lower learner.learning_rate or buffer.max_staleness"),
    Rule("entropy.collapse", "warning", 10, 10, _entropy_collapse,
         "`policy/entropy` < 0.1 of its start, and the reward not within a tenth of its best",
         "own, relative: arXiv 2505.22617 gives no absolute number",
         "raise the upper clip, add algorithm.entropy_coefficient, or raise the temperature"),
    Rule("length.truncated", "warning", 5, 10, _over("data/truncated_fraction", 0.25), "`data/truncated_fraction` > 0.25",
         "Miles: 0.25",
         "raise generate.sampling.max_new_tokens, add an overlong penalty, or algorithm.mask_truncated"),
    Rule("groups.lost", "warning", 10, 10, _lost_groups, "dropped or failed > 5 % of the groups of 20 steps",
         "prime-rl, docs on training: sustained above 5 %",
         "buffer.policy = \"wait\", more generators, or mend the reward (`asyncrl status` has the reasons)"),
    Rule("generation.slow", "info", 20, 20, _over("idle/learner", 0.5), "`idle/learner` > 0.5", "own: half the learner is unused",
         "more generators or slots, or engine vllm"),
    Rule("generation.starved", "info", 20, 20, _starved, "`idle/generators` > 0.5 and a step's groups are ready",
         "own: half of generation is unused", "fewer generators, or a lower buffer.max_staleness, cost nothing"),
)  # fmt: skip


class Alarms:
    """The alarms of one run.

    Args:
        groups_per_step: Of the run.
        switched_off: Names of rules that are not looked at.
    """

    def __init__(self, groups_per_step: int, switched_off: Sequence[str] = ()) -> None:
        self.standing: dict[str, Alarm] = {}
        self._groups_per_step = groups_per_step
        self._rules = [rule for rule in RULES if rule.name not in switched_off]
        self._met: dict[str, deque[bool]] = {rule.name: deque(maxlen=rule.of) for rule in self._rules}
        self._steps: deque[StepReport] = deque(maxlen=REMEMBERED)
        self._entropies: list[float] = []
        self._best: float | None = None
        self._least, self._most = float("inf"), float("-inf")

    def take(self, report: StepReport) -> list[Alarm]:
        """Take a step in; return the alarms that it raises or ends."""
        self._steps.append(report)
        metrics: Mapping[str, float] = report.metrics
        self._least = min(self._least, metrics.get("reward/min", report.reward_mean))
        self._most = max(self._most, metrics.get("reward/max", report.reward_mean))
        if len(self._entropies) < FIRST and "policy/entropy" in metrics:
            self._entropies.append(metrics["policy/entropy"])
        first = median(self._entropies) if len(self._entropies) == FIRST else None
        seen = Seen(self._steps, self._groups_per_step, first, self._best, self._least, self._most)
        if len(self._steps) >= 10:
            self._best = max(self._best if self._best is not None else float("-inf"), seen.recent_reward())
        return [alarm for rule in self._rules if (alarm := self._judge(rule, seen, report.version)) is not None]

    def _judge(self, rule: Rule, seen: Seen, version: int) -> Alarm | None:
        found, met = rule.look(seen), self._met[rule.name]
        met.append(found is not None)
        standing = self.standing.get(rule.name)
        if standing is not None and not any(met):
            del self.standing[rule.name]
            return msgspec.structs.replace(standing, version=version, is_over=True, text=f"{rule.name} is over")
        if standing is None and found is not None and sum(met) >= rule.needed:
            value, threshold = found
            text = f"{rule.meets} (is {value:.3g}, bound {threshold:.3g}, {sum(met)} of {len(met)} steps): {rule.advice}"
            self.standing[rule.name] = Alarm(rule.name, rule.level, version, value, threshold, text)
            return self.standing[rule.name]
        return None
