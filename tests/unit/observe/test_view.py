"""What the display says."""

from __future__ import annotations

from asyncrl.observe.display import RunView, sparkline
from asyncrl.observe.steps import StepReport
from asyncrl.schema.status import ProcessStatus, RunStatus


def status(phase: str = "running", *, deaths: int = 0, **more: object) -> RunStatus:
    process = ProcessStatus("generator-0", "generator", 7, "ready", deaths)
    return RunStatus(name="r", run_folder="runs/r", phase=phase, num_steps=100, processes=(process,), uptime_s=65.0, **more)  # type: ignore[arg-type]


def report(step: int, time_s: float = 0.0) -> StepReport:
    return StepReport(step=step, version=step + 1, time_s=time_s, reward_mean=0.5, staleness_max=2, generated_tokens_per_s=2100.4)


def test_only_what_is_new_in_a_status_is_news() -> None:
    view = RunView()
    assert view.take_status(status("warming")) == ["warming"]
    assert view.take_status(status("warming")) == []
    assert view.take_status(status(deaths=1, accuracy_before=0.25)) == [
        "running",
        "generator-0 died (1 times so far), now ready",
        "held-out accuracy before training 0.250",
    ]
    assert view.take_status(status("failed", deaths=1, accuracy_before=0.25, reason="stalled")) == ["failed: stalled"]
    assert view.events[0] == "1:05  warming"


def test_time_to_go_follows_the_pace_of_the_last_steps() -> None:
    view = RunView()
    view.take_status(status())
    assert view.remaining_s() is None
    for step in range(11):
        view.take_step(report(step, time_s=2.0 * step))
    assert view.remaining_s() == 2.0 * 89


def test_sparkline_spans_low_to_high_and_averages_what_does_not_fit() -> None:
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert len(sparkline(list(range(1000)), 48)) == 48
    assert not sparkline([], 10)
