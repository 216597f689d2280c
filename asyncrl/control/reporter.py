"""What the run was like: step and evaluation reports, spans, metrics, and the pictures at the end.

Owns steps.jsonl, eval.jsonl, spans.jsonl and the sinks of one run, and the little memory that rates need. Decides nothing.
Writing the report (matplotlib) is the one slow thing and runs on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.buffer.payloads import TakenStep
from asyncrl.buffer.staleness import StalenessFigures
from asyncrl.buffer.state import Counts
from asyncrl.clock import Clock
from asyncrl.config.run import RunConfig
from asyncrl.control.dispatcher import Dispatcher
from asyncrl.control.lifecycle.failure_watch import FailureWatch
from asyncrl.control.peers import Peers
from asyncrl.observe.metrics import finite
from asyncrl.observe.samples import rows_of
from asyncrl.observe.sinks import MetricSinks
from asyncrl.observe.spans import (
    OLD_SPANS_FILE,
    SPANS_FILE,
    Span,
    publish_span,
    sample_span,
    score_span,
    span,
    step_spans,
    swap_span,
    write_trace,
)
from asyncrl.observe.steps import EVAL_FILE, STEPS_FILE, EvalReport, JsonLines, StepReport, read_evals, read_steps
from asyncrl.schema.batches import StepDone
from asyncrl.schema.control import Heartbeat, ProcessKind
from asyncrl.schema.samples import InferResult, Sample, Score
from asyncrl.schema.weights import VersionLive, WeightsAvailable

log = logging.getLogger(__name__)

STEPS_WITH_METRICS = 1000
"""Newest steps whose metrics stay in memory; metrics.jsonl and steps.jsonl have them all."""
REMEMBERED_STEPS = 8
"""Taken steps whose staleness figures are kept until they are done."""
MOST_SPANS_BYTES = 32 << 20
"""Of spans.jsonl; then it becomes spans.old.jsonl and a new one is begun, so that twice this is the most."""
SPANS_BUFFER_BYTES = 1 << 20
"""Every tick writes out what is there; a write in between waits for the disk, and for the other threads."""


@dataclass(slots=True)
class _Totals:
    """Sums over samples since the run began."""

    samples: float = 0.0
    tokens: float = 0.0
    reward: float = 0.0

    def add(self, *, tokens: float = 0.0, reward: float = 0.0) -> None:
        self.samples += 1
        self.tokens += tokens
        self.reward += reward

    def add_mean(self, metrics: Mapping[str, float]) -> None:
        """Add a step by its means."""
        samples = metrics.get("data/samples", 0.0)
        self.samples += samples
        self.tokens += samples * metrics.get("data/response_tokens_mean", 0.0)
        self.reward += samples * metrics.get("reward/mean", 0.0)


class Reporter:
    """Turns what the controller sees into reports."""

    def __init__(self, config: RunConfig, run_folder: Path, sinks: MetricSinks, clock: Clock) -> None:
        self.steps: list[StepReport] = read_steps(run_folder)
        self.evaluations: list[EvalReport] = read_evals(run_folder)
        self._config = config
        self._sinks = sinks
        self._clock = clock
        self._steps_file: JsonLines[StepReport] = JsonLines(run_folder / STEPS_FILE)
        self._evals_file: JsonLines[EvalReport] = JsonLines(run_folder / EVAL_FILE)
        self._spans_path = run_folder / SPANS_FILE
        self._spans_file = self._spans_path.open("ab", SPANS_BUFFER_BYTES)
        self._encoder = msgspec.json.Encoder()
        self._staleness: dict[int, dict[str, float]] = {}
        self._published_s: dict[int, float] = {}
        self._sync_ms: dict[str, float] = {}
        self._weights_metrics: dict[str, float] = {}
        self._deaths: Counter[str] = Counter()
        self._last_step_s = clock.now()
        self._last_generated = 0
        self._idle: defaultdict[str, _Idle] = defaultdict(_Idle)
        self._generated, self._scored, self._trained = _Totals(), _Totals(), _Totals()

    # -- what is seen ----------------------------------------------------------------------------------------------------

    def note_sample(self, sample: Sample) -> None:
        """Record a generated sample."""
        self._record(sample_span(sample))
        if sample.purpose == "train":
            self._generated.add(tokens=sample.num_tokens)

    def note_judged(self, answer: Score | InferResult) -> None:
        """Record what a worker did for a sample's score."""
        self._record(score_span(answer))

    def note_score(self, score: Score) -> None:
        """Count a complete score."""
        if score.purpose == "train" and not score.error:
            self._scored.add(reward=score.reward)

    def note_taken(self, taken: TakenStep) -> None:
        """Remember a step's staleness until it is done, and keep some of its samples as text."""
        self._staleness[taken.step] = _staleness_metrics(taken.staleness)
        for step in sorted(self._staleness)[:-REMEMBERED_STEPS]:
            del self._staleness[step]
        if self._config.observe.samples and not taken.replay:
            self._sinks.write_samples(
                taken.step, self._clock.now(), rows_of(taken.step, taken.groups, self._config.observe.samples)
            )

    def note_published(self, available: WeightsAvailable) -> None:
        """Record a published version."""
        self._published_s[available.version] = available.published_s
        for version in sorted(self._published_s)[:-REMEMBERED_STEPS]:
            del self._published_s[version]
        self._weights_metrics["weights/blocked_ms"] = available.blocked_ms
        self._weights_metrics["weights/update_bytes"] = available.update_bytes
        self._record(publish_span(available))

    def note_live(self, live: VersionLive, newest: WeightsAvailable | None) -> None:
        """Record that a generator has swapped."""
        published_s = self._published_s.get(live.version, newest.published_s if newest else live.live_s)
        self._sync_ms[live.generator] = (live.live_s - published_s) * 1000
        self._weights_metrics["weights/swap_ms"] = live.swap_ms
        if live.probe_error >= 0:
            self._weights_metrics["weights/probe_error"] = live.probe_error
        self._record(swap_span(live))

    def note_spans(self, spans: Iterable[Span]) -> None:
        """Record spans that are whole already."""
        for item in spans:
            self._record(item)

    def note_death(self, name: str, kind: ProcessKind) -> None:
        """Count a process that died and forget what its counters said."""
        self._deaths[kind] += 1
        self.forget(name)

    def forget(self, name: str) -> None:
        """Forget what the counters of a process said that is gone."""
        self._idle.pop(name, None)
        self._sync_ms.pop(name, None)

    def note_warm_start(self, metrics: Mapping[str, float]) -> None:
        """Record what the warm start reported."""
        if metrics:
            log.info("warm start: %s", ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))

    def note_evaluation(self, report: EvalReport) -> None:
        """Record an evaluation."""
        self.evaluations.append(report)
        self._evals_file.write(report)
        judged = {} if report.accuracy is None else {"accuracy": report.accuracy}
        self._record(span("evaluate", report.started_s, report.finished_s, "controller", **judged))
        values = {"eval/reward_mean": report.reward_mean}
        if report.accuracy is not None:
            values["eval/accuracy"] = report.accuracy
        self._sinks.write(report.version, self._clock.now(), values)

    def note_step(self, done: StepDone, dispatcher: Dispatcher, peers: Peers, heartbeats: Mapping[str, Heartbeat]) -> None:
        """Record a finished step: one line in steps.jsonl and the metrics to every sink."""
        now = self._clock.now()
        elapsed_s = max(now - self._last_step_s, 1e-9)
        counts = dispatcher.buffer.counts()
        self._trained.add_mean(done.metrics)
        metrics = {
            **done.metrics,
            **self._staleness.pop(done.step, {}),
            **self._weights_metrics,
            **({"weights/sync_ms": max(self._sync_ms.values())} if self._sync_ms else {}),
            **self._rates(done, dispatcher.generated_tokens, elapsed_s),
            **_by_name("dropped", counts.dropped),
            **_by_name("failed", counts.failed),
            **_by_name("deaths", self._deaths),
            **{
                f"memory/resident_gb/{name}": beat.gauges.get("process/resident_bytes", 0.0) / 1e9
                for name, beat in heartbeats.items()
            },
            **{f"queue/slots/{peer.name}": float(peer.num_slots) for peer in peers.of("generator") if peer.num_slots},
            **self._selection_bias(),
            "idle/learner": min(done.waited_s / elapsed_s, 1.0),
            "idle/generators": self._idle_share([peer.name for peer in peers.of("generator")], heartbeats),
            "time/step_s": elapsed_s,
            "time/train_s": done.finished_s - done.started_s,
            "time/wait_s": done.waited_s,
            "queue/ready": float(counts.ready),
            "queue/running": float(counts.running),
            "queue/scoring": float(counts.scoring),
            "refused/samples": float(dispatcher.refused_samples),
        }
        report = _step_report(done, metrics, counts, dispatcher.failures, now)
        self._last_step_s, self._last_generated = now, dispatcher.generated_tokens
        self._keep(report)
        for item in step_spans(done):
            self._record(item)
        self._sinks.write(done.version, now, metrics)
        log.info(
            "step %d/%d reward %.3f staleness %.2f (max %d) ready %d generated %.0f tok/s trained %.0f tok/s",
            done.version, self._config.num_steps, report.reward_mean, report.staleness_mean, report.staleness_max,
            report.groups_ready, report.generated_tokens_per_s, report.trained_tokens_per_s,
        )  # fmt: skip

    def _keep(self, report: StepReport) -> None:
        """Add a step, unless it is one that a learner back from a checkpoint has repeated; let go of old steps' metrics."""
        if self.steps and report.step <= self.steps[-1].step:
            return
        self.steps.append(report)
        self._steps_file.write(report)
        if len(self.steps) > STEPS_WITH_METRICS:
            old = self.steps[-STEPS_WITH_METRICS - 1]
            self.steps[-STEPS_WITH_METRICS - 1] = msgspec.structs.replace(old, metrics={})

    def _rates(self, done: StepDone, generated_tokens: int, elapsed_s: float) -> dict[str, float]:
        """Return tokens and samples per second since the step before."""
        counts, working_s = done.metrics, max(done.finished_s - done.started_s, 1e-9)
        samples = counts.get("data/samples", 0.0)
        tokens = samples * (counts.get("data/prompt_tokens_mean", 0.0) + counts.get("data/response_tokens_mean", 0.0))
        return {
            "throughput/tokens_per_sec": tokens / elapsed_s,
            "throughput/learner_tokens_per_sec": tokens / working_s,
            "throughput/trained_tokens_per_sec": counts.get("data/trained_tokens", 0.0) / elapsed_s,
            "throughput/samples_per_sec": samples / elapsed_s,
            "throughput/generated_tokens_per_sec": (generated_tokens - self._last_generated) / elapsed_s,
        }

    def _selection_bias(self) -> dict[str, float]:
        """Return how what was trained differs from what was generated, over the whole run."""
        if not (self._trained.samples and self._generated.samples and self._scored.samples):
            return {}
        lengths = self._generated.tokens / self._generated.samples
        return {
            "bias/length_ratio": self._trained.tokens / self._trained.samples / max(lengths, 1e-9),
            "bias/reward_gap": self._trained.reward / self._trained.samples - self._scored.reward / self._scored.samples,
        }

    def tick(self) -> None:
        """Let what was recorded reach the files."""
        self._spans_file.flush()
        if self._spans_file.tell() > MOST_SPANS_BYTES:
            self._spans_file.close()
            self._spans_path.replace(self._spans_path.with_name(OLD_SPANS_FILE))
            self._spans_file = self._spans_path.open("ab", SPANS_BUFFER_BYTES)

    def prometheus_text(self) -> str:
        """Return the newest metrics in Prometheus' text form."""
        return self._sinks.prometheus_text()

    async def close(self, run_folder: Path) -> None:
        """Close every file, whatever becomes of the others, and draw the pictures."""
        with contextlib.ExitStack() as closing:
            for open_one in (self._sinks, self._spans_file, self._evals_file, self._steps_file):
                closing.callback(open_one.close)
        await asyncio.to_thread(self._draw, run_folder)

    def _draw(self, run_folder: Path) -> None:
        from asyncrl.observe.report import write_report  # noqa: PLC0415 - loads matplotlib, once, at the end

        if self._config.observe.trace:
            write_trace(run_folder)
        if self.steps:
            write_report(run_folder)

    def _record(self, item: Span) -> None:
        self._spans_file.write(self._encoder.encode(item) + b"\n")

    def _idle_share(self, names: list[str], heartbeats: Mapping[str, Heartbeat]) -> float:
        """Return the mean share of the time between their last two heartbeats in which generators had nothing to generate."""
        shares = [self._idle[name].share_at(heartbeats[name]) for name in names if name in heartbeats]
        return sum(shares) / len(shares) if shares else 0.0


@dataclass(slots=True)
class _Idle:
    """A process's idle share, from one heartbeat to the next."""

    sent_s: float = 0.0
    idle_s: float = 0.0
    share: float = 0.0

    def share_at(self, beat: Heartbeat) -> float:
        idle_s = beat.gauges.get("process/idle_s", 0.0)
        if beat.sent_s > self.sent_s:
            if self.sent_s:
                self.share = min(max(idle_s - self.idle_s, 0.0) / (beat.sent_s - self.sent_s), 1.0)
            self.sent_s, self.idle_s = beat.sent_s, idle_s
        return self.share


def _by_name(stage: str, counts: Mapping[str, int]) -> dict[str, float]:
    return {f"{stage}/{name}": float(count) for name, count in counts.items()}


def _step_report(done: StepDone, metrics: dict[str, float], counts: Counts, failures: FailureWatch, now: float) -> StepReport:
    return StepReport(
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
        weight_sync_ms=metrics.get("weights/sync_ms", 0.0),
        metrics=finite(metrics),
    )


def _staleness_metrics(figures: StalenessFigures) -> dict[str, float]:
    tokens = max(sum(figures.token_histogram.values()), 1)
    return {
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
