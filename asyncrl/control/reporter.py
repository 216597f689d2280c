"""What the run was like: step and evaluation reports, spans, metrics, and the pictures at the end.

Owns steps.jsonl, eval.jsonl, spans.jsonl and the sinks of one run, and the little memory that rates need. Decides nothing.
Writing the report (matplotlib) is the one slow thing and runs on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import msgspec
import psutil

from asyncrl.buffer import events as ev
from asyncrl.buffer.payloads import TakenStep
from asyncrl.buffer.staleness import VersionCounts
from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.peers import Peers
from asyncrl.control.stall_detector import Wait
from asyncrl.observe import spans as sp
from asyncrl.observe.alarms import Alarms
from asyncrl.observe.decisions.bias import SelectionBias
from asyncrl.observe.metrics import finite
from asyncrl.observe.samples import rows_of
from asyncrl.observe.sinks import MetricSinks, Webhook
from asyncrl.observe.steps import (
    EVAL_FILE,
    EVENTS_FILE,
    STEPS_FILE,
    EvalReport,
    EventKind,
    JsonLines,
    RunEvent,
    StepReport,
    read_evals,
    read_events,
    read_steps,
)
from asyncrl.schema.batches import StepDone
from asyncrl.schema.control import Heartbeat, ProcessKind
from asyncrl.schema.samples import InferResult, Samples, Scores
from asyncrl.schema.status import Alarm
from asyncrl.schema.weights import VersionLive, WeightsAvailable

log = logging.getLogger(__name__)

ALARM_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
STEPS_WITH_METRICS = 1000
"""Newest steps whose metrics stay in memory; metrics.jsonl and steps.jsonl have them all."""
REMEMBERED_STEPS = 8
"""Taken steps whose staleness figures are kept until they are done."""
MOST_SPANS_BYTES = 32 << 20
"""Of spans.jsonl; then a new one is begun, so that twice this is the most."""
SPANS_BUFFER_BYTES = 1 << 20
"""Every tick writes out what is there; a write in between waits for the disk, and for the other threads."""


class Reporter:
    """Turns what the controller sees into reports."""

    def __init__(self, config: RunConfig, run_folder: Path, sinks: MetricSinks, clock: Clock) -> None:
        self.steps: list[StepReport] = read_steps(run_folder)
        self.evaluations: list[EvalReport] = read_evals(run_folder)
        self.sinks = sinks
        self._config = config
        self._clock = clock
        self._run_folder = run_folder
        self._steps_file: JsonLines[StepReport] = JsonLines(run_folder / STEPS_FILE)
        self._evals_file: JsonLines[EvalReport] = JsonLines(run_folder / EVAL_FILE)
        self.num_events = max((event.seq for event in read_events(run_folder)), default=0)
        self._events_file: JsonLines[RunEvent] = JsonLines(run_folder / EVENTS_FILE)
        self.alarms = Alarms(config.algorithm.groups_per_step)
        self._webhook = Webhook(config.observe.webhook) if config.observe.webhook else None
        self.follow(config)
        self._spans_file: JsonLines[sp.Span] = JsonLines(run_folder / sp.SPANS_FILE, MOST_SPANS_BYTES, SPANS_BUFFER_BYTES)
        self._staleness: dict[int, dict[str, float]] = {}
        self._published_s: dict[int, float] = {}
        self._sync_ms: dict[str, float] = {}
        self._weights_metrics: dict[str, float] = {}
        self._deaths: Counter[str] = Counter()
        self._last_step_s = clock.now()
        self._last_generated = 0
        self._idle: dict[str, tuple[float, float, float]] = {}
        """Of each generator: when its last heartbeat was sent, the idle seconds it told, its idle share between the last two."""
        self._waiting: dict[str, sp.Span] = {}
        """By process, the wait that goes on."""
        self._bias = SelectionBias()

    # -- what is seen ----------------------------------------------------------------------------------------------------

    def note_spans(self, *spans: sp.Span) -> None:
        """Record spans."""
        self._spans_file.write(*spans)

    def note_event(self, kind: EventKind, subject: str, text: str = "", version: int = -1) -> None:
        """Record that something happened to the run."""
        self.num_events += 1
        now = self._clock.now()
        self._events_file.write(RunEvent(seq=self.num_events, time_s=now, kind=kind, subject=subject, text=text, version=version))

    def note_samples(self, arrived: Sequence[Samples]) -> None:
        """Record generated samples."""
        self.note_spans(*(one for samples in arrived for one in sp.spans_of(samples)))

    def note_answers(self, answers: Iterable[Scores | InferResult]) -> None:
        """Record what a worker did for samples' scores."""
        self.note_spans(*(one for answer in answers for one in sp.spans_of(answer)))

    def note_decision(self, _: str, event: object, now: float, instructions: Sequence[object] | str) -> None:
        """Tell the monitor of selection bias what the buffer decided: a `Watch`."""
        bias = self._bias
        match event:
            case ev.GroupIssued():
                bias.issued(event.group_id, event.version, event.size, now)
            case ev.ExternalGroupAdded(version_counts=counts):
                bias.issued(event.group_id, min(each[0][0] for each in counts), len(counts), now)
                bias.finished(event.group_id, range(len(counts)), _lengths(counts), now)
            case ev.GroupPlaced():
                bias.placed(event.group_id, now)
            case ev.SamplesFinished(version_counts=counts):
                bias.finished(event.group_id, event.indices, _lengths(counts), now)
            case ev.SamplesScored():
                bias.scored(event.group_id, event.indices, event.rewards)
            case ev.SampleFailed():
                bias.failed(event.group_id, event.index)
            case _:
                pass
        for item in instructions:
            if isinstance(item, ev.GroupMoved) and item.after in {"dropped", "failed"}:
                bias.ended(item.group_id, item.reason if item.after == "dropped" else "failed", now)
            elif isinstance(item, ev.TakeGroups):
                for group_id in item.group_ids:
                    bias.ended(group_id, "", now)

    def note_taken(self, taken: TakenStep) -> None:
        """Remember a step's staleness until it is done, and keep some of its samples as text."""
        figures = taken.staleness
        tokens = max(sum(figures.token_histogram.values()), 1)
        self._staleness[taken.step] = {
            "staleness/mean": figures.sample_mean,
            "staleness/max": float(figures.sample_max),
            "staleness/token_mean": figures.token_mean,
            "staleness/token_max": float(figures.token_max),
            "staleness/in_flight_mean": figures.in_flight_mean,
            "staleness/in_flight_max": float(figures.in_flight_max),
            "staleness/in_queue_mean": figures.in_queue_mean,
            "staleness/in_queue_max": float(figures.in_queue_max),
            "staleness/masked_tokens": float(figures.masked_tokens),
            "queue/wait_mean_s": figures.queue_mean_s,
            "queue/wait_max_s": figures.queue_max_s,
            **{f"staleness/histogram/{age}": count / tokens for age, count in figures.token_histogram.items()},
        }
        for step in sorted(self._staleness)[:-REMEMBERED_STEPS]:
            del self._staleness[step]
        if self._config.observe.samples and not taken.replay:
            rows = rows_of(taken.step, taken.groups, self._config.observe.samples)
            self.sinks.write_samples(taken.step, self._clock.now(), rows)

    def note_published(self, available: WeightsAvailable) -> None:
        """Record a published version."""
        self._published_s[available.version] = available.published_s
        for version in sorted(self._published_s)[:-REMEMBERED_STEPS]:
            del self._published_s[version]
        self._weights_metrics["weights/blocked_ms"] = available.blocked_ms
        self._weights_metrics["weights/update_bytes"] = available.update_bytes
        self.note_spans(*sp.spans_of(available))

    def note_live(self, live: VersionLive, newest: WeightsAvailable | None) -> None:
        """Record that a generator has swapped; warn where its engine and the learner do not agree."""
        published_s = self._published_s.get(live.version, newest.published_s if newest else live.live_s)
        self._sync_ms[live.generator] = (live.live_s - published_s) * 1000
        self._weights_metrics["weights/swap_ms"] = live.swap_ms
        if live.probe_error >= 0:
            self._weights_metrics["weights/probe_error"] = live.probe_error
        self.note_spans(*sp.spans_of(live))
        tolerance = self._config.broadcast.probe_tolerance
        if live.probe_error > tolerance:
            log.warning(
                "%s: probe logprobs of version %d differ by %.3g from the learner's (broadcast.probe_tolerance %g): engine and "
                "learner do not agree on the model; check dtypes", live.generator, live.version, live.probe_error, tolerance,
            )  # fmt: skip

    def note_death(self, name: str, kind: ProcessKind) -> None:
        """Count a process that died and forget what its counters said."""
        self._deaths[kind] += 1
        self.forget(name)

    def follow(self, config: RunConfig) -> None:
        """Go on by a config that was changed while the run goes on."""
        self._config = config
        self.alarms.switch_off(name for name, what in config.observe.alarms.items() if what == "off")

    def forget(self, name: str) -> None:
        """Forget what the counters of a process said that is gone."""
        self._idle.pop(name, None)
        self._sync_ms.pop(name, None)

    def note_evaluation(self, report: EvalReport) -> None:
        """Record an evaluation."""
        self.evaluations.append(report)
        name, value = report.headline
        self.note_event("evaluation", name, f"{value:.3f}", report.version)
        self._evals_file.write(report)
        judged = {} if report.accuracy is None else {"accuracy": report.accuracy}
        self.note_spans(sp.span(sp.EVALUATE, report.started_s, report.finished_s, "controller", **judged))
        values = {"eval/reward_mean": report.reward_mean, **{f"eval/{name}": value for name, value in judged.items()}}
        self.sinks.write(report.version, self._clock.now(), values)

    def note_step(self, done: StepDone, dispatcher: Dispatcher, peers: Peers) -> list[Alarm]:
        """Record a finished step: one line in steps.jsonl and the metrics to every sink, but for figures that are not finite.

        Returns:
            Alarms that it raises.
        """
        raised: list[Alarm] = []
        now = self._clock.now()
        metrics = self._step_metrics(done, dispatcher, peers, now)
        counts, failures = dispatcher.buffer.counts(), dispatcher.failures
        report = StepReport(
            step=done.step,
            version=done.version,
            time_s=now,
            reward_mean=metrics.get("reward/mean", 0.0),
            reward_std=metrics.get("reward/std", 0.0),
            staleness_mean=metrics.get("staleness/mean", 0.0),
            staleness_max=int(metrics.get("staleness/max", 0)),
            generated_tokens_per_s=metrics["throughput/generated_tokens_per_sec"],
            trained_tokens_per_s=metrics["throughput/trained_tokens_per_sec"],
            groups_ready=counts.ready,
            groups_running=counts.running,
            groups_scoring=counts.scoring,
            learner_idle=metrics["idle/learner"],
            generators_idle=metrics["idle/generators"],
            dropped={**counts.dropped, **counts.failed},
            failed_samples=failures.num_failed_samples,
            failed_share=failures.share,
            over_limit_samples=failures.num_over_limit,
            over_limit_share=failures.over_limit_share,
            weight_sync_ms=metrics.get("weights/sync_ms", 0.0),
            metrics=metrics,
        )
        self._last_step_s, self._last_generated = now, dispatcher.generated_tokens
        if not self.steps or report.step > self.steps[-1].step:  # else a learner back from a checkpoint has repeated it
            self.steps.append(report)
            self._steps_file.write(report)
            raised = self._tell(self.alarms.take(report))
            if len(self.steps) > STEPS_WITH_METRICS:
                old = self.steps[-STEPS_WITH_METRICS - 1]
                self.steps[-STEPS_WITH_METRICS - 1] = msgspec.structs.replace(old, metrics={})
        self.note_spans(*sp.spans_of(done))
        self.sinks.write(done.version, now, metrics)
        log.info(
            "step %d/%d reward %.3f staleness %.2f (max %d) ready %d generated %.0f tok/s trained %.0f tok/s",
            done.version, self._config.num_steps, report.reward_mean, report.staleness_mean, report.staleness_max,
            report.groups_ready, report.generated_tokens_per_s, report.trained_tokens_per_s,
        )  # fmt: skip
        return raised

    def note_open_step(self, open_s: float, version: int, waiting: str) -> list[Alarm]:
        """Look at a step that is not done yet; return alarms that it raises (`Alarms.take_open_step`)."""
        return self._tell(self.alarms.take_open_step(open_s, version, waiting))

    def _tell(self, alarms: list[Alarm]) -> list[Alarm]:
        """Tell of alarms everywhere; return those that are not over."""
        for alarm in alarms:
            self.note_event("alarm", alarm.rule, alarm.text, alarm.version)
            if self._webhook is not None:
                self._webhook.tell({"run": self._config.name, "time_s": self._clock.now(), **msgspec.structs.asdict(alarm)})
            log.log(ALARM_LEVELS[alarm.level], "alarm %s: %s", alarm.rule, alarm.text)
        return [alarm for alarm in alarms if not alarm.is_over]

    def _step_metrics(self, done: StepDone, dispatcher: Dispatcher, peers: Peers, now: float) -> dict[str, float]:
        """Return what the learner measured and what the controller knows, by the names of metrics.py; finite values only."""
        trained = finite(done.metrics)
        num_samples = trained.get("data/samples", 0.0)
        tokens = num_samples * (trained.get("data/prompt_tokens_mean", 0.0) + trained.get("data/response_tokens_mean", 0.0))
        elapsed_s = max(now - self._last_step_s, 1e-9)
        counts, generators = dispatcher.buffer.counts(), peers.of("generator")
        beats = {peer.name: peer.heartbeat for peer in peers.values() if peer.heartbeat is not None}
        idle = [self._idle_share(beats[peer.name]) for peer in generators if peer.name in beats]
        by_name = {"dropped": counts.dropped, "failed": counts.failed, "deaths": self._deaths}
        return finite({
            **trained,
            **self._staleness.pop(done.step, {}),
            **self._weights_metrics,
            **({"weights/sync_ms": max(self._sync_ms.values())} if self._sync_ms else {}),
            "throughput/tokens_per_sec": tokens / elapsed_s,
            "throughput/learner_tokens_per_sec": tokens / max(done.finished_s - done.started_s, 1e-9),
            "throughput/trained_tokens_per_sec": trained.get("data/trained_tokens", 0.0) / elapsed_s,
            "throughput/samples_per_sec": num_samples / elapsed_s,
            "throughput/generated_tokens_per_sec": (dispatcher.generated_tokens - self._last_generated) / elapsed_s,
            **{f"{stage}/{name}": float(count) for stage, each in by_name.items() for name, count in each.items()},
            **{
                f"memory/resident_gb/{name}": beat.gauges.get("process/resident_bytes", 0.0) / 1e9 for name, beat in beats.items()
            },
            **{f"queue/slots/{peer.name}": float(peer.num_slots) for peer in generators if peer.num_slots},
            **self._bias.figures(now),
            "idle/learner": min(done.waited_s / elapsed_s, 1.0),
            "idle/generators": sum(idle) / len(idle) if idle else 0.0,
            "time/step_s": elapsed_s,
            "time/train_s": done.finished_s - done.started_s,
            "time/wait_s": done.waited_s,
            "queue/ready": float(counts.ready),
            "queue/running": float(counts.running),
            "queue/scoring": float(counts.scoring),
            "refused/samples": float(dispatcher.refused_samples),
            "disk/free_gb": shutil.disk_usage(self._run_folder).free / 1e9,
            "memory/available_gb": psutil.virtual_memory().available / 1e9,
        })

    def _idle_share(self, beat: Heartbeat) -> float:
        """Return the share of the time between its last two heartbeats in which a generator had nothing to generate."""
        sent_s, before_s, share = self._idle.get(beat.name, (0.0, 0.0, 0.0))
        idle_s = beat.gauges.get("process/idle_s", 0.0)
        if beat.sent_s > sent_s:
            if sent_s:
                share = min(max(idle_s - before_s, 0.0) / (beat.sent_s - sent_s), 1.0)
            self._idle[beat.name] = (beat.sent_s, idle_s, share)
        return share

    # -- files -----------------------------------------------------------------------------------------------------------

    def tick(self, waits: Iterable[Wait], heartbeats: Iterable[Heartbeat]) -> None:
        """Note who waits, until it was last heard to (the learner tells its waits with each step); write out what is there."""
        now, heard_s = self._clock.now(), {beat.name: beat.sent_s for beat in heartbeats}
        told = {wait.who: wait for wait in waits if wait.who.partition("-")[0] not in {"learner", "controller"}}
        reasons = {name: re.sub(r"[0-9]+ ", "", wait.what.partition(":")[0]) for name, wait in told.items()}
        before, self._waiting = self._waiting, {}
        for name, why in reasons.items():
            since_s = before[name].start_s if name in before and before[name].attributes["why"] == why else told[name].since_s
            self._waiting[name] = sp.span(sp.IDLE, since_s, heard_s.get(name, now), name, why=why)
        self.note_spans(*(one for name, one in before.items() if reasons.get(name) != one.attributes["why"]))
        self._spans_file.flush()

    async def close(self, run_folder: Path) -> None:
        """Close every file, whatever becomes of the others, and draw the pictures."""
        with contextlib.ExitStack() as closing:
            for open_one in (self.sinks, self._spans_file, self._evals_file, self._steps_file, self._events_file):
                closing.callback(open_one.close)
        if self._webhook is not None:
            await asyncio.to_thread(self._webhook.close)
        if self._config.observe.trace:
            await asyncio.to_thread(sp.write_trace, run_folder)
        if self.steps:
            report = await asyncio.to_thread(import_module, "asyncrl.observe.report")  # loads matplotlib, once, at the end
            await asyncio.to_thread(report.write_report, run_folder)


def _lengths(counts: Iterable[VersionCounts]) -> list[int]:
    """Return the trained tokens of each sample."""
    return [sum(number for _, number in of_sample) for of_sample in counts]
