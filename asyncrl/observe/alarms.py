"""Trouble said before it is too late: rules over the reports of steps, each with a threshold, its source and advice.

Pure. A rule is met in a step, or not; it raises its alarm once it was met in `needed` of its last `of` steps, and ends it once
it was met in none of them. So one odd step raises nothing, and an alarm does not flicker. A learning rate that is too high
is told at once: one step shows it. docs/observability.md has the same table, and a test compares.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import ge, gt, le, lt
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from asyncrl.observe.steps import RunEvent, StepReport
from asyncrl.schema.status import SCREENED, Alarm, AlarmLevel

REMEMBERED = 50
"""Steps that a rule may look back on."""
ROOM_S, LOOKS = 10.0, 12
"""How often room on the disk and in memory and what generators have made is looked at, and how many looks are kept."""
DISK, MEMORY, HELD, MADE = "disk/free_gb", "memory/available_gb", "memory/resident_gb/", "process/generated_tokens/"
FIRST = 20
"""Steps from which a run's own pace is known."""
START = 10
"""Steps over which the entropy and the reward that a run began with are medians."""
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
         "engine and learner differ over the same version: use one dtype for both, restart the generator, or add the correction "
         "tis_token"),
    Rule("weights.lag", "warning", 5, 10, "sync over usual step", gt, 5, "`weights/sync_ms` > 5 times the median step",
         "own: a version that is five steps late adds five to staleness",
         "send less (broadcast.delta, learner.lora) or faster (broadcast.medium.kind = \"auto\")"),
    Rule("weights.wrong", "error", 3, 3, "probe over first", gt, 10,
         "`weights/probe_error` > 0.05 nat and 10 times the median of the first 5 steps",
         "own: the same weights give the same log-probabilities",
         "a generator samples by other weights than were published: restart it; then check broadcast.medium and dtypes"),
    Rule("weights.blocked", "info", 10, 20, "blocked over usual step", gt, 0.1, "`weights/blocked_ms` > 10 % of the median step",
         "own: a tenth of the learner's time", "send less (broadcast.delta, learner.lora), or by another broadcast.medium"),
    Rule("gradient.spike", "warning", 2, 10, "gradient over usual", gt, 10,
         "`policy/grad_norm` > 10 times its median over 50 steps",
         "arXiv 2602.17616: unstable gradient norms come before collapse",
         "lower learner.learning_rate, clip harder (learner.max_grad_norm), or lower buffer.max_staleness"),
    Rule("learning_rate.high", "warning", 1, 10, "policy/relative_update", gt, 0.1, "`policy/relative_update` > 0.1",
         "own, from experiments/alarms: at most 0.04 in healthy runs",
         "lower learner.learning_rate: at the highest rate of the schedule a step changes a tenth of the weights' size"),
    Rule("off_policy.ess", "warning", 5, 10, "ratio/ess", lt, 0.3, "`ratio/ess` < 0.3",
         "verl, docs on rollout correction: health of the ratios",
         "lower buffer.max_staleness, fewer updates a step, or algorithm.kind = \"auto\""),
    Rule("off_policy.lost", "error", 5, 10, "ratio/ess", lt, 0.1, "`ratio/ess` < 0.1", "the same",
         "training goes on with a tenth of the data's worth: lower buffer.max_staleness now, or go back to a checkpoint"),
    Rule("off_policy.ratio", "warning", 5, 10, "ratio off one", gt, 2, "`ratio/mean` outside 0.5 to 2", "the same",
         "the samples are of another policy: lower buffer.max_staleness, add a rejection correction, check weights.mismatch"),
    Rule("off_policy.drift", "warning", 2, 5, "drift", gt, 1,
         "`kl/k1` outside -0.1 to 0.1, `ratio/chi2_token` > 1, or `ratio/correction_std` > 1", "the same",
         "lower learner.learning_rate or buffer.max_staleness, or add a correction (algorithm.kind = \"auto\")"),
    Rule("kl.reference", "warning", 5, 10, "kl of a sequence", gt, 10, "`kl/reference_mean` times the mean length > 10 nat",
         "TRL, how to train: 0 to 10 a sequence",
         "raise algorithm.kl.coefficient, or lower learner.learning_rate"),
    Rule("reward.equal", "error", 3, 3, "spread below best", le, 0, "all rewards of a step are equal, and not the best there is",
         "own: nothing is learnt from such a step",
         "look at a sample (`asyncrl inspect RUN --sample g17.3`): does the reward read the answer's form? is the task hard?"),
    Rule("reward.dead", "warning", 10, 10, "spreadless below middle", ge, 0.5,
         "groups without spread >= 0.5, with rewards in the lower half",
         "Miles, advisory: 0.5",
         "easier prompts, higher generate.sampling.temperature, larger groups, algorithm.dynamic_sampling"),
    Rule("reward.collapse", "error", 10, 10, "gain kept", lt, 0.5,
         "the median reward of 10 steps (above the smallest so far), or held-out accuracy, fell to half of its best",
         "experiments/off_policy: what counts as collapsed",
         "begin a run from the checkpoint before the fall (`model.path`, or fork it at a daemon) with a lower "
         "learner.learning_rate or buffer.max_staleness"),
    Rule("reward.hollow", "error", 1, 1, "hollow evaluations", ge, 3,
         "in 3 evaluations one after the other the reward is higher than at the best held-out accuracy, which lost a tenth",
         "marin #8955: reward went up while finished and right answers went down",
         "read samples of high reward: score only finished answers, add an overlong penalty, mend the reward"),
    Rule("entropy.collapse", "warning", 10, 10, "entropy over first", lt, 0.1,
         "`policy/entropy` < 0.1 of its median over the first 10 steps, and the reward not within a tenth of its best",
         "own, relative: arXiv 2505.22617 gives no absolute number",
         "raise the upper clip, add algorithm.entropy_coefficient, or raise the temperature"),
    Rule("entropy.grows", "warning", 3, 5, "entropy over first", gt, 1.15,
         "`policy/entropy` > 1.15 times its median over the first 10 steps, and the reward not within a tenth of its best",
         "own, relative, from experiments/alarms: a policy that learns becomes surer",
         "lower algorithm.entropy_coefficient, learner.learning_rate or the temperature"),
    Rule("length.truncated", "warning", 5, 10, "data/truncated_fraction", gt, 0.25, "`data/truncated_fraction` > 0.25",
         "Miles: 0.25",
         "raise generate.sampling.max_new_tokens, add an overlong penalty, or algorithm.mask_truncated"),
    Rule("length.grows", "warning", 5, 10, "length over before", gt, 2,
         "`data/response_tokens_mean` doubled within 50 steps",
         "own: longer answers are cut off, and older as they are trained, soon",
         "add an overlong penalty, use a length-normalised loss, or lower generate.sampling.max_new_tokens"),
    Rule("groups.lost", "warning", 10, 10, "groups lost", gt, 0.05,
         "dropped or failed > 5 % of the groups of 20 steps, without those that the config screens out",
         "prime-rl, docs on training: sustained above 5 %",
         "buffer.policy = \"wait\", a higher buffer.max_staleness, more generators, or mend the reward "
         "(`asyncrl status` has the reasons)"),
    Rule("bias", "warning", 3, 3, "bias/flagged", gt, 0,
         "the interval of `bias/length_ratio` is outside 0.95 to 1.05, or of `bias/reward_gap` past 0.25 of the spread in groups",
         "own: what is lost without intent should be like what is trained",
         "buffer.policy = \"wait\", a higher buffer.max_staleness, or more generators; `bias/lost/*` says what is lost"),
    Rule("generation.slow", "info", 20, 20, "idle/learner", gt, 0.5, "`idle/learner` > 0.5", "own: half the learner is unused",
         "more generators or slots, or engine vllm"),
    Rule("generation.starved", "info", 20, 20, "idle beside a busy learner", gt, 0.5,
         "`idle/generators` > 0.5 and `idle/learner` < 0.1",
         "own: half of generation is unused", "fewer generators cost nothing"),
    Rule("generation.uneven", "warning", 3, 3, "slowest generator", lt, 0.5,
         "one generator made less than half the tokens of the median of all, for a minute in which they had work",
         "own: half a generator is lost",
         "`process/generated_tokens/*` says which one: look at its log and its machine, or restart it"),
    Rule("score.slow", "info", 20, 20, "scoring over generating", gt, 1,
         "`time/score_mean_s` > `time/generate_mean_s`, and the learner waits a tenth of its time",
         "own: scoring holds the learner up", "more reward.num_workers, or a quicker reward"),
    Rule("stall.early", "warning", 1, 1, "open step over usual", gt, 6,
         "a step is open for more than 30 s and 6 times the median step", "Miles: 6 times the median",
         "the process at the end of this line holds the others up; its log says more"),
    Rule("disk.full", "warning", 3, 5, "hours of disk/free_gb", lt, 1, "the disk is full in less than an hour at this pace",
         "own: time to make room",
         "make room, or keep less: checkpoint.keep_last, observe.samples; a run on a full disk ends and can be resumed"),
    Rule("memory.full", "warning", 3, 5, "hours of memory/available_gb", lt, 1,
         "the machine's memory is full in less than an hour at the pace at which the run's processes grow", "own: time to act",
         "`memory/resident_gb/*` says which process grows: mend it, take fewer slots or generators, or resume the run"),
    Rule("memory.device", "warning", 3, 5, "memory/peak_share", gt, 0.95, "`memory/peak_share` > 0.95",
         "own: the next longer batch may not fit",
         "lower packing.tokens_per_row first, then learner.gradient_checkpointing, an 8-bit optimizer, more ranks "
         "(`asyncrl plan` has the sums)"),
)  # fmt: skip


OVER = " is over"
"""How the text of an alarm ends that has ended."""


class Raised(Struct, frozen=True):
    """An alarm of a run, as its events tell of it."""

    rule: str
    level: AlarmLevel
    since_s: float
    version: int
    text: str
    over_s: float = 0.0
    """0: it stands, or stood as the run ended."""
    over_version: int = -1


def raised_in(events: Iterable[RunEvent]) -> list[Raised]:
    """Return the alarms that a run has raised, in order. A run that is resumed begins without any."""
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
        groups_per_step: Of the run.
    """

    def __init__(self, groups_per_step: int) -> None:
        self.standing: dict[str, Alarm] = {}
        self._off: frozenset[str] = frozenset()
        self._groups_per_step = groups_per_step
        self._met: dict[str, deque[bool]] = {rule.name: deque(maxlen=rule.of) for rule in RULES}
        self._steps: deque[StepReport] = deque(maxlen=REMEMBERED)
        self._entropies: list[float] = []
        self._best = float("-inf")
        """Median reward over ten steps so far."""
        self._least, self._most = float("inf"), float("-inf")
        self._probes: list[float] = []
        self._looks: defaultdict[str, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=LOOKS))
        """By metric: when, and how much there was."""
        self._best_accuracy, self._reward_then = 0.0, math.inf
        """Held-out, and the median reward as it was reached; infinite: no step was done by then."""
        self._accuracy: float | None = None
        self._hollow = 0
        """Evaluations in a row in which the reward was higher and the accuracy a tenth lower."""

    def switch_off(self, names: Iterable[str]) -> None:
        """Look at all rules but these from now on."""
        self._off = frozenset(names)
        self.standing = {name: alarm for name, alarm in self.standing.items() if name not in self._off}

    def take(self, report: StepReport) -> list[Alarm]:
        """Take a step in; return the alarms that it raises or ends."""
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

    def take_evaluation(self, accuracy: float) -> None:
        """Take a held-out evaluation in; the next step is looked at with it."""
        reward = self._reward()
        if accuracy >= self._best_accuracy:
            self._best_accuracy, self._reward_then = accuracy, reward
        is_hollow = accuracy < 0.9 * self._best_accuracy and reward > self._reward_then
        self._accuracy, self._hollow = accuracy, self._hollow + 1 if is_hollow else 0

    def _reward(self) -> float:
        return median(step.reward_mean for step in list(self._steps)[-10:]) if self._steps else math.inf

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
                told.append(replace(standing, version=version, is_over=True, text=f"{rule.name}{OVER}"))
            elif standing is None and value is not None and met[-1] and sum(met) >= rule.needed:
                how_often = f"{sum(met)} of {len(met)} steps"
                text = f"{rule.meets} (is {value:.3g}, bound {rule.bound:.3g}, {how_often}): {rule.advice}{seen}"
                self.standing[rule.name] = Alarm(rule.name, rule.level, version, value, rule.bound, text)
                told.append(self.standing[rule.name])
        return told

    def _figures(self, last: StepReport) -> dict[str, float]:
        """Return the step's metrics and what is seen of it beside the steps before; what nobody can say yet is absent."""
        now, steps, found = last.metrics, self._steps, {**last.metrics, "hollow evaluations": float(self._hollow)}
        found |= self._of_policy(now) | self._of_reward(last) | self._of_pace(last)
        if step_ms := 1000 * self._usual("time/step_s"):
            found["sync over usual step"] = now.get("weights/sync_ms", 0.0) / step_ms
            found["blocked over usual step"] = now.get("weights/blocked_ms", 0.0) / step_ms
        if len(self._probes) == 5 and now.get("weights/probe_error", 0.0) > 0.05:
            found["probe over first"] = now["weights/probe_error"] / max(median(self._probes), 1e-9)
        if len(steps) >= FIRST:
            now_lost, lost_before = (
                sum(num for reason, num in one.dropped.items() if reason not in SCREENED) for one in (last, steps[-FIRST])
            )
            lost = now_lost - lost_before
            found["groups lost"] = lost / max(lost + self._groups_per_step * (last.step - steps[-FIRST].step), 1)
        if now.get("idle/learner", 1.0) < 0.1:
            found["idle beside a busy learner"] = last.generators_idle
        if now.get("idle/learner", 0.0) > 0.1 and now.get("time/generate_mean_s"):
            found["scoring over generating"] = now.get("time/score_mean_s", 0.0) / now["time/generate_mean_s"]
        return found

    def _usual(self, name: str) -> float:
        """Return the median over the steps before; 0: too few are known."""
        values = [step.metrics[name] for step in list(self._steps)[:-1] if name in step.metrics]
        return median(values) if len(values) >= FIRST else 0.0

    def _of_policy(self, now: Mapping[str, float]) -> dict[str, float]:
        spread = max(now.get("ratio/chi2_token", 0.0), now.get("ratio/correction_std", 0.0))
        found = {"drift": max(abs(now.get("kl/k1", 0.0)) / 0.1, spread)}
        if ratio := now.get("ratio/mean", 0.0):
            found["ratio off one"] = max(ratio, 1 / ratio)
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
        if "reward/min" in now and (now["reward/min"] < self._most - 0.1 * span or (span == 0 and len(self._steps) >= 3)):
            found["spread below best"] = now.get("reward/max", math.inf) - now["reward/min"]
        if last.reward_mean < (self._least + self._most) / 2 and "reward/zero_spread_fraction" in now:
            found["spreadless below middle"] = now["reward/zero_spread_fraction"]
        kept = [self._accuracy / self._best_accuracy] if self._accuracy is not None and self._best_accuracy else []
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
        """Return until when there is room at this pace, a median (what goes at once is none), and how slow a generator is."""
        found, made = dict[str, float](), list[float]()
        held = sum(value for name, value in last.metrics.items() if name.startswith(HELD))
        for name, value in last.metrics.items():
            if name not in {DISK, MEMORY} and not name.startswith(MADE):
                continue
            looks = self._looks[name]
            if not looks or last.time_s - looks[-1][0] >= ROOM_S:
                looks.append((last.time_s, -held if name == MEMORY else value))  # others' memory comes and goes
            if name.startswith(MADE):
                if len(looks) > 6 and looks[-1][1] >= looks[-7][1]:  # else it has begun anew
                    made.append(looks[-1][1] - looks[-7][1])
            elif len(looks) == LOOKS:
                pace = median((before - after) / (until - since) for (since, before), (until, after) in itertools.pairwise(looks))
                if pace > 0:
                    found[f"hours of {name}"] = value / pace / 3600
        if len(made) > 1 and last.generators_idle < 0.5 and median(made):
            found["slowest generator"] = min(made) / median(made)
        return found
