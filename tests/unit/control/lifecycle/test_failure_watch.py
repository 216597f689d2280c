"""Failures: counted by kind, told once, and the end of a run that cannot succeed."""

import json

import pytest

from asyncrl.control.lifecycle.failure_watch import FIRST_SAMPLES, WINDOW_GROUPS, WINDOW_SAMPLES, FailureWatch
from asyncrl.errors import kind_of

KIND = "TypeError at rewards.py:3"


def test_a_kind_is_told_once_whatever_its_messages_say():
    watch = FailureWatch(0.5)
    news = [watch.sample_failed("reward", KIND, f"score: TypeError: {number}", "Traceback") for number in range(5)]
    assert news == [True, False, False, False, False]
    seen = watch.kinds[KIND]
    assert (seen.count, seen.reason, seen.trace) == (5, "score: TypeError: 0", "Traceback")


def test_a_run_that_has_scored_ends_only_by_its_share():
    watch = FailureWatch(0.5)
    watch.sample_scored()
    for number in range(WINDOW_GROUPS - 1):
        watch.sample_failed("generate", KIND, "no")
        watch.group_failed(f"p{number}", KIND)
    assert watch.verdict == ""
    watch.group_failed("last", KIND)
    assert "64 of the last 64 groups failed, more than supervision.max_failed_share (0.5)" in watch.verdict


def test_the_first_samples_end_a_run_where_all_failed_and_it_is_said_at_what():
    watch = FailureWatch(0.5)
    for number in range(FIRST_SAMPLES):
        assert watch.verdict == ""
        watch.sample_failed("generate", KIND, "too long\nby 24 tokens")
        if number % 4 == 3:
            watch.group_failed(f"p{number}", KIND)
    assert watch.verdict == "all of the first 16 samples failed; most often at generate: too long"


HANGS = "reward slow ran past reward.timeout_s (30 s)"


def test_a_limit_is_told_once_and_the_first_samples_end_a_run_where_all_ran_over_one_or_failed():
    watch = FailureWatch(0.5)
    watch.sample_failed("reward", KIND, "no")
    assert [watch.sample_scored(HANGS) for _ in range(FIRST_SAMPLES - 2)] == [True] + [False] * (FIRST_SAMPLES - 3)
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
