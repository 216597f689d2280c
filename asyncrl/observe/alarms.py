"""Early warnings of a run: rules over the reports of steps, each with a threshold, the source of the threshold, and advice.

Pure. A rule is met in a step or not. Its alarm is raised when the rule was met in `needed` of the last `of` steps, and it is over
when the rule was met in none of them. So one unusual step raises no alarm, and an alarm does not go on and off. A learning rate
that is too high is reported after one step, because one step shows it. docs/observability.md has the same table; a test
compares the two.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import ge, gt, le, lt
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from asyncrl.observe.steps import RunEvent, StepReport
from asyncrl.schema.status import INTENDED, Alarm, AlarmLevel

REMEMBERED = 50
"""Number of steps that are kept for the rules."""
ROOM_S, LOOKS = 10.0, 12
"""Least time between two measurements of free disk space, memory and generated tokens; number of measurements kept of each."""
DISK, MEMORY, HELD, MADE = "disk/free_gb", "memory/available_gb", "memory/resident_gb/", "process/generated_tokens/"
FIRST = 20
"""Number of steps after which the usual values of a run are known."""
START = 10
"""Number of first steps of a run over which its initial entropy and reward are medians."""
STALL_S, STALL_STEPS = 30.0, 3
"""An unfinished step is not a stall before this time, or before this many steps have shown how long a step takes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    name: str
    level: AlarmLevel
    needed: int
    of: int
    figure: str
    """A metric of the step, or a figure that `Alarms._figures` adds. A rule whose figure is absent is not met."""
    compare: Callable[[float, float], bool]
    bound: float
    """The rule is met if `compare(figure, bound)`."""
    meets: str
    """When the rule is met, in words."""
    source: str
    """Source of the threshold."""
    advice: str


def _is_beyond(ratio: float, bound: float) -> bool:
    return not 1 / bound <= ratio <= bound


RULES: tuple[Rule, ...] = (
    Rule("weights.mismatch", "warning", 5, 10, "mismatch/kl_k3", gt, 0.01, "`mismatch/kl_k3` > 0.01",
         "Tinker's guide: training is stable below 0.01",
         "the engine and the learner compute different log-probabilities with the same weights: use one dtype for both, restart "
         "the generator, or add the correction tis_token"),
    Rule("weights.lag", "warning", 5, 10, "sync over usual step", gt, 5, "`weights/sync_ms` > 5 times the median step",
         "own: a delay of five steps adds five versions to staleness",
         "send less (broadcast.delta, learner.lora), or use a faster medium (broadcast.medium.kind = \"auto\")"),
    Rule("weights.wrong", "error", 3, 3, "probe over first", gt, 10,
         "`weights/probe_error` > 0.05 nat and > 10 times its median over the first 5 steps",
         "own: the same weights give the same log-probabilities",
         "a generator does not use the published weights: restart this generator, then check broadcast.medium and the dtypes"),
    Rule("weights.blocked", "info", 10, 20, "blocked over usual step", gt, 0.1, "`weights/blocked_ms` > 10 % of the median step",
         "own: a tenth of the learner's time", "send less (broadcast.delta, learner.lora), or use another broadcast.medium"),
    Rule("gradient.spike", "warning", 2, 10, "gradient over usual", gt, 10,
         "`policy/grad_norm` > 10 times its median over the last 50 steps",
         "arXiv 2602.17616: gradient norms become unstable before a collapse",
         "lower learner.learning_rate, learner.max_grad_norm or buffer.max_staleness"),
    Rule("gradient.overflow", "warning", 5, 5, "policy/updates", le, 0, "`policy/updates` = 0: float16 gradients overflowed",
         "own: the policy learns nothing from such a step",
         "set learner.dtype = \"bfloat16\" or \"float32\", if the next steps are no better at the smaller loss scale"),
    Rule("learning_rate.high", "warning", 1, 10, "policy/relative_update", gt, 0.1, "`policy/relative_update` > 0.1",
         "own, from experiments/alarms: at most 0.04 in healthy runs",
         "lower learner.learning_rate: at the highest rate, an update changes the weights by more than a tenth of their norm"),
    Rule("off_policy.ess", "warning", 5, 10, "ratio/ess", lt, 0.3, "`ratio/ess` < 0.3", "verl, docs on rollout correction",
         "lower buffer.max_staleness, use fewer updates per step, or set algorithm.kind = \"auto\""),
    Rule("off_policy.lost", "error", 5, 10, "ratio/ess", lt, 0.1, "`ratio/ess` < 0.1", "verl, docs on rollout correction",
         "less than a tenth of the data is effective: lower buffer.max_staleness now, or go back to an earlier checkpoint"),
    Rule("off_policy.dropped", "warning", 5, 10, "policy/kept_fraction", lt, 0.05, "`policy/kept_fraction` < 0.05",
         "own: nothing is learned from tokens that the corrections drop",
         "lower buffer.max_staleness, or loosen or remove the correction (algorithm.corrections)"),
    Rule("off_policy.ratio", "warning", 5, 10, "ratio/mean", _is_beyond, 2, "`ratio/mean` is outside 0.5 to 2",
         "verl, docs on rollout correction",
         "the samples are from another policy: lower buffer.max_staleness, add a rejection correction, check weights.mismatch, "
         "or set generate.sampling.top_p = 1 and top_k = 0"),
    Rule("off_policy.drift", "warning", 2, 5, "drift", gt, 1,
         "`kl/k1` is outside -0.1 to 0.1, `ratio/chi2_token` > 1, or `ratio/correction_std` > 1",
         "verl, docs on rollout correction",
         "lower learner.learning_rate or buffer.max_staleness, or add an off-policy correction (algorithm.kind = \"auto\")"),
    Rule("kl.reference", "warning", 5, 10, "kl of a sequence", gt, 10,
         "`kl/reference_mean` times the mean response length > 10 nat", "TRL, how to train: 0 to 10 per sequence",
         "raise algorithm.kl.coefficient, or lower learner.learning_rate"),
    Rule("reward.equal", "error", 3, 3, "spread below best", le, 0,
         "all rewards of a step are equal, and not close to the highest reward so far, or all rewards so far are equal",
         "own: the policy learns nothing from such a step",
         "look at a sample (`asyncrl inspect RUN --sample g17.3`): does the reward parse the answer? is the task too hard?"),
    Rule("reward.dead", "warning", 10, 10, "spreadless below middle", ge, 0.5,
         "`reward/zero_spread_fraction` >= 0.5, and the mean reward is in the lower half of the range of all rewards so far",
         "Miles, advisory: 0.5",
         "use easier prompts, a higher generate.sampling.temperature, larger groups, or algorithm.dynamic_sampling"),
    Rule("reward.collapse", "error", 10, 10, "gain kept", lt, 0.5,
         "the median reward of 10 steps (minus the lowest reward so far), or held-out accuracy, is below half of its best value",
         "experiments/off_policy: definition of a collapsed run",
         "begin a run from the checkpoint before the fall (set `model.path`, or fork the run at a daemon) with a lower "
         "learner.learning_rate or buffer.max_staleness"),
    Rule("reward.hollow", "error", 1, 1, "hollow evaluations", ge, 3,
         "in 3 successive evaluations, held-out accuracy is more than a tenth below its best value, and the reward is higher "
         "than at that best value", "marin #8955: the reward rose while fewer answers were finished and correct",
         "read samples of high reward; then correct the reward, score only finished answers, or add an overlong penalty"),
    Rule("entropy.collapse", "warning", 10, 10, "entropy over first", lt, 0.1,
         "`policy/entropy` < 0.1 times its median over the first 10 steps, and the median reward of 10 steps is below the "
         "highest reward of a sample by more than a tenth of the range of all rewards so far",
         "own, relative: arXiv 2505.22617 gives no absolute threshold",
         "raise algorithm.clip_high, algorithm.entropy_coefficient or generate.sampling.temperature"),
    Rule("entropy.grows", "warning", 3, 5, "entropy over first", gt, 1.15,
         "`policy/entropy` > 1.15 times its median over the first 10 steps, and the median reward of 10 steps is below the "
         "highest reward of a sample by more than a tenth of the range of all rewards so far",
         "own, relative, from experiments/alarms: entropy falls while a policy learns",
         "lower algorithm.entropy_coefficient, learner.learning_rate or generate.sampling.temperature"),
    Rule("length.truncated", "warning", 5, 10, "data/truncated_fraction", gt, 0.25, "`data/truncated_fraction` > 0.25",
         "Miles: 0.25", "raise generate.sampling.max_new_tokens, add an overlong penalty, or set algorithm.mask_truncated"),
    Rule("length.grows", "warning", 5, 10, "length over before", gt, 2,
         "`data/response_tokens_mean` more than doubled within 50 steps",
         "own: longer answers are soon truncated, and are older when they are trained",
         "add an overlong penalty, use a length-normalised loss, or lower generate.sampling.max_new_tokens"),
    Rule("groups.lost", "warning", 10, 10, "groups lost", gt, 0.05,
         "more than 5 % of the groups of 20 steps were dropped or failed, not counting groups that the config screens out or "
         "its caller releases",
         "prime-rl, documentation of training: more than 5 % for a long time",
         "set buffer.policy = \"wait\" or a higher buffer.max_staleness, use more generators, or correct the reward (`asyncrl "
         "status` shows the reasons)"),
    Rule("bias", "warning", 3, 3, "bias/flagged", gt, 0,
         "the 95 % interval of `bias/length_ratio` is outside 0.95 to 1.05, or that of `bias/reward_gap` is outside +-0.25 of "
         "the spread in groups", "own: groups lost unintentionally should be similar to trained groups",
         "set buffer.policy = \"wait\" or a higher buffer.max_staleness, or use more generators (reasons: `bias/lost/*`)"),
    Rule("generation.slow", "info", 20, 20, "idle/learner", gt, 0.5, "`idle/learner` > 0.5",
         "own: the learner is idle for half of its time", "use more generators or slots, or the vllm engine"),
    Rule("generation.starved", "info", 20, 20, "idle beside a busy learner", gt, 0.5,
         "`idle/generators` > 0.5 and `idle/learner` < 0.1", "own: the generators are idle for half of their time",
         "lower generate.num_workers: the learner limits the speed, so fewer generators cost nothing"),
    Rule("generation.uneven", "warning", 3, 3, "slowest generator", lt, 0.5,
         "for a minute in which the generators had work, one generator made less than half as many tokens as the median "
         "generator", "own: half of a generator's work is lost",
         "`process/generated_tokens/*` shows which generator is slow: look at its log and its machine, or restart it"),
    Rule("score.slow", "info", 20, 20, "scoring over generating", gt, 1,
         "`time/score_mean_s` > `time/generate_mean_s`, and `idle/learner` > 0.1", "own: the learner waits for scores",
         "use more reward workers (reward.num_workers) or a quicker reward"),
    Rule("stall.early", "warning", 1, 1, "open step over usual", gt, 6,
         "the current step has taken more than 30 s and more than 6 times the median step time", "Miles: 6 times the median",
         "look at the process at the end of this line: it holds the others up; its log says more"),
    Rule("disk.full", "warning", 3, 5, "hours of disk/free_gb", lt, 1,
         "at the present rate, the disk will be full in less than an hour", "own: time to free space",
         "make room, or keep less (checkpoint.keep_last, observe.samples); a run ends on a full disk, and can be resumed"),
    Rule("memory.full", "warning", 3, 5, "hours of memory/available_gb", lt, 1,
         "at the growth rate of the run's processes, the memory will be full in less than an hour", "own: time to free memory",
         "`memory/resident_gb/*` says which process grows: repair it, use fewer slots or generators, or stop and resume the run"),
    Rule("memory.device", "warning", 3, 5, "memory/peak_share", gt, 0.95, "`memory/peak_share` > 0.95",
         "own: a longer batch may not fit",
         "lower packing.tokens_per_row first; then use learner.gradient_checkpointing, an 8-bit optimizer, or more ranks "
         "(`asyncrl plan` computes the memory)"),
)  # fmt: skip


OVER = " is over"
"""End of the text of an alarm that is over."""


class Raised(Struct, frozen=True):
    """An alarm of a run, from the run's events."""

    rule: str
    level: AlarmLevel
    since_s: float
    version: int
    text: str
    over_s: float = 0.0
    """Time at which the alarm was over; 0: it still stands, or it stood when the run ended."""
    over_version: int = -1


def raised_in(events: Iterable[RunEvent]) -> list[Raised]:
    """Return the alarms that a run has raised, in order. A resumed run begins without alarms."""
    levels, told, standing = {rule.name: rule.level for rule in RULES}, list[Raised](), dict[str, int]()
    for event in events:
        begins = event.kind == "phase" and event.subject == "starting"
        is_over = event.kind == "alarm" and event.text.endswith(OVER)
        for rule in list(standing) if begins else [event.subject] if is_over else []:
            if (place := standing.pop(rule, None)) is not None:
                told[place] = replace(told[place], over_s=event.time_s, over_version=event.version)
        if event.kind == "alarm" and not is_over:
            standing[event.subject] = len(told)
            level = levels.get(event.subject, "warning")
            told.append(Raised(event.subject, level, event.time_s, event.version, event.text))
    return told


class Alarms:
    """The alarms of one run.

    Args:
        groups_per_step: `algorithm.groups_per_step` of the run.
        first: Of a resumed run, the reports of its first START steps. The rewards of later steps are not known then, so equal
            rewards from the resume on may mean that the task is solved.
    """

    def __init__(self, groups_per_step: int, first: Sequence[StepReport] = ()) -> None:
        self._is_whole = not first
        self.standing: dict[str, Alarm] = {}
        self._off: frozenset[str] = frozenset()
        self._groups_per_step = groups_per_step
        self._met: dict[str, deque[bool]] = {rule.name: deque(maxlen=rule.of) for rule in RULES}
        self._steps: deque[StepReport] = deque(maxlen=REMEMBERED)
        self._entropies = [report.metrics["policy/entropy"] for report in first if "policy/entropy" in report.metrics]
        self._best = float("-inf")
        """Highest median reward over ten steps so far."""
        self._least, self._most = float("inf"), float("-inf")
        self._probes: list[float] = []
        self._shown: dict[str, str] = {}
        """For a figure that is computed from several metrics: these metrics, as text."""
        self._looks: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=LOOKS))
        """Time and value of the last measurements, by metric."""
        self._best_accuracy, self._reward_then = 0.0, math.inf
        """Best held-out accuracy, and the median reward when it was reached; infinite: no step was done at that time."""
        self._accuracy: float | None = None
        self._has_fallen = False
        """Whether that accuracy is below the best one by more than chance explains."""
        self._hollow = 0
        """Successive evaluations with a higher reward, but a tenth less accuracy, than at the best accuracy."""

    def switch_off(self, names: Iterable[str]) -> None:
        """Check all rules except these from now on."""
        self._off = frozenset(names)
        self.standing = {name: alarm for name, alarm in self.standing.items() if name not in self._off}

    def take(self, report: StepReport) -> list[Alarm]:
        """Add a step; return the alarms that it raises or ends."""
        self._steps.append(report)
        if len(self._steps) >= START and self._accuracy is not None and math.isinf(self._reward_then):
            self._reward_then = self._reward()
        self._least = min(self._least, report.metrics.get("reward/min", report.reward_mean))
        self._most = max(self._most, report.metrics.get("reward/max", report.reward_mean))
        if len(self._probes) < 5 and "weights/probe_error" in report.metrics:
            self._probes.append(report.metrics["weights/probe_error"])
        if len(self._entropies) < START and "policy/entropy" in report.metrics:
            self._entropies.append(report.metrics["policy/entropy"])
        return self._look(RULES, self._figures(report), report.version)

    def take_evaluation(self, accuracy: float, num_samples: int) -> None:
        """Add a held-out evaluation of so many samples; the next step is checked with it.

        A fall of less than two standard errors may be chance, and counts as none.
        """
        reward, best = self._reward(), self._best_accuracy
        if accuracy >= best:
            self._best_accuracy, self._reward_then = accuracy, reward
        error = math.sqrt((accuracy * (1 - accuracy) + best * (1 - best)) / max(num_samples, 1))
        self._has_fallen = best - accuracy > 2 * error
        is_hollow = self._has_fallen and accuracy < 0.9 * best and reward > self._reward_then
        self._accuracy, self._hollow = accuracy, self._hollow + 1 if is_hollow else 0

    def _reward(self) -> float:
        return median(step.reward_mean for step in list(self._steps)[-10:]) if self._steps else math.inf

    def take_open_step(self, open_s: float, version: int, waiting: str) -> list[Alarm]:
        """Check a step that is not done yet; return `stall.early` if the step raises this alarm. The next step ends it.

        Args:
            open_s: Seconds since the last step was done, or since the run began to train.
            version: Newest policy version.
            waiting: Which process waits for which, in one line.
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
                told.append(replace(standing, version=version, is_over=True, text=f"{rule.name}{OVER}"))
            elif standing is None and value is not None and met[-1] and sum(met) >= rule.needed:
                how_often = f"{sum(met)} of {len(met)} steps"
                shown = self._shown.get(rule.figure, f"is {value:.3g}, bound {rule.bound:.3g}")
                text = f"{rule.meets} ({shown}, {how_often}): {rule.advice}{seen}"
                self.standing[rule.name] = Alarm(rule.name, rule.level, version, value, rule.bound, text)
                told.append(self.standing[rule.name])
        return told

    def _figures(self, last: StepReport) -> dict[str, float]:
        """Return the step's metrics, and comparisons with the steps before; a figure that is not known yet is absent."""
        now, steps, found = last.metrics, self._steps, {**last.metrics, "hollow evaluations": float(self._hollow)}
        found |= self._of_policy(now) | self._of_reward(last) | self._of_pace(last)
        if step_ms := 1000 * self._usual("time/step_s"):
            found["sync over usual step"] = now.get("weights/sync_ms", 0.0) / step_ms
            found["blocked over usual step"] = now.get("weights/blocked_ms", 0.0) / step_ms
        if len(self._probes) == 5 and now.get("weights/probe_error", 0.0) > 0.05:
            found["probe over first"] = now["weights/probe_error"] / max(median(self._probes), 1e-9)
        if len(steps) >= FIRST:
            now_lost, lost_before = (
                sum(num for reason, num in one.dropped.items() if reason not in INTENDED) for one in (last, steps[-FIRST])
            )
            lost = now_lost - lost_before
            found["groups lost"] = lost / max(lost + self._groups_per_step * (last.step - steps[-FIRST].step), 1)
        if now.get("idle/learner", 1.0) < 0.1:
            found["idle beside a busy learner"] = last.generators_idle
        if now.get("idle/learner", 0.0) > 0.1 and now.get("time/generate_mean_s"):
            found["scoring over generating"] = now.get("time/score_mean_s", 0.0) / now["time/generate_mean_s"]
        return found

    def _usual(self, name: str) -> float:
        """Return the median of a metric over the steps before; 0: too few steps have it."""
        values = [step.metrics[name] for step in list(self._steps)[:-1] if name in step.metrics]
        return median(values) if len(values) >= FIRST else 0.0

    def _of_policy(self, now: Mapping[str, float]) -> dict[str, float]:
        spread = max(now.get("ratio/chi2_token", 0.0), now.get("ratio/correction_std", 0.0))
        found = {"drift": max(abs(now.get("kl/k1", 0.0)) / 0.1, spread)}
        values = (f"{name} {now[name]:.3g}" for name in ("kl/k1", "ratio/chi2_token", "ratio/correction_std") if name in now)
        self._shown["drift"] = ", ".join(values)
        if usual := self._usual("policy/grad_norm"):
            found["gradient over usual"] = now.get("policy/grad_norm", 0.0) / usual
        if "data/response_tokens_mean" in now:
            found["kl of a sequence"] = now.get("kl/reference_mean", 0.0) * now["data/response_tokens_mean"]
            lengths = [step.metrics.get("data/response_tokens_mean", math.inf) for step in itertools.islice(self._steps, 10)]
            if len(self._steps) >= FIRST:
                found["length over before"] = now["data/response_tokens_mean"] / median(lengths)
        return found

    def _of_reward(self, last: StepReport) -> dict[str, float]:
        now, span, reward, found = last.metrics, self._most - self._least, self._reward(), dict[str, float]()
        were_equal = span == 0 and self._is_whole and len(self._steps) >= 3
        if "reward/min" in now and (now["reward/min"] < self._most - 0.1 * span or were_equal):
            found["spread below best"] = now.get("reward/max", math.inf) - now["reward/min"]
        if last.reward_mean < (self._least + self._most) / 2 and "reward/zero_spread_fraction" in now:
            found["spreadless below middle"] = now["reward/zero_spread_fraction"]
        kept = [self._accuracy / self._best_accuracy if self._has_fallen else 1.0] if self._accuracy is not None else []
        if len(self._steps) >= 10:
            if self._best - self._least > 0.1 * span > 0:
                kept.append((reward - self._least) / (self._best - self._least))
            self._best = max(self._best, reward)
        if kept:
            found["gain kept"] = min(kept)
        first = median(self._entropies) if len(self._entropies) == START else 0.0
        if first and "policy/entropy" in now and self._most - reward > 0.1 * span:
            found["entropy over first"] = now["policy/entropy"] / first
        return found

    def _of_pace(self, last: StepReport) -> dict[str, float]:
        """Return the hours until disk and memory are full at the median rate, and how slow the slowest generator is.

        The rate is a median, so that one sudden change has no effect.
        """
        found, made = dict[str, float](), list[float]()
        held = sum(value for name, value in last.metrics.items() if name.startswith(HELD))
        for name, value in last.metrics.items():
            if name not in {DISK, MEMORY} and not name.startswith(MADE):
                continue
            looks = self._looks[name]
            if not looks or last.time_s - looks[-1][0] >= ROOM_S:
                looks.append((last.time_s, -held if name == MEMORY else value))  # other programs' memory must not count
            if name.startswith(MADE):
                if len(looks) > 6 and looks[-1][1] >= looks[-7][1]:  # else the generator was restarted
                    made.append(looks[-1][1] - looks[-7][1])
            elif len(looks) == LOOKS:
                pace = median((before - after) / (until - since) for (since, before), (until, after) in itertools.pairwise(looks))
                if pace > 0:
                    found[f"hours of {name}"] = value / pace / 3600
        if len(made) > 1 and last.generators_idle < 0.5 and median(made):
            found["slowest generator"] = min(made) / median(made)
        return found
