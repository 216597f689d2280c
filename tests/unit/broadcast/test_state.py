import pytest

from asyncrl.broadcast.board import MAX_SUBSCRIBERS, PIN_LIMIT_S, SILENT_AFTER_S, ChunkAsked, FetchOver, SubscriberBoard
from asyncrl.broadcast.state import (
    FIRST_RETRY_S,
    MAX_ATTEMPTS,
    Announce,
    Announced,
    Commit,
    CommitFailed,
    Committed,
    Drop,
    Fetch,
    FetchDone,
    FetchFailed,
    GiveUp,
    PublisherState,
    PublishRequested,
    RetryAt,
    Stage,
    SubscriberState,
    Tick,
    WentLive,
)
from asyncrl.errors import BroadcastError


def publisher_holding(*versions, keeps_slots=True):
    state = PublisherState(2, keeps_slots)
    for version in versions:
        state.handle(PublishRequested(version), 0.0)
        state.handle(Committed(version), 0.0)
    return state


def test_the_older_slot_is_overwritten():
    assert publisher_holding(1, 2).handle(PublishRequested(3), 1.0) == [Stage(0, 3), Commit(0, 3)]


def test_a_slot_being_fetched_is_spared():
    state = publisher_holding(1, 2)
    assert state.handle(PublishRequested(3, frozenset({0})), 1.0) == [Stage(1, 3), Commit(1, 3)]


def test_with_both_slots_being_fetched_the_older_goes():
    state = publisher_holding(1, 2)
    assert state.handle(PublishRequested(3, frozenset({0, 1})), 1.0) == [Stage(0, 3), Commit(0, 3)]


def test_a_medium_that_does_not_read_slots_frees_them_at_commit():
    state = publisher_holding(1, keeps_slots=False)
    assert state.handle(PublishRequested(2), 1.0) == [Stage(0, 2), Commit(0, 2)]


def test_a_version_that_never_got_to_commit_is_superseded_and_the_newest_follows():
    state = PublisherState(2, keeps_slots=False)
    assert state.handle(PublishRequested(1), 0.0) == [Stage(0, 1), Commit(0, 1)]
    assert state.handle(PublishRequested(2), 0.0) == [Stage(1, 2)]
    assert state.handle(PublishRequested(3), 0.0) == [Drop(2, "superseded by 3"), Stage(1, 3)]
    assert state.handle(Committed(1), 0.0) == [Announce(1), Commit(1, 3)]
    assert state.handle(Committed(3), 0.0) == [Announce(3)]


def test_a_failed_commit_frees_its_slot_and_the_next_goes_on():
    state = PublisherState(2, keeps_slots=True)
    state.handle(PublishRequested(1), 0.0)
    state.handle(PublishRequested(2), 0.0)
    assert state.handle(CommitFailed(1, "disk full"), 0.0) == [Drop(1, "disk full"), Commit(1, 2)]


def test_versions_only_grow():
    with pytest.raises(BroadcastError, match="versions only grow"):
        publisher_holding(4).handle(PublishRequested(4), 1.0)


def test_committing_what_is_not_being_committed_raises_with_the_story():
    with pytest.raises(AssertionError, match="PublishRequested"):
        publisher_holding(1).handle(Committed(1), 1.0)


def test_a_subscriber_spares_its_version_while_it_keeps_asking():
    board = SubscriberBoard()
    board.handle(ChunkAsked(b"a", 3), 0.0)
    board.handle(ChunkAsked(b"a", 3), SILENT_AFTER_S)
    assert board.versions_in_use(2 * SILENT_AFTER_S) == {3}
    assert board.versions_in_use(2 * SILENT_AFTER_S + 0.1) == frozenset()


def test_no_subscriber_spares_its_version_for_ever():
    board = SubscriberBoard()
    for second in range(int(PIN_LIMIT_S) + 2):
        board.handle(ChunkAsked(b"a", 3), float(second))
    assert board.versions_in_use(PIN_LIMIT_S + 1) == frozenset()


def test_silent_and_finished_subscribers_are_forgotten():
    board = SubscriberBoard()
    board.handle(ChunkAsked(b"dead", 3), 0.0)
    board.handle(ChunkAsked(b"slow", 3), 5.0)
    board.handle(Tick(), 5.0)
    assert len(board) == 1
    for _ in range(2):
        board.handle(FetchOver(b"slow"), 5.0)
        assert len(board) == 0


def test_the_board_is_bounded():
    board = SubscriberBoard()
    for number in range(MAX_SUBSCRIBERS):
        board.handle(ChunkAsked(str(number).encode(), 2 if number else 1), 0.0)
    board.handle(ChunkAsked(b"one more", 2), 0.0)
    assert board.versions_in_use(0.0) == {2}, "the oldest is forgotten"
    board.check_invariants()


def fetching(version, now=0.0):
    state = SubscriberState()
    state.handle(Announced(version), now)
    assert state.handle(Tick(), now) == [Fetch(version)]
    return state


def test_the_newest_announced_is_fetched_and_those_between_are_skipped():
    state = SubscriberState()
    for version in (1, 2, 3):
        assert state.handle(Announced(version), 0.0) == []
    assert state.handle(Tick(), 0.0) == [Fetch(3)]
    assert state.handle(Tick(), 0.0) == []


def test_no_fetch_starts_while_the_engine_reads_the_staging_buffer():
    state = fetching(1)
    state.handle(FetchDone(1), 0.0)
    state.handle(Announced(2), 0.0)
    assert state.handle(Tick(), 0.0) == []
    state.handle(WentLive(1), 0.0)
    assert state.handle(Tick(), 0.0) == [Fetch(2)]


@pytest.mark.parametrize("version", [4, 5])
def test_versions_at_or_below_live_are_ignored(version):
    state = fetching(5)
    state.handle(FetchDone(5), 0.0)
    state.handle(WentLive(5), 0.0)
    state.handle(Announced(version), 0.0)
    assert state.handle(Tick(), 0.0) == []


def test_a_failed_fetch_is_repeated_with_growing_delay_and_then_given_up():
    state, now, delays = fetching(1), 0.0, []
    for _ in range(MAX_ATTEMPTS - 1):
        (retry,) = state.handle(FetchFailed(1, "damaged"), now)
        assert isinstance(retry, RetryAt)
        assert state.handle(Tick(), now) == [retry]
        delays.append(retry.at_s - now)
        now = retry.at_s
        assert state.handle(Tick(), now) == [Fetch(1)]
    assert state.handle(FetchFailed(1, "damaged"), now) == [GiveUp(1, "damaged")]
    assert state.handle(Tick(), now + 1e6) == []
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(FIRST_RETRY_S)


def test_what_the_engine_found_damaged_was_never_live_and_is_fetched_again():
    state = fetching(5)
    state.handle(FetchDone(5), 0.0)
    assert state.handle(FetchFailed(5, "damaged"), 0.0) == [RetryAt(FIRST_RETRY_S)]
    assert state.handle(Tick(), FIRST_RETRY_S) == [Fetch(5)]
    assert state.live == -1


def test_what_the_engine_found_damaged_is_not_held_against_a_newer_announcement():
    state = fetching(5)
    state.handle(FetchDone(5), 0.0)
    state.handle(Announced(6), 0.0)
    assert state.handle(FetchFailed(5, "gone", is_final=True), 0.0) == []
    assert (state.handle(Tick(), 0.0), state.attempts) == ([Fetch(6)], 0)


def test_what_is_given_up_tells_every_reason_once_and_those_of_an_earlier_announcement_not():
    state = fetching(4)
    state.handle(FetchFailed(4, "overwritten"), 0.0)
    state.handle(Announced(5), 0.0)
    for reason in (*["damaged"] * (MAX_ATTEMPTS - 1), "timed out"):
        assert state.handle(Tick(), 1e6) == [Fetch(5)]
        said = state.handle(FetchFailed(5, reason), 0.0)
    assert said == [GiveUp(5, "damaged; then timed out")]


def test_what_is_gone_is_given_up_at_once_and_old_goes_on_serving():
    state = fetching(5)
    assert state.handle(FetchFailed(5, "gone", is_final=True), 0.0) == [GiveUp(5, "gone")]
    assert state.live == -1
    state.handle(Announced(6), 0.0)
    assert state.handle(Tick(), 0.0) == [Fetch(6)]


def test_a_failure_after_a_newer_announcement_goes_straight_to_the_newer():
    state = fetching(5)
    state.handle(Announced(6), 0.0)
    assert state.handle(FetchFailed(5, "overwritten", is_final=True), 0.0) == []
    assert state.handle(Tick(), 0.0) == [Fetch(6)]


def test_a_restarted_learner_may_announce_the_same_or_a_lower_version_again():
    state = fetching(5)
    state.handle(FetchFailed(5, "gone", is_final=True), 0.0)
    state.handle(Announced(5), 1.0)
    assert state.handle(Tick(), 1.0) == [Fetch(5)]
    state.handle(Announced(3), 1.0)
    state.handle(FetchFailed(5, "gone", is_final=True), 1.0)
    assert state.handle(Tick(), 1.0) == [Fetch(3)]
