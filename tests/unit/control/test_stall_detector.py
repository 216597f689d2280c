"""Who waits for whom, and when that is the end."""

from asyncrl.control.stall_detector import StallDetector, Wait, wait_chain


def test_chain_runs_from_the_learner_back_along_the_data_and_many_with_one_complaint_are_one_link() -> None:
    waits = [
        *(Wait(f"generator-{number}", "weights of version 7", 84.0 + number) for number in range(64)),
        Wait("learner", "a batch (12 of 32 groups ready)", 86.0),
        Wait("controller", "scores of 3 groups", 90.0),
    ]
    assert wait_chain(waits, now=100.0) == (
        "learner waits for a batch (12 of 32 groups ready) since 14 s <- controller waits for scores of 3 groups since 10 s"
        " <- generator-0 waits for weights of version 7 since 16 s (and 63 more)"
    )
    waits = [Wait(f"generator-{number}", f"thing {number}", 0.0) for number in range(9)]
    assert wait_chain(waits, now=1.0).endswith(" <- 3 more")


def test_nothing_moved_for_too_long_is_reported_with_chain_and_queues() -> None:
    detector = StallDetector(stall_timeout_s=600.0, now=0.0)
    detector.moved("trained", 50.0)
    waits = [Wait("learner", "a batch", 50.0)]
    assert detector.check(650.0, waits, {}) == ""
    assert detector.check(651.0, waits, {"ready": 12, "running": 3}) == (
        "nothing moved for 601 s (supervision.stall_timeout_s): "
        "learner waits for a batch since 601 s; queues: 12 ready, 3 running"
    )
    assert "nobody says what it waits for; last seen: trained 601 s ago" in detector.check(651.0, [], {})


def test_samples_that_come_to_nothing_are_no_progress_and_the_report_says_what_is_missing() -> None:
    detector = StallDetector(stall_timeout_s=10.0, now=0.0)
    detector.moved("generated", 5.0)
    detector.in_vain = True
    for second in range(6, 15):
        detector.moved("generated", float(second))
        detector.moved("scored", float(second))
    waits = [Wait("controller", "a group with a preference pair: 40 in a row had none", 5.0)]
    assert detector.check(14.0, waits, {}, working=["generator-0"]) == ""
    assert detector.check(16.0, waits, {}, working=["learner"]) == ""
    assert detector.check(16.0, waits, {}, working=["generator-0"]).startswith(
        "nothing was trained for 11 s (supervision.stall_timeout_s): controller waits for a group with a preference pair: 40"
    )
    detector.moved("trained", 16.0)
    assert detector.check(25.0, [], {}) == ""


def test_process_that_says_it_works_is_given_longer_but_not_for_ever_and_a_pause_counts_for_nothing() -> None:
    detector, waits = StallDetector(stall_timeout_s=10.0, now=0.0), [Wait("generator-0", "work", 3.0)]
    assert detector.check(60.0, waits, {}, ["learner"]) == ""
    assert "generator-0 waits for work since 58 s; at work, as they say: learner" in detector.check(61.0, waits, {}, ["learner"])
    detector.hold(61.0, held=True)
    assert detector.check(500.0, [], {}) == ""
    detector.hold(500.0, held=False)
    assert detector.check(510.0, [], {}) == ""
    assert detector.check(511.0, [], {})
