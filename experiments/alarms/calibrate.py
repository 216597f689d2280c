"""How often the alarms' rules are wrong: `python experiments/alarms/calibrate.py FOLDER...` over the run folders in each FOLDER.

Every run's steps and evaluations go through `asyncrl.observe.alarms` again, as the run's own controller sent them there. Writes
results.json and RESULTS.md.

A run has collapsed where its reward fell and stayed down: the median reward of ten steps has less than half of what was gained,
`reward.collapse`'s own rule. The fall is the first of the steps for which that rule was met. A run is healthy where it kept at
least nine tenths of what the best run of its folder with its seed gained in reward. Of those in between, which learned less, a
warning may well be right: they count as neither. A warning is an alarm of level `warning` or `error`; `info` is about speed.

- False warnings: those of healthy runs, for 1,000 steps.
- Warned in time: collapsed runs with a warning, `reward.collapse` aside, at least five steps before the fall.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from asyncrl.config.load import load_config
from asyncrl.observe.alarms import RULES, Alarms
from asyncrl.observe.steps import STEPS_FILE, read_evals, read_steps

HERE = Path(__file__).parent
COLLAPSE = "reward.collapse"
BEFORE = 5
"""Steps before the fall at which a warning is in time."""
ENDS = 30
"""Steps at the beginning and at the end over which the reward is averaged."""
KEPT = 0.9
"""Of the best run's gain, by a healthy one."""
FALSE_GOAL, IN_TIME_GOAL = 1.0, 0.9


@dataclass
class Judged:
    """One run."""

    run: str
    steps: int
    among: str
    """Those of the same folder and seed are compared."""
    begin: float
    end: float
    """Mean rewards."""
    fall: int | None = None
    """Version at which the reward was down, for good; None: it has not collapsed."""
    raised: list[tuple[str, int]] = field(default_factory=list)
    """Rules and the versions at which they raised an alarm."""

    def in_time(self) -> list[str]:
        """Return the rules that warned in time; none of a healthy run."""
        return [] if self.fall is None else [rule for rule, at in self.raised if rule != COLLAPSE and at <= self.fall - BEFORE]


def judge(folder: Path) -> Judged:
    """Send a run's steps and evaluations through the rules."""
    config = load_config(folder / "config.toml")
    alarms = Alarms(config.algorithm.groups_per_step)
    levels, needed = {rule.name: rule.level for rule in RULES}, {rule.name: rule.needed for rule in RULES}
    steps, evals = read_steps(folder), read_evals(folder)
    place, rewards = folder.parent.parent.name, [report.reward_mean for report in steps]
    ends = fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])
    judged = Judged(f"{place}/{folder.name}", len(steps), f"{place} {config.seed}", *ends)
    for report in steps:
        while evals and evals[0].version < report.version:
            if (accuracy := evals.pop(0).accuracy) is not None:
                alarms.take_evaluation(accuracy)
        for alarm in alarms.take(report):
            if alarm.rule == COLLAPSE:
                judged.fall = None if alarm.is_over else report.version - needed[COLLAPSE] + 1
            if not alarm.is_over and levels[alarm.rule] != "info":
                judged.raised.append((alarm.rule, report.version))
    return judged


def gain_of(run: Judged) -> float:
    """Return what a run gained."""
    return run.end - run.begin


def report(runs: list[Judged]) -> str:
    """Return the tables."""
    best: dict[str, Judged] = {}
    for run in runs:
        if run.end > best.get(run.among, run).end or run.among not in best:
            best[run.among] = run
    fallen = [run for run in runs if run.fall is not None]
    healthy = [run for run in runs if run.fall is None and gain_of(run) >= KEPT * gain_of(best[run.among])]
    others = [run for run in runs if run not in healthy and run not in fallen]
    num_steps = sum(run.steps for run in healthy)
    false = Counter(rule for run in healthy for rule, _ in run.raised)
    in_time = [run for run in fallen if run.in_time()]
    rate, share = 1000 * false.total() / max(num_steps, 1), len(in_time) / max(len(fallen), 1)
    lines = [
        "# How often the alarms are wrong",
        "",
        "Made by `python experiments/alarms/calibrate.py`; its docstring says what counts as a fall and as a warning.",
        "",
        "| | value | goal | holds |",
        "|---|---|---|---|",
        f"| warnings in 1,000 steps of {len(healthy)} healthy runs ({num_steps:,} steps) | {rate:.2f} | {FALSE_GOAL:g} | "
        f"{'yes' if rate <= FALSE_GOAL else 'no'} |",
        f"| of {len(fallen)} collapsed runs, warned at least {BEFORE} steps before the fall | {share:.2f} | {IN_TIME_GOAL:g} | "
        f"{'yes' if share >= IN_TIME_GOAL else 'no'} |",
        "",
        f"{len(others)} runs learned less than {KEPT:.0%} of what the best gained and did not collapse: "
        f"{sum(bool(run.raised) for run in others)} of them were warned of.",
        "",
        f"| rule | warnings in healthy runs | in time, of {len(fallen)} collapsed runs | at all, of {len(fallen)} |",
        "|---|---|---|---|",
    ]
    timely = Counter(rule for run in fallen for rule in set(run.in_time()))
    at_all = Counter(rule for run in fallen for rule in {rule for rule, _ in run.raised})
    seen = [rule.name for rule in RULES if rule.name in false | at_all]
    silent = [f"`{rule.name}`" for rule in RULES if rule.name not in seen and rule.level != "info"]
    lines += [f"| `{name}` | {false[name]} | {timely[name]} | {at_all[name]} |" for name in seen]
    lines += ["", f"Raised in none of these runs: {', '.join(silent)}.", ""]
    lines += ["| run | fell at step | warnings, each rule's first |", "|---|---|---|"]
    for run in [run for run in runs if run.raised]:
        first = dict(reversed(run.raised))
        told = ", ".join(f"`{rule}` {at}" for rule, at in sorted(first.items(), key=lambda one: one[1]))
        state = "healthy" if run in healthy else "learned less" if run in others else run.fall
        lines.append(f"| {run.run} | {state} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Judge every run, write results.json and RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of run folders, such as experiments/staleness/cells")
    folders = [path.parent for given in parser.parse_args().folders for path in sorted(given.glob(f"*/{STEPS_FILE}"))]
    if not folders:
        raise SystemExit("there are no runs in these folders")
    runs = [judge(folder) for folder in folders]
    (HERE / "results.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8")
    text = report(runs)
    (HERE / "RESULTS.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
