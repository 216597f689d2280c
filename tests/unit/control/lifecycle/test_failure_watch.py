"""Failures, counted by kind and told once, who waits for whom, and the end of a run that cannot succeed."""

import json

import pytest

from asyncrl.control.lifecycle.failure_watch import WINDOW_GROUPS, WINDOW_SAMPLES, FailureWatch, StallDetector, Wait, wait_chain
from asyncrl.errors import kind_of

KIND = "TypeError at rewards.py:3"


def test_a_run_that_has_scored_ends_only_by_its_share():
    watch = FailureWatch(0.5)
    watch.sample_scored()
    for number in range(WINDOW_GROUPS - 1):
        watch.sample_failed("generate", KIND, "no")
        watch.group_failed(f"p{number}", KIND)
    assert watch.verdict == ""
    watch.group_failed("last", KIND)
    assert "64 of the last 64 groups failed, more than supervision.max_failed_share (0.5)" in watch.verdict


HANGS = "reward slow ran past reward.timeout_s (30 s)"


def test_a_limit_is_told_once_and_the_first_samples_end_a_run_where_all_ran_over_one_or_failed():
    watch = FailureWatch(0.5)
    watch.sample_failed("reward", KIND, "no")
    assert [watch.sample_scored(HANGS) for _ in range(14)] == [True] + [False] * 13
    assert watch.verdict == ""
    watch.sample_scored(HANGS)
    assert watch.verdict == f"all of the first 16 samples failed or ran over a limit; the last: {HANGS}"


def test_a_share_over_a_limit_ends_a_run_only_over_the_whole_window():
    watch = FailureWatch(0.5)
    for number in range(WINDOW_SAMPLES + 1):
        assert watch.verdict == ""
        watch.sample_scored("" if number % 2 == 0 and number < WINDOW_SAMPLES else HANGS)
    assert watch.verdict.startswith("129 of the last 256 samples ran over a limit of their reward, more than")


def test_a_prompt_that_failed_four_times_is_set_aside_and_named():
    watch = FailureWatch(0.5)
    watch.sample_scored()
    assert [watch.group_failed("p1", KIND) for _ in range(4)] == [False, False, False, True]
    assert watch.set_aside == {"p1": KIND}


def test_the_kind_is_the_type_and_the_own_line_never_the_message():
    kinds = set()
    for text in ("{", "x", "[1,"):
        with pytest.raises(json.JSONDecodeError) as raised:
            json.loads(text)
        kinds.add(kind_of(raised.value))
    assert len(kinds) == 1
    assert kinds.pop().startswith("JSONDecodeError at test_failure_watch.py:")
    assert kind_of(ValueError("never raised")) == "ValueError"


# -- stalls --------------------------------------------------------------------------------------------------------------


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
    waits = [Wait("learner", "", 70.0), *waits[:2]]
    assert wait_chain(waits, now=100.0).endswith("since 16 s (and 1 more) <- learner has sent no heartbeat since 30 s")
    waits = [Wait(f"generator-{number}", f"thing {number}", 0.0) for number in range(9)]
    assert wait_chain(waits, now=1.0).endswith(" <- 3 more")


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
    assert "generator-0 waits for work since 58 s; at work or starting: learner" in detector.check(61.0, waits, {}, ["learner"])
    detector.hold(61.0, held=True)
    assert detector.check(500.0, [], {}) == ""
    detector.hold(500.0, held=False)
    assert detector.check(510.0, [], {}) == ""
    assert detector.check(511.0, [], {})
