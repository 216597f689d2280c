"""Each rule is raised by what it is for, and silent over a healthy run; the page shows the same table as the code."""

import gzip
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from asyncrl.config.run import AlarmRule
from asyncrl.observe.alarms import RULES, Alarms, Raised, raised_in
from asyncrl.observe.steps import RunEvent, StepReport
from asyncrl.schema.status import RELEASED

ROOT = Path(__file__).resolve().parents[3]
PAGE, QUICKSTART = ROOT / "docs" / "observability.md", ROOT / "tests" / "golden" / "numbers" / "quickstart_steps.jsonl.gz"
HEALTHY = {
    "mismatch/kl_k3": 1e-4, "weights/sync_ms": 20.0, "time/step_s": 0.2, "policy/grad_norm": 1.0,
    "policy/updates": 1.0, "policy/relative_update": 0.01, "policy/kept_fraction": 1.0, "ratio/ess": 0.95, "ratio/mean": 1.0,
    "kl/reference_mean": 0.01, "data/response_tokens_mean": 4.0, "reward/min": 0.0, "reward/max": 1.0, "policy/entropy": 1.0,
    "reward/zero_spread_fraction": 0.2, "data/truncated_fraction": 0.01, "idle/learner": 0.1,
    "weights/probe_error": 1e-5, "weights/blocked_ms": 2.0, "kl/k1": 0.01, "ratio/chi2_token": 0.05, "ratio/correction_std": 0.1,
    "time/generate_mean_s": 0.1, "time/score_mean_s": 0.01,
    "bias/flagged": 0.0, "disk/free_gb": 100.0, "memory/available_gb": 10.0, "memory/peak_share": 0.5,
}  # fmt: skip


def report(step, reward=0.5, *, idle=0.1, lost=0, **metrics):
    return StepReport(
        step=step, version=step + 1, time_s=step * 0.2, reward_mean=reward, generators_idle=idle,
        dropped={"stale": lost} if lost else {}, metrics={**HEALTHY, **metrics},
    )  # fmt: skip


def raised(reports, switched_off=()):
    alarms = Alarms(groups_per_step=8)
    alarms.switch_off(switched_off)
    return [alarm for one in reports for alarm in alarms.take(one)]


def test_equal_rewards_of_a_resumed_run_may_be_those_of_a_solved_task():
    solved = [report(step, 1.0, **{"reward/min": 1.0, "reward/max": 1.0}) for step in range(8)]
    for is_resumed in (False, True):
        alarms = Alarms(8, [report(step) for step in range(10)] if is_resumed else ())
        told = [alarm.rule for one in solved for alarm in alarms.take(one)]
        assert told == ([] if is_resumed else ["reward.equal"])


def test_an_alarm_shows_the_metrics_that_its_text_names():
    off = {"ratio/mean": 0.006, "kl/k1": 5.13}
    told = {alarm.rule: alarm.text for alarm in raised([report(step, **off) for step in range(6)])}
    assert "(is 0.006, bound 2, 5 of 5 steps)" in told["off_policy.ratio"]
    assert "(kl/k1 5.13, ratio/chi2_token 0.05, ratio/correction_std 0.1, 2 of 2 steps)" in told["off_policy.drift"]


def test_a_resumed_run_keeps_the_initial_entropy_of_the_whole_run():
    fallen = [report(200 + step, 0.5, **{"policy/entropy": 0.35}) for step in range(30)]
    alarms = Alarms(8, [report(step, **{"policy/entropy": 0.3}) for step in range(10)])
    assert "entropy.grows" in {alarm.rule for one in fallen for alarm in alarms.take(one)}
    assert not raised(fallen)


def healthy(steps=60):
    """A run that learns: reward goes up, entropy comes down as it is nearly right."""
    return [report(step, 0.1 + 0.85 * step / steps, **{"policy/entropy": 1.0 - 0.95 * step / steps}) for step in range(steps)]


def filling(name):
    """Steps of ten seconds, in which 2 MB of 1 GB that is free go each second, to a process of the run: full after 8 minutes."""

    def of_step(step):
        gone = min(0.002 * 10 * (step - 60), 0.95)
        one = report(step, **{name: 1.0 - gone, "memory/resident_gb/learner": gone if name == "memory/available_gb" else 0.0})
        return msgspec.structs.replace(one, time_s=60 * 0.2 + 10.0 * (step - 60))

    return of_step


def uneven(step):
    """Steps ten seconds long, of three generators of which one makes a third of what the others do."""
    made = {f"process/generated_tokens/generator-{i}": 100.0 * (step - 60) * (1 if i else 1 / 3) for i in range(3)}
    return msgspec.structs.replace(report(step, **made), time_s=60 * 0.2 + 10.0 * (step - 60))


BY_METRICS = {
    "weights.wrong": {"weights/probe_error": 0.5}, "weights.blocked": {"weights/blocked_ms": 50.0},
    "weights.mismatch": {"mismatch/kl_k3": 0.02}, "weights.lag": {"weights/sync_ms": 1500.0},
    "off_policy.drift": {"kl/k1": -0.2}, "off_policy.ess": {"ratio/ess": 0.2}, "off_policy.lost": {"ratio/ess": 0.05},
    "off_policy.dropped": {"policy/kept_fraction": 0.01},
    "off_policy.ratio": {"ratio/mean": 3.0}, "kl.reference": {"kl/reference_mean": 4.0},
    "gradient.spike": {"policy/grad_norm": 50.0}, "gradient.overflow": {"policy/updates": 0.0},
    "learning_rate.high": {"policy/relative_update": 0.2},
    "entropy.collapse": {"reward": 0.4, "policy/entropy": 0.01}, "entropy.grows": {"reward": 0.4, "policy/entropy": 1.5},
    "length.grows": {"data/response_tokens_mean": 9.0}, "length.truncated": {"data/truncated_fraction": 0.5},
    "score.slow": {"time/score_mean_s": 0.2, "idle/learner": 0.3}, "generation.slow": {"idle/learner": 0.7},
    "reward.equal": {"reward": 0.0, "reward/max": 0.0}, "reward.dead": {"reward": 0.1, "reward/zero_spread_fraction": 0.8},
    "reward.collapse": {"reward": 0.1}, "bias": {"bias/flagged": 1.0}, "memory.device": {"memory/peak_share": 0.97},
    "generation.starved": {"idle": 0.8, "idle/learner": 0.05},
}  # fmt: skip
TROUBLE = {name: lambda step, changed=changed: report(step, **changed) for name, changed in BY_METRICS.items()} | {
    "generation.uneven": uneven,
    "disk.full": filling("disk/free_gb"),
    "memory.full": filling("memory/available_gb"),
    "groups.lost": lambda step: report(step, lost=4 * (step - 60)),
}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.name in TROUBLE], ids=lambda rule: rule.name)
def test_a_rule_is_raised_once_by_its_trouble_and_ends_with_it(rule):
    begun = [report(step, 0.6) for step in range(60)]
    trouble = [TROUBLE[rule.name](60 + step) for step in range(45)]
    end = [report(105 + step, 0.6, lost=trouble[-1].dropped.get("stale", 0)) for step in range(45)]
    end = [msgspec.structs.replace(one, time_s=trouble[-1].time_s + 10.0 * step) for step, one in enumerate(end, 1)]
    told = [alarm for alarm in raised([*begun, *trouble, *end]) if alarm.rule == rule.name]
    assert [alarm.is_over for alarm in told] == [False, True]
    assert rule.advice in told[0].text
    assert told[0].version >= 60 + rule.needed


def test_an_open_step_is_told_once_and_the_next_step_ends_it():
    alarms = Alarms(groups_per_step=8)
    waiting = "learner waits for the batch of step 60 <- reward waits for 8 answers"
    assert alarms.take_open_step(1000.0, 0, waiting) == []  # nobody knows yet how long a step takes
    for one in healthy():
        alarms.take(msgspec.structs.replace(one, metrics={**one.metrics, "time/step_s": 10.0}))
    assert alarms.take_open_step(59.0, 60, waiting) == []
    told = [alarm for open_s in (61.0, 62.0, 63.0) for alarm in alarms.take_open_step(open_s, 60, waiting)]
    assert [(alarm.rule, alarm.is_over) for alarm in told] == [("stall.early", False)]
    assert waiting in told[0].text
    assert [(alarm.rule, alarm.is_over) for alarm in alarms.take(report(60, 0.95))] == [("stall.early", True)]
    assert set(TROUBLE) | {"stall.early", "reward.hollow"} == {rule.name for rule in RULES}


def evaluated(reward_gain, accuracy, at_start=None, num_samples=512):
    """Alarms of 40 steps whose reward grows so from step to step, with an evaluation behind every fifth, maybe one before."""
    alarms, told = Alarms(groups_per_step=8), []
    if at_start is not None:
        alarms.take_evaluation(at_start, num_samples)
    for step in range(40):
        told += alarms.take(report(step, 0.2 + reward_gain * step))
        if step % 5 == 4:
            alarms.take_evaluation(accuracy(step), num_samples)
    return told


def test_held_out_accuracy_that_falls_by_half_is_a_collapse_whatever_the_reward():
    assert [alarm.rule for alarm in evaluated(0.0, lambda step: 0.6 if step < 10 else 0.2)] == ["reward.collapse"]


def test_a_fall_of_held_out_accuracy_that_chance_explains_is_none():
    by_samples = {num: evaluated(0.01, lambda step: 0.05 if step < 5 else 0.0, num_samples=num) for num in (20, 2000)}
    assert not by_samples[20]
    assert {alarm.rule for alarm in by_samples[2000]} == {"reward.collapse", "reward.hollow"}


def test_a_reward_that_goes_up_while_held_out_accuracy_falls_is_hollow_until_that_is_back():
    told = evaluated(0.01, lambda step: 0.6 if 5 < step < 24 else 0.8)
    assert [(alarm.rule, alarm.is_over, alarm.version) for alarm in told] == [
        ("reward.hollow", False, 21), ("reward.hollow", True, 26)
    ]  # fmt: skip
    assert "read samples of high reward" in told[0].text
    from_the_start = evaluated(0.01, lambda _: 0.6, at_start=0.8)
    assert [(alarm.rule, alarm.version) for alarm in from_the_start] == [("reward.hollow", 26)]


def test_alarms_are_told_again_from_the_events_of_a_run():
    def event(seq, subject, text="", kind="alarm"):
        return RunEvent(seq=seq, time_s=float(seq), kind=kind, subject=subject, text=text, version=10 * seq)

    events = [
        event(1, "starting", kind="phase"), event(2, "disk.full", "make room"), event(3, "bias", "wait"),
        event(4, "bias", "bias is over"),
        event(5, "starting", kind="phase"), event(6, "of.another.version", "do"),
    ]  # fmt: skip
    assert raised_in(events) == [
        Raised("disk.full", "warning", 2.0, 20, "make room", 5.0, 50), Raised("bias", "warning", 3.0, 30, "wait", 4.0, 40),
        Raised("of.another.version", "warning", 6.0, 60, "do"),
    ]  # fmt: skip


def test_the_quickstart_raises_nothing():
    """All 550 steps of the shipped quickstart, recorded beside other work (tests/golden/numbers/README.md)."""
    alarms, told = Alarms(groups_per_step=64), []
    with gzip.open(QUICKSTART, "rb") as file:
        steps = [msgspec.json.decode(line, type=StepReport) for line in file]
    for step in steps:
        told += alarms.take_open_step(step.metrics["time/step_s"], step.version, "") + alarms.take(step)
    assert (len(steps), steps[-1].reward_mean > 0.8, told) == (550, True, [])
    looked = {"idle/learner", "policy/entropy", "policy/relative_update", "weights/probe_error", "memory/available_gb"}
    assert looked <= steps[-1].metrics.keys()


def test_a_run_that_learns_raises_nothing_nor_does_one_odd_step_nor_steps_without_metrics():
    steps = healthy()
    assert raised(steps) == []
    odd = {name: value for make in TROUBLE.values() for name, value in make(30).metrics.items() if HEALTHY.get(name) != value}
    steps[30] = report(30, 0.1, **odd)
    assert {alarm.rule for alarm in raised(steps)} == {"learning_rate.high"}  # a setting, which is no odd step
    assert raised([msgspec.structs.replace(one, metrics={}) for one in steps]) == []
    for intended in ("no spread", RELEASED):
        assert raised([msgspec.structs.replace(one, dropped={intended: 4 * one.step}) for one in healthy()]) == []


def test_memory_that_others_take_is_no_trouble_of_the_run():
    def of_step(step):
        one = filling("memory/available_gb")(step)
        return msgspec.structs.replace(one, metrics={**one.metrics, "memory/resident_gb/learner": 0.5})

    assert raised([of_step(60 + step) for step in range(45)]) == []


def test_what_is_switched_off_is_not_raised():
    steps = [report(step, **{"ratio/ess": 0.05}) for step in range(20)]
    assert {alarm.rule for alarm in raised(steps)} == {"off_policy.ess", "off_policy.lost"}
    assert {alarm.rule for alarm in raised(steps, switched_off=["off_policy.lost"])} == {"off_policy.ess"}


def test_config_page_and_code_have_the_same_rules():
    assert list(get_args(AlarmRule)) == [rule.name for rule in RULES]
    row = r"^\| `([a-z_.]+)` \| (\w+) \| (.*?) \| (\d+) of (\d+) \| (.*?) \| (.*) \|$"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    told = [(rule.name, rule.level, rule.meets, str(rule.needed), str(rule.of), rule.source, rule.advice) for rule in RULES]
    assert rows == told
