"""How often the alarms' rules are wrong: `python experiments/alarms/calibrate.py FOLDER...` over the run folders in each FOLDER.

Every run's steps and evaluations go through `asyncrl.observe.alarms` again, as the run's own controller sent them there. Writes
results.json and RESULTS.md. Runs in results.json that are in none of these folders stay there, so the tables can be made again
without any folder.

What a fall is says the reward alone, and no rule. The runs' rewards are 1 for a right answer and 0 for another, so held-out
accuracy and mean reward are one scale. Rewards are averaged over three steps each. A run fell where these means are low from some
step to its end. Low is less than half of version 0's held-out accuracy, or, once 0.1 was gained on that, less than half of the
most that was gained. The fall is at the last of the first three low steps.

A run is healthy where it kept at least nine tenths of what the best run of its folder with its seed gained on version 0. Of those
in between, which learned less, a warning may well be right: they count as neither. A warning is an alarm of level `warning` or
`error`; `info` is about speed, and is counted apart.

- False warnings: those of healthy runs, for 1,000 steps.
- Warned in time: fallen runs with a warning at least five steps before the fall. For a fall at step 6 that is step 1, whose data
  and policy are still version 0's: only the size of the update tells anything there.

Thresholds were chosen on the runs with seeds 0 to 2. Those with other seeds were looked at afterwards, and nothing was changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from asyncrl.config.load import load_config
from asyncrl.observe.alarms import RULES, Alarms, Rule
from asyncrl.observe.steps import STEPS_FILE, read_evals, read_steps
from asyncrl.schema.status import Alarm

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
LEVELS = {rule.name: rule.level for rule in RULES}
TOGETHER = 3
"""Steps whose rewards are averaged."""
LEAST_GAIN = 0.1
"""Less than this is not counted as gained."""
BEFORE = 5
"""Steps before the fall at which a warning is in time."""
CHOSEN_ON = 3
"""Runs with a seed below this were looked at while the thresholds were chosen."""
END = 30
"""Steps at the end over which the reward is averaged."""
KEPT = 0.9
"""Of the best run's gain, by a healthy one."""
FALSE_GOAL, IN_TIME_GOAL = 1.0, 0.9


class Looked(Alarms):
    """Notes for which rules there was anything to look at: figures other than 0."""

    def __init__(self, groups_per_step: int) -> None:
        super().__init__(groups_per_step)
        self.names: set[str] = set()

    def _look(self, rules: Iterable[Rule], figures: Mapping[str, float], version: int, seen: str = "") -> list[Alarm]:
        self.names |= {rule.name for rule in rules if figures.get(rule.figure)}
        return super()._look(rules, figures, version, seen)


@dataclass
class Judged:
    """One run."""

    run: str
    steps: int
    among: str
    """Those of the same folder and seed are compared."""
    start: float
    """Version 0's held-out accuracy."""
    end: float
    """Mean reward of the last steps."""
    rewards: list[tuple[int, float]]
    """Mean of a few steps, and the version that the last of them made."""
    raised: list[tuple[str, int]] = field(default_factory=list)
    """Rules, without those of level info, and the versions at which they raised an alarm."""
    informed: list[tuple[str, int]] = field(default_factory=list)
    """The same of the rules of level info."""
    looked: list[str] = field(default_factory=list)
    """Rules that had figures other than 0 to look at."""

    @property
    def arm(self) -> str:
        return self.run.rpartition("-seed")[0]

    @property
    def is_new(self) -> bool:
        return int(self.run.rpartition("-seed")[2]) >= CHOSEN_ON

    @property
    def gain(self) -> float:
        return self.end - self.start

    @property
    def fall(self) -> int | None:
        """Return the version at which the reward was low for good; None: it was not."""
        fallen, most = None, self.start
        for version, reward in self.rewards:
            least = self.start / 2 if most < self.start + LEAST_GAIN else (self.start + most) / 2
            fallen = (fallen or version) if reward < least else None
            most = max(most, reward)
        return fallen

    def in_time(self) -> list[str]:
        """Return the rules that warned in time; none of a run that did not fall."""
        return [] if self.fall is None else [rule for rule, at in self.raised if at <= self.fall - BEFORE]


def judge(folder: Path) -> Judged:
    """Send a run's steps and evaluations through the rules."""
    config = load_config(folder / "config.toml")
    alarms, steps, evals = Looked(config.algorithm.groups_per_step), read_steps(folder), read_evals(folder)
    place, rewards = folder.parent.parent.name, [report.reward_mean for report in steps]
    parts = [steps[at : at + TOGETHER] for at in range(0, len(steps), TOGETHER)]
    means = [(part[-1].version, round(fmean(report.reward_mean for report in part), 5)) for part in parts]
    start = next(report.accuracy for report in evals if report.version == 0 and report.accuracy is not None)
    judged = Judged(f"{place}/{folder.name}", len(steps), f"{place} {config.seed}", start, fmean(rewards[-END:]), means)
    for report in steps:
        while evals and evals[0].version < report.version:
            if (found := evals.pop(0)).accuracy is not None:
                alarms.take_evaluation(found.accuracy, found.num_samples)
        for alarm in alarms.take(report):
            if not alarm.is_over:
                (judged.informed if LEVELS[alarm.rule] == "info" else judged.raised).append((alarm.rule, report.version))
    judged.looked = sorted(alarms.names)
    return judged


def report(runs: list[Judged]) -> str:
    """Return the tables."""
    best: dict[str, float] = defaultdict(float)
    for run in runs:
        best[run.among] = max(best[run.among], run.gain)
    fallen = [run for run in runs if run.fall is not None]
    healthy = [run for run in runs if run.fall is None and run.gain >= KEPT * best[run.among]]
    others = [run for run in runs if run not in healthy and run not in fallen]
    return "\n".join([
        "# How often the alarms are wrong",
        "",
        "Made by `python experiments/alarms/calibrate.py`; its docstring says what counts as a fall and as a warning.",
        "",
        *goals(healthy, others, fallen),
        "",
        f"{len(others)} runs learned less than {KEPT:.0%} of what the best gained and did not fall: "
        f"{sum(bool(run.raised) for run in others)} of them were warned of.",
        "",
        *by_arm([*healthy, *others], healthy),
        "",
        *by_rule(runs, healthy, fallen),
        "",
        *by_run(runs, healthy),
    ])


def goals(healthy: list[Judged], others: list[Judged], fallen: list[Judged]) -> list[str]:
    """Return the table of what was aimed at, and below it what is no warning."""
    rows = [
        ("warnings in 1,000 steps of healthy runs", healthy, false_rate, FALSE_GOAL),
        ("the same with the runs that learned less", [*healthy, *others], false_rate, FALSE_GOAL),
        (f"of the runs that fell, warned at least {BEFORE} steps before", fallen, timely_share, IN_TIME_GOAL),
    ]
    lines = ["| | chosen on: seeds 0 to 2 | validated on: other seeds | goal | holds on these |", "|---|---|---|---|---|"]
    for what, some, measure, goal in rows:
        (_, chosen), (value, told) = [measure([run for run in some if run.is_new is new]) for new in (False, True)]
        holds = value <= goal if measure is false_rate else value >= goal
        lines.append(f"| {what} | {chosen} | {told} | {goal:g} | {'yes' if holds else 'no'} |")
    informed = Counter(rule for run in healthy for rule, _ in run.informed)
    told = ", ".join(f"`{rule}` {count}" for rule, count in informed.items()) or "none"
    return [*lines, "", f"Alarms of level info, which are no warnings, in the {len(healthy)} healthy runs: {told}."]


def false_rate(runs: list[Judged]) -> tuple[float, str]:
    """Return warnings for 1,000 steps, and that with what it is of."""
    steps = sum(run.steps for run in runs)
    rate = 1000 * sum(len(run.raised) for run in runs) / max(steps, 1)
    return rate, f"{rate:.2f} ({len(runs)} runs, {steps:,} steps)"


def timely_share(runs: list[Judged]) -> tuple[float, str]:
    """Return the share that was warned of in time, and that with what it is of."""
    timely = sum(bool(run.in_time()) for run in runs)
    share = timely / max(len(runs), 1)
    return share, f"{share:.2f} ({timely} of {len(runs)})"


def by_arm(runs: list[Judged], healthy: list[Judged]) -> list[str]:
    """Return a row for each setting whose runs did not fall."""
    lines = [
        "| did not fall | runs | healthy | steps of these | their warnings | warnings in the others |",
        "|---|---|---|---|---|---|",
    ]
    for arm, group in itertools.groupby(sorted(runs, key=lambda run: run.run), key=lambda run: run.arm):
        ran = list(group)
        well, less = [run for run in ran if run in healthy], [run for run in ran if run not in healthy]
        counts = [Counter(rule for run in some for rule, _ in run.raised) for some in (well, less)]
        raised = [", ".join(f"`{rule}` {count}" for rule, count in found.items()) or "none" for found in counts]
        steps = f"{sum(run.steps for run in well):,}"
        lines.append(
            f"| {arm} | {len(ran)} | {len(well)} | {steps} | {raised[0] if well else ''} | {raised[1] if less else ''} |"
        )
    return lines


def by_rule(runs: list[Judged], healthy: list[Judged], fallen: list[Judged]) -> list[str]:
    """Return a row for each rule that was raised, and what the others had to look at."""
    false = Counter(rule for run in healthy for rule, _ in run.raised)
    timely = Counter(rule for run in fallen for rule in set(run.in_time()))
    at_all = Counter(rule for run in fallen for rule in {rule for rule, _ in run.raised})
    ever = {rule for run in runs for rule, _ in run.raised}
    looked = {rule for run in runs for rule in run.looked}
    lines = [
        f"| rule | warnings in healthy runs | in time, of {len(fallen)} that fell | at all, of {len(fallen)} |",
        "|---|---|---|---|",
        *(f"| `{name}` | {false[name]} | {timely[name]} | {at_all[name]} |" for name in LEVELS if name in ever),
    ]
    silent = [name for name, level in LEVELS.items() if name not in ever and level != "info"]
    quiet, absent = [[f"`{name}`" for name in silent if (name in looked) is had] for had in (True, False)]
    return [
        *lines,
        "",
        f"Looked at, and raised in none of these runs: {', '.join(quiet)}.",
        "",
        f"Not looked at, because their figure was absent or 0 in every step: {', '.join(absent)}. `stall.early` is about steps "
        "that are open, of which a run's files say nothing.",
    ]


def by_run(runs: list[Judged], healthy: list[Judged]) -> list[str]:
    """Return a row for each run with warnings."""
    lines = ["| run | fell at step | warnings, each rule's first |", "|---|---|---|"]
    for run in [run for run in runs if run.raised]:
        first = dict(reversed(run.raised))
        told = ", ".join(f"`{rule}` {at}" for rule, at in sorted(first.items(), key=lambda one: one[1]))
        state = run.fall or ("healthy" if run in healthy else "learned less")
        lines.append(f"| {run.run} | {state} | {told} |")
    return lines


def main() -> None:
    """Judge every run, write results.json and RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="folders of run folders, such as experiments/alarms/cells")
    judged = [judge(path.parent) for given in parser.parse_args().folders for path in sorted(given.glob(f"*/{STEPS_FILE}"))]
    there = {run.run: run for run in [Judged(**one) for one in json.loads(RESULTS.read_text(encoding="utf-8"))] + judged}
    runs = [there[name] for name in sorted(there)]
    lines = ",\n".join(json.dumps(asdict(run)) for run in runs)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    text = report(runs)
    (HERE / "RESULTS.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
