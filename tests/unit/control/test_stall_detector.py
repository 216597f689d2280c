"""Who waits for whom, and when that is the end."""

from __future__ import annotations

from asyncrl.control.stall_detector import StallDetector, Wait, wait_chain, working_of
from asyncrl.schema.control import Heartbeat


def waits_of(beats):
    return [Wait(beat.name, beat.waiting_for, beat.waiting_since_s) for beat in beats if beat.waiting_for]


def test_chain_runs_from_the_learner_back_along_the_data() -> None:
    waits = [
        Wait("generator-0", "weights of version 7", 84.0),
        Wait("learner", "a batch (12 of 32 groups ready)", 86.0),
        Wait("controller", "scores of 3 groups", 90.0),
    ]
    assert wait_chain(waits, now=100.0) == (
        "learner waits for a batch (12 of 32 groups ready) since 14 s <- controller waits for scores of 3 groups since 10 s"
        " <- generator-0 waits for weights of version 7 since 16 s"
    )


def test_many_processes_with_one_complaint_are_one_link() -> None:
    waits = [Wait(f"generator-{number}", "work", 10.0 + number) for number in range(64)]
    assert wait_chain(waits, now=20.0) == "generator-0 waits for work since 10 s (and 63 more)"


def test_long_chain_is_cut_and_says_so() -> None:
    waits = [Wait(f"generator-{number}", f"thing {number}", 0.0) for number in range(9)]
    assert wait_chain(waits, now=1.0, longest=2).endswith(" <- 7 more")


def test_only_processes_that_wait_are_in_the_chain() -> None:
    beats = [Heartbeat("learner", 5.0), Heartbeat("generator-0", 5.0, waiting_for="work", waiting_since_s=3.0)]
    assert waits_of(beats) == [Wait("generator-0", "work", 3.0)]
    assert wait_chain([], now=5.0) == ""


def test_nothing_moved_for_too_long_is_reported_with_chain_and_queues() -> None:
    dog = StallDetector(stall_timeout_s=600.0, now=0.0)
    dog.moved("trained", 50.0)
    waits = [Wait("learner", "a batch", 50.0)]
    assert dog.check(650.0, waits, {}) is None
    report = dog.check(651.0, waits, {"ready": 12, "running": 3})
    assert report is not None
    assert report.reason == (
        "nothing moved for 601 s (supervision.stall_timeout_s): "
        "learner waits for a batch since 601 s; queues: 12 ready, 3 running"
    )


def test_any_progress_starts_the_count_again() -> None:
    dog = StallDetector(stall_timeout_s=10.0, now=0.0)
    for second in range(0, 100, 9):
        dog.moved("generated", float(second))
        assert dog.check(float(second + 9), [], {}) is None


def test_samples_that_come_to_nothing_are_no_progress_and_the_report_says_what_is_missing() -> None:
    dog = StallDetector(stall_timeout_s=10.0, now=0.0)
    dog.moved("generated", 5.0)
    dog.sampling_in_vain(True)
    for second in range(6, 15):
        dog.moved("generated", float(second))
        dog.moved("scored", float(second))
    waits = [Wait("controller", "a group with a preference pair: 40 in a row had none", 5.0)]
    assert dog.check(14.0, waits, {}, working=["generator-0"]) is None
    assert dog.check(16.0, waits, {}, working=["learner"]) is None
    report = dog.check(16.0, waits, {}, working=["generator-0"])
    assert report is not None
    assert report.reason.startswith(
        "nothing was trained for 11 s (supervision.stall_timeout_s): controller waits for a group with a preference pair: 40"
    )


def test_a_trained_step_an_evaluation_and_an_end_of_the_drought_are_progress_again() -> None:
    dog = StallDetector(stall_timeout_s=10.0, now=0.0)
    dog.sampling_in_vain(True)
    dog.moved("trained", 8.0)
    assert dog.check(17.0, [], {}) is None
    dog.moved("evaluated", 17.0)
    assert dog.check(26.0, [], {}) is None
    dog.sampling_in_vain(False)
    dog.moved("generated", 26.0)
    assert dog.check(35.0, [], {}) is None
    assert dog.check(37.0, [], {}) is not None


def test_paused_run_is_not_stalled_and_counts_anew_afterwards() -> None:
    dog = StallDetector(stall_timeout_s=10.0, now=0.0)
    dog.hold(5.0, held=True)
    assert dog.check(500.0, [], {}) is None
    dog.hold(500.0, held=False)
    assert dog.check(510.0, [], {}) is None
    assert dog.check(511.0, [], {}) is not None


def test_stall_without_a_known_wait_tells_what_moved_last() -> None:
    dog = StallDetector(stall_timeout_s=10.0, now=0.0)
    dog.moved("scored", 1.0)
    dog.moved("generated", 2.0)
    report = dog.check(20.0, [], {})
    assert report is not None
    assert report.chain == "nobody says what it waits for; last seen: scored 19 s ago, generated 18 s ago"


def test_process_that_says_it_works_is_given_longer_but_not_for_ever() -> None:
    dog = StallDetector(stall_timeout_s=10.0, now=0.0)
    beats = [Heartbeat("learner", 5.0), Heartbeat("generator-0", 5.0, waiting_for="work", waiting_since_s=3.0)]
    assert working_of(beats) == ["learner"]
    assert dog.check(60.0, waits_of(beats), {}, working_of(beats)) is None
    report = dog.check(61.0, waits_of(beats), {}, working_of(beats))
    assert report is not None
    assert report.chain == "generator-0 waits for work since 58 s; at work, as they say: learner"
