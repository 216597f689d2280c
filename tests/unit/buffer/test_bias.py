"""The monitor of selection: censored lengths, what is lost on purpose and what is not, over cohorts and in simulated runs."""

import numpy as np
import pytest

from asyncrl.algorithms import screening
from asyncrl.buffer import events as ev
from asyncrl.buffer.bias import LOOK_S, WINDOW_MEMBERS, SelectionBias, mean_length
from asyncrl.schema.status import RELEASED, SCREENED


def test_a_cohort_with_known_censoring_gives_its_true_mean_length_within_the_interval():
    covered = missed = 0
    for seed in range(40):
        chance = np.random.default_rng(seed)
        lengths = np.minimum(chance.geometric(1 / 30, 800), 128).astype(float)
        true_mean = (1 - (1 - 1 / 30) ** 128) * 30  # of a geometric length cut at 128
        censored_at = chance.uniform(0, 160, 800)
        seen, blocks = lengths <= censored_at, np.arange(800) // 4 % 20
        found = mean_length(np.minimum(lengths, censored_at), seen, blocks)
        assert found is not None
        covered += found[1] <= true_mean <= found[2]
        naive = mean_length(lengths[seen], np.ones(seen.sum(), bool), blocks[seen])
        assert naive is not None
        missed += naive[2] < true_mean
    assert covered >= 36
    assert missed >= 36  # the mean of what ended is too short, interval and all


def issue(bias, group_id, version, size, now):
    bias.note("buffer", ev.GroupIssued(group_id, "p", size, "generator-0", version), now, [])


def finish(bias, group_id, index, length, now):
    bias.note("buffer", ev.SamplesFinished(group_id, (index,), (((0, length),),)), now, [])


def end(bias, group_id, outcome, now):
    after = "failed" if outcome == "failed" else "dropped"
    moved = ev.GroupMoved(group_id, "ready", after, outcome) if outcome else ev.TakeGroups(0, (group_id,), 0)
    bias.note("buffer", ev.TakeStep(0), now, [moved])


def monitor(outcome_of, *, num_groups=200, seed=0):
    """Issue groups of 4 under two versions, end those of the first as `outcome_of(lengths)` says, and look."""
    bias, chance = SelectionBias(), np.random.default_rng(seed)
    for group_id in range(num_groups):
        issue(bias, group_id, 0, 4, 0.0)
    issue(bias, num_groups, 1, 4, 0.0)
    for group_id in range(num_groups):
        lengths = chance.geometric(1 / 20, 4)
        for index in np.argsort(lengths):
            finish(bias, group_id, int(index), int(lengths[index]), 0.01 * lengths[index])
        rewards = tuple(lengths / 20 + chance.normal(size=4))
        bias.note("buffer", ev.SamplesScored(group_id, (0, 1, 2, 3), rewards), 5.0, [])
        end(bias, group_id, outcome_of(lengths), 5.0)
    return bias.figures(LOOK_S)


def test_losing_long_groups_is_flagged_and_losing_any_is_not():
    stale = monitor(lambda lengths: "stale" if lengths.max() > 50 else "")
    assert stale["bias/length_ratio_high"] < 0.95
    assert stale["bias/reward_gap_high"] < 0
    assert stale["bias/flagged"] == 1.0
    assert stale["bias/lost/stale"] > 0.1
    by_chance = np.random.default_rng(1)
    even = monitor(lambda _: "failed" if by_chance.random() < 0.2 else "")
    assert even["bias/length_ratio_low"] < 1 < even["bias/length_ratio_high"]
    assert even["bias/flagged"] == 0.0


@pytest.mark.parametrize("reason", [screening.NO_SPREAD, RELEASED])
def test_what_a_screen_or_a_session_drops_is_shown_apart(reason):
    figures = monitor(lambda lengths: reason if lengths.max() > 50 else "")
    assert figures["bias/length_ratio"] == 1.0
    assert figures["bias/flagged"] == 0.0
    assert figures["bias/screened_length_ratio"] < 0.95
    assert figures[f"bias/lost/{reason.replace(' ', '_')}"] > 0.1
    assert {screening.NO_SPREAD, screening.NO_PAIR, screening.TRUNCATED} == SCREENED


def test_a_cohort_counts_once_every_group_of_it_has_ended():
    bias = SelectionBias()
    for group_id in range(40):
        issue(bias, group_id, 0, 1, 0.0)
        finish(bias, group_id, 0, 10, 1.0)
        bias.note("buffer", ev.SamplesScored(group_id, (0,), (1.0,)), 1.0, [])
    issue(bias, 40, 1, 1, 1.0)
    for group_id in range(39):
        end(bias, group_id, "", 1.0)
    assert bias.figures(10.0) == {}
    end(bias, 39, "stale", 10.0)
    assert bias.figures(20.0)["bias/lost/stale"] == pytest.approx(1 / 40)


def test_of_a_cohort_that_no_newer_version_closes_the_newest_groups_that_have_ended_are_kept():
    bias = SelectionBias()
    issue(bias, 0, 0, 1, 0.0)
    for group_id in range(1, 3 * WINDOW_MEMBERS):
        issue(bias, group_id, 0, 1, 0.0)
        end(bias, group_id, "released by its caller", 1.0)
    held = bias._cohorts[0]
    assert len(held) <= 2 * WINDOW_MEMBERS
    assert held[0].outcome is None  # it has not ended
    assert held[-1].group_id == 3 * WINDOW_MEMBERS - 1


def test_members_given_up_while_they_were_generated_count_as_long():
    """The long ones never end: only their age tells of them."""
    bias = SelectionBias()
    for group_id in range(100):
        issue(bias, group_id, 0, 1, 0.0)
    issue(bias, 100, 1, 1, 0.0)
    for group_id in range(100):
        if group_id % 4 != 3:
            finish(bias, group_id, 0, 10, 1.0)
            bias.note("buffer", ev.SamplesScored(group_id, (0,), (1.0,)), 1.0, [])
        end(bias, group_id, "" if group_id % 4 != 3 else "stale", 5.0)
    figures = bias.figures(20.0)
    assert figures["bias/length_ratio"] == pytest.approx(10 / (0.75 * 10 + 0.25 * 50))
    assert figures["bias/flagged"] == 1.0
