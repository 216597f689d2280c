"""Trouble said before it is too late: rules over the reports of steps, each with a threshold, its source and advice.

Pure. A rule is met in a step, or not; it raises its alarm once it was met in `needed` of its last `of` steps, and ends it once
it was met in none of them. So one odd step raises nothing, and an alarm does not flicker. docs/observability.md has the same
table, and a test compares.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import ge, gt, le, lt
from statistics import median

from msgspec.structs import replace

from asyncrl.observe.steps import StepReport
from asyncrl.schema.status import Alarm, AlarmLevel

REMEMBERED = 50
"""Steps that a rule may look back on."""
ROOM_S, LOOKS = 10.0, 12
"""How often room on the disk and in memory is looked at, and over how many looks its pace is a median."""
FIRST = 20
"""Steps from which a run's own beginning is known."""
STALL_S, STALL_STEPS = 30.0, 3
"""An open step is no stall before so many seconds, nor before so many steps have shown how long one takes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    name: str
    level: AlarmLevel
    needed: int
    of: int
    figure: str
    """A metric of the step, or what `Alarms._figures` adds; a rule whose figure is absent is not met."""
    compare: Callable[[float, float], bool]
    bound: float
    """Met where `compare(figure, bound)`."""
    meets: str
    """When it is met, in words."""
    source: str
    """Where the threshold comes from."""
    advice: str


RULES: tuple[Rule, ...] = (
    Rule("weights.mismatch", "warning", 5, 10, "mismatch/kl_k3", gt, 0.01, "`mismatch/kl_k3` > 0.01",
         "Tinker's guide: stable below 0.01",
         "engine and learner differ over the same version: use one dtype for both, or add the correction tis_token"),
    Rule("weights.lag", "warning", 5, 10, "sync over usual step", gt, 5, "`weights/sync_ms` > 5 times the median step",
         "own: a version that is five steps late adds five to staleness",
         "send less (broadcast.delta, learner.lora) or faster (broadcast.medium.kind = \"auto\")"),
    Rule("gradient.spike", "warning", 2, 10, "gradient over usual", gt, 10,
         "`policy/grad_norm` > 10 times its median over 50 steps",
         "arXiv 2602.17616: unstable gradient norms come before collapse",
         "lower learner.learning_rate, clip harder (learner.max_grad_norm), or lower buffer.max_staleness"),
    Rule("off_policy.ess", "warning", 5, 10, "ratio/ess", lt, 0.3, "`ratio/ess` < 0.3",
         "verl, docs on rollout correction: health of the ratios",
         "lower buffer.max_staleness, fewer updates a step, or algorithm.kind = \"auto\""),
    Rule("off_policy.lost", "error", 5, 10, "ratio/ess", lt, 0.1, "`ratio/ess` < 0.1", "the same",
         "training goes on with a tenth of the data's worth: lower buffer.max_staleness now, or go back to a checkpoint"),
    Rule("off_policy.ratio", "warning", 5, 10, "ratio off one", gt, 2, "`ratio/mean` outside 0.5 to 2", "the same",
         "the samples are of another policy: lower buffer.max_staleness, add a rejection correction, check weights.mismatch"),
    Rule("kl.reference", "warning", 5, 10, "kl of a sequence", gt, 10, "`kl/reference_mean` times the mean length > 10 nat",
         "TRL, how to train: 0 to 10 a sequence",
         "raise algorithm.kl.coefficient, or lower learner.learning_rate"),
    Rule("reward.equal", "error", 3, 3, "spread below best", le, 0, "all rewards of a step are equal, and not the best there is",
         "own: nothing is learnt from such a step",
         "look at a sample (`asyncrl inspect RUN --sample`): does the reward read the answer's form? is the task too hard?"),
    Rule("reward.dead", "warning", 10, 10, "spreadless below middle", ge, 0.5,
         "groups without spread >= 0.5, with rewards in the lower half",
         "Miles, advisory: 0.5",
         "easier prompts, higher generate.sampling.temperature, larger groups, algorithm.dynamic_sampling"),
    Rule("reward.collapse", "error", 10, 10, "gain kept", lt, 0.5, "the median reward of 10 steps lost half of what was gained",
         "experiments/off_policy: what counts as collapsed",
         "resume from the checkpoint before the fall with a lower learner.learning_rate or buffer.max_staleness"),
    Rule("entropy.collapse", "warning", 10, 10, "entropy below best", lt, 0.1,
         "`policy/entropy` < 0.1 of its start, and the reward not within a tenth of its best",
         "own, relative: arXiv 2505.22617 gives no absolute number",
         "raise the upper clip, add algorithm.entropy_coefficient, or raise the temperature"),
    Rule("length.truncated", "warning", 5, 10, "data/truncated_fraction", gt, 0.25, "`data/truncated_fraction` > 0.25",
         "Miles: 0.25",
         "raise generate.sampling.max_new_tokens, add an overlong penalty, or algorithm.mask_truncated"),
    Rule("groups.lost", "warning", 10, 10, "groups lost", gt, 0.05, "dropped or failed > 5 % of the groups of 20 steps",
         "prime-rl, docs on training: sustained above 5 %",
         "buffer.policy = \"wait\", more generators, or mend the reward (`asyncrl status` has the reasons)"),
    Rule("bias", "warning", 3, 3, "bias/flagged", gt, 0,
         "the interval of `bias/length_ratio` is outside 0.95 to 1.05, or of `bias/reward_gap` past 0.25 of the spread in groups",
         "own: what is lost without intent should be like what is trained",
         "buffer.policy = \"wait\", a higher buffer.max_staleness, or more generators; `bias/lost/*` says what is lost"),
    Rule("generation.slow", "info", 20, 20, "idle/learner", gt, 0.5, "`idle/learner` > 0.5", "own: half the learner is unused",
         "more generators or slots, or engine vllm"),
    Rule("generation.starved", "info", 20, 20, "idle beside ready groups", gt, 0.5,
         "`idle/generators` > 0.5 and a step's groups are ready",
         "own: half of generation is unused", "fewer generators, or a lower buffer.max_staleness, cost nothing"),
    Rule("stall.early", "warning", 1, 1, "open step over usual", gt, 6,
         "a step is open for more than 30 s and 6 times the median step", "Miles: 6 times the median",
         "the process at the end of this line holds the others up; its log says more"),
    Rule("disk.full", "warning", 3, 5, "hours of disk/free_gb", lt, 1, "the disk is full in less than an hour at this pace",
         "own: time to make room",
         "make room, or keep less: checkpoint.keep_last, observe.samples; a run on a full disk ends and can be resumed"),
    Rule("memory.full", "warning", 3, 5, "hours of memory/available_gb", lt, 1,
         "the machine's memory is full in less than an hour at this pace", "own: time to act",
         "`memory/resident_gb/*` says which process grows: fewer slots or generators, or resume the run"),
    Rule("memory.device", "warning", 3, 5, "memory/peak_share", gt, 0.95, "`memory/peak_share` > 0.95",
         "own: the next longer batch may not fit",
         "lower packing.tokens_per_row first, then learner.gradient_checkpointing, an 8-bit optimizer, more ranks "
         "(`asyncrl plan` has the sums)"),
)  # fmt: skip


class Alarms:
    """The alarms of one run.

    Args:
        groups_per_step: Of the run.
        switched_off: Names of rules that are not looked at.
    """

    def __init__(self, groups_per_step: int, switched_off: Iterable[str] = ()) -> None:
        self.standing: dict[str, Alarm] = {}
        self._off = frozenset(switched_off)
        self._groups_per_step = groups_per_step
        self._met: dict[str, deque[bool]] = {rule.name: deque(maxlen=rule.of) for rule in RULES}
        self._steps: deque[StepReport] = deque(maxlen=REMEMBERED)
        self._entropies: list[float] = []
        self._best = float("-inf")
        """Median reward over ten steps so far."""
        self._least, self._most = float("inf"), float("-inf")
        self._rooms: dict[str, deque[tuple[float, float]]] = {
            name: deque(maxlen=LOOKS) for name in ("disk/free_gb", "memory/available_gb")
        }
        """When, and how much there was."""

    def switch_off(self, names: Iterable[str]) -> None:
        """Look at all rules but these from now on."""
        self._off = frozenset(names)
        self.standing = {name: alarm for name, alarm in self.standing.items() if name not in self._off}

    def take(self, report: StepReport) -> list[Alarm]:
        """Take a step in; return the alarms that it raises or ends."""
        self._steps.append(report)
        self._least = min(self._least, report.metrics.get("reward/min", report.reward_mean))
        self._most = max(self._most, report.metrics.get("reward/max", report.reward_mean))
        if len(self._entropies) < FIRST and "policy/entropy" in report.metrics:
            self._entropies.append(report.metrics["policy/entropy"])
        return self._look(RULES, self._figures(report), report.version)

    def take_open_step(self, open_s: float, version: int, waiting: str) -> list[Alarm]:
        """Look at a step that is not done yet; return `stall.early` where it raises that. The next step ends it.

        Args:
            open_s: Seconds since the last step was done, or since the run began to train.
            version: Newest.
            waiting: Who waits for whom, in one line.
        """
        times = [step.metrics["time/step_s"] for step in self._steps if "time/step_s" in step.metrics]
        if open_s <= STALL_S or len(times) < STALL_STEPS:
            return []
        figures = {"open step over usual": open_s / max(median(times), 1e-9)}
        return self._look([rule for rule in RULES if rule.figure in figures], figures, version, f": {waiting}" if waiting else "")

    def _look(self, rules: Iterable[Rule], figures: Mapping[str, float], version: int, seen: str = "") -> list[Alarm]:
        told = []
        for rule in rules:
            if rule.name in self._off:
                continue
            value, met, standing = figures.get(rule.figure), self._met[rule.name], self.standing.get(rule.name)
            met.append(value is not None and rule.compare(value, rule.bound))
            if standing is not None and not any(met):
                del self.standing[rule.name]
                told.append(replace(standing, version=version, is_over=True, text=f"{rule.name} is over"))
            elif standing is None and value is not None and met[-1] and sum(met) >= rule.needed:
                text = (
                    f"{rule.meets} (is {value:.3g}, bound {rule.bound:.3g}, {sum(met)} of {len(met)} steps): {rule.advice}{seen}"
                )
                self.standing[rule.name] = Alarm(rule.name, rule.level, version, value, rule.bound, text)
                told.append(self.standing[rule.name])
        return told

    def _figures(self, last: StepReport) -> dict[str, float]:
        """Return the step's metrics and what is seen of it beside the steps before; what nobody can say yet is absent."""
        now, steps, span = last.metrics, list(self._steps), self._most - self._least
        reward = median(step.reward_mean for step in steps[-10:])
        usual = {
            name: median(values)
            for name in ("policy/grad_norm", "time/step_s")
            if len(values := [step.metrics[name] for step in steps[:-1] if name in step.metrics]) >= FIRST
        }
        found = dict(now)
        if ratio := now.get("ratio/mean", 0.0):
            found["ratio off one"] = max(ratio, 1 / ratio)
        if "policy/grad_norm" in now and usual.get("policy/grad_norm"):
            found["gradient over usual"] = now["policy/grad_norm"] / usual["policy/grad_norm"]
        if "weights/sync_ms" in now and usual.get("time/step_s"):
            found["sync over usual step"] = now["weights/sync_ms"] / 1000 / usual["time/step_s"]
        if "kl/reference_mean" in now and "data/response_tokens_mean" in now:
            found["kl of a sequence"] = now["kl/reference_mean"] * now["data/response_tokens_mean"]
        if "reward/min" in now and (now["reward/min"] < self._most - 0.1 * span or (span == 0 and len(steps) >= 3)):
            found["spread below best"] = now.get("reward/max", math.inf) - now["reward/min"]
        if last.reward_mean < (self._least + self._most) / 2 and "reward/zero_spread_fraction" in now:
            found["spreadless below middle"] = now["reward/zero_spread_fraction"]
        if len(steps) >= 10:
            if self._best - self._least > 0.1 * span > 0:
                found["gain kept"] = (reward - self._least) / (self._best - self._least)
            self._best = max(self._best, reward)
        first = median(self._entropies) if len(self._entropies) == FIRST else 0.0
        if first and "policy/entropy" in now and self._most - reward > 0.1 * span:
            found["entropy below best"] = now["policy/entropy"] / first
        if len(steps) >= FIRST:
            lost = sum(last.dropped.values()) - sum(steps[-FIRST].dropped.values())
            found["groups lost"] = lost / max(lost + self._groups_per_step * (last.step - steps[-FIRST].step), 1)
        if last.groups_ready >= self._groups_per_step:
            found["idle beside ready groups"] = last.generators_idle
        return found | self._hours_left(last)

    def _hours_left(self, last: StepReport) -> dict[str, float]:
        """Return until when there is room at this pace, where it becomes less; a median: what goes at once is no pace."""
        found = {}
        for name, looks in self._rooms.items():
            if name in last.metrics and (not looks or last.time_s - looks[-1][0] >= ROOM_S):
                looks.append((last.time_s, last.metrics[name]))
            if len(looks) == LOOKS:
                pace = median((before - after) / (until - since) for (since, before), (until, after) in itertools.pairwise(looks))
                if pace > 0:
                    found[f"hours of {name}"] = last.metrics.get(name, 0.0) / pace / 3600
        return found
