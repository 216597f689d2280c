"""What the controller's reports do when the disk is full, and how large they become; the rest is seen in whole runs."""

from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.run import ObserveConfig, RunConfig
from asyncrl.control.lifecycle.failure_watch import Wait
from asyncrl.control.reporter import MOST_SPANS_BYTES, Reporter
from asyncrl.observe.sinks import MetricSinks
from asyncrl.observe.spans import SPANS_FILE, read_spans
from asyncrl.observe.steps import EVENTS_FILE, MOST_LINE_BYTES, STEPS_FILE, RunEvent, StepReport, read_events
from asyncrl.schema.control import Heartbeat
from asyncrl.schema.samples import StepDone
from asyncrl.schema.weights import VersionLive
from tests.builders import bytes_read, score_of, write_rows
from tests.virtual_clock import VirtualClock


async def test_what_cannot_be_closed_keeps_nothing_else_open(tmp_path):
    (tmp_path / SPANS_FILE).symlink_to("/dev/full")
    sinks = [Mock(), Mock(close=Mock(side_effect=OSError("no network"))), Mock()]
    reporter = Reporter(RunConfig(), tmp_path, MetricSinks(tmp_path, sinks), VirtualClock())
    reporter.note_answers([score_of(0, 0)])
    with pytest.raises(OSError, match=r"No space left|no network"):
        await reporter.close()
    assert all(sink.close.called for sink in sinks)


async def test_a_long_run_is_resumed_from_the_ends_of_its_files(tmp_path):
    metrics, text = {f"m/{number}": 0.1 for number in range(500)}, "w" * 5000
    steps = [StepReport(step=step, version=step + 1, time_s=0.0, reward_mean=0.5, metrics=metrics) for step in range(1200)]
    write_rows(tmp_path / STEPS_FILE, *steps)
    write_rows(tmp_path / EVENTS_FILE, *(RunEvent(seq=seq, time_s=0.0, kind="swap", text=text) for seq in range(1, 1201)))
    length, before = sum((tmp_path / name).stat().st_size for name in (STEPS_FILE, EVENTS_FILE)), bytes_read()
    assert length > 10 * MOST_LINE_BYTES
    reporter = Reporter(RunConfig(), tmp_path, MetricSinks(tmp_path), VirtualClock())
    assert bytes_read() - before < 5 * MOST_LINE_BYTES  # twice of each file: its writer looks for a torn line
    assert reporter.newest == steps[-1]
    reporter.note_event("phase", "running")
    await reporter.close()
    assert [event.seq for event in read_events(tmp_path, after=1199)] == [1200, 1201]


@pytest.mark.parametrize(("advantage", "is_checked"), [("grpo", True), ("gae", False), ("mine.py:f", True)])
async def test_equal_rewards_are_no_dead_policy_where_groups_are_not_compared(tmp_path, advantage, is_checked):
    config = RunConfig(algorithm=AlgorithmConfig(kind="policy", advantage=advantage))
    reporter = Reporter(config, tmp_path, MetricSinks(tmp_path), VirtualClock())
    rewards = {"reward/zero_spread_fraction": 1.0, "reward/min": 0.0, "reward/max": 1.0}
    steps = [StepReport(step=step, version=step + 1, time_s=step, reward_mean=0.2, metrics=rewards) for step in range(12)]
    told = [alarm.rule for step in steps for alarm in reporter.alarms.take(step)]
    await reporter.close()
    assert told == ["reward.dead"] * is_checked


@pytest.mark.parametrize(("config", "is_checked"), [
    (RunConfig(), True), (RunConfig(algorithm=AlgorithmConfig(kind="dpo")), False),
    (RunConfig(algorithm=AlgorithmConfig(kind="dpo"), observe=ObserveConfig(alarms={"kl.reference": "warn"})), True),
])  # fmt: skip
async def test_the_distance_from_the_reference_is_not_judged_on_pairs(tmp_path, config, is_checked):
    reporter = Reporter(config, tmp_path, MetricSinks(tmp_path), VirtualClock())
    metrics = {"kl/reference_mean": 9.0, "data/response_tokens_mean": 4.0}
    steps = [StepReport(step=step, version=step + 1, time_s=step, reward_mean=0.5, metrics=metrics) for step in range(6)]
    told = [alarm.rule for step in steps for alarm in reporter.alarms.take(step)]
    await reporter.close()
    assert told == ["kl.reference"] * is_checked


async def test_spans_on_disk_are_bounded_and_the_newest_are_kept(tmp_path):
    reporter = Reporter(RunConfig(), tmp_path, MetricSinks(tmp_path), VirtualClock())
    sizes = []
    for tick in range(10):
        for index in range(50):
            reporter.note_answers([score_of(tick, index, worker="w" * (MOST_SPANS_BYTES // 200))])
        reporter.tick([], [])
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("spans*")))
    await reporter.close()
    assert (tmp_path / "spans.old.jsonl").exists()
    assert max(sizes) <= 3 * MOST_SPANS_BYTES  # two files, and what one tick adds


async def test_a_wait_is_one_span_from_its_beginning_to_when_it_was_last_heard_of(tmp_path):
    reporter = Reporter(RunConfig(), tmp_path, MetricSinks(tmp_path), VirtualClock())
    beat = Heartbeat("generator-0", 2.0, "a group", 1.5)
    groups = [Wait("generator-0", "a group", 1.5), Wait("learner", "the batch of step 3", 1.0)]
    reporter.tick([*groups, Wait("admission", "the staleness bound: 12 groups hold a place", 0.0)], [beat])
    reporter.tick([*groups, Wait("admission", "the staleness bound: 16 groups hold a place", 0.0)], [beat])
    reporter.tick([Wait("generator-0", "resume", 3.0)], [Heartbeat("generator-0", 3.0, "resume", 3.0)])
    reporter.tick([], [])
    for since_s, heard_s in ((4.0, 5.0), (5.5, 6.0)):  # it works between the two, and the second lasts until the end
        reporter.tick([Wait("reward-0", "a sample to score", since_s)], [Heartbeat("reward-0", heard_s, "a sample", since_s)])
    await reporter.close()
    assert [(one.process, one.attributes["why"], one.start_s, one.end_s) for one in read_spans(tmp_path)] == [
        ("generator-0", "a group", 1.5, 2.0), ("admission", "the staleness bound", 0.0, 0.0), ("generator-0", "resume", 3.0, 3.0),
        ("reward-0", "a sample to score", 4.0, 5.0), ("reward-0", "a sample to score", 5.5, 6.0),
    ]  # fmt: skip


async def test_of_several_generators_the_slowest_and_the_one_that_differs_most_is_told_until_it_is_gone(tmp_path):
    dispatcher, peers = Mock(generated_tokens=0, refused_samples=0), Mock(values=list, of=lambda _: [])
    dispatcher.buffer.state.lead.versions = 1.0
    dispatcher.buffer.counts.return_value = Mock(ready=0, running=0, scoring=0, dropped={}, failed={})
    reporter = Reporter(RunConfig(), tmp_path, MetricSinks(tmp_path), VirtualClock())

    def told():
        metrics = reporter._step_metrics(StepDone(0, 1, {}, 0.0, 0.0), dispatcher, peers, 1.0)
        return [metrics[f"weights/{name}"] for name in ("fetch_ms", "swap_ms", "probe_error")]

    reporter.note_live(VersionLive(1, "generator-0", 0.0, 20.0, 9.0, 0.5), peers)
    reporter.note_live(VersionLive(1, "generator-1", 0.0, 30.0, 3.0, 0.001), peers)
    assert told() == [30.0, 9.0, 0.5]
    reporter.forget("generator-0")
    assert told() == [30.0, 3.0, 0.001]
    await reporter.close()


async def test_the_time_of_scoring_is_a_mean_over_samples_however_many_are_judged_together(tmp_path):
    dispatcher, peers = Mock(generated_tokens=0, refused_samples=0), Mock(values=list, of=lambda _: [])
    dispatcher.buffer.state.lead.versions = 1.0
    dispatcher.buffer.counts.return_value = Mock(ready=0, running=0, scoring=0, dropped={}, failed={})
    reporter = Reporter(RunConfig(), tmp_path, MetricSinks(tmp_path), VirtualClock())
    together = score_of(0, 0, started_s=1.0, finished_s=9.0)
    alone = score_of(1, 0, started_s=1.0, finished_s=5.0)
    reporter.note_answers([replace(together, scores=together.scores * 3), alone])
    metrics = reporter._step_metrics(StepDone(0, 1, {}, 0.0, 0.0), dispatcher, peers, 1.0)
    assert metrics["time/score_mean_s"] == 7.0
    await reporter.close()


async def test_a_burst_of_lost_groups_is_one_event_and_what_the_algorithm_screens_is_none(tmp_path):
    clock, dispatcher, peers = VirtualClock(), Mock(generated_tokens=0), Mock(values=list, of=lambda _: [])
    dispatcher.buffer.state.lead.versions = 1.0
    reporter = Reporter(RunConfig(), tmp_path, MetricSinks(tmp_path), clock)
    a_step = RunConfig().algorithm.groups_per_step
    lost = [(1000, 9, 0), (1000, 9 + a_step, 0), (1000 + a_step - 1, 9, 0), (1000 + 2 * a_step, 9, 3), (1000 + 4 * a_step, 9, 3)]
    for stale, screened, failed in lost:  # what was lost before this controller began is no news
        clock.advance(1.0)
        counts = {"dropped": {"stale": stale, "no spread": screened}, "failed": {"reward": failed}}
        dispatcher.buffer.counts.return_value = Mock(ready=0, running=0, scoring=0, **counts)
        reporter.note_second(dispatcher, peers, learner_idle=False)
    told = [(event.kind, event.text) for event in read_events(tmp_path)]
    assert told == [("drops", f"{a_step + 1} stale, 3 reward")]
    await reporter.close()
