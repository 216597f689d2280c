"""Random events against the learner's slots and against the choice of feeders; invariants after each."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.media.zeromq import LEARNER, SILENT_AFTER_S, FeederRequest, Feeders
from asyncrl.weights.publisher import Slots


@settings(max_examples=200)
@given(
    st.booleans(),
    st.integers(2, 4),
    st.lists(
        st.tuples(st.sampled_from(["publish", "break off", "commit", "fail"]), st.sets(st.integers(0, 3)), st.integers(1, 3))
    ),
)
def test_every_published_version_is_committed_superseded_or_failed_and_the_newest_never_superseded(keeps_slots, num_slots, moves):
    slots = Slots(num_slots, keeps_slots)
    published, committed, failed, committing, is_broken_off = [], [], [], [], False

    def go_on():
        slots.check_invariants()
        if (commit := slots.next_commit()) is not None:
            assert not committing, "two commits at once"
            committing.append(commit)

    def finish(is_committed):
        _, version = committing.pop()
        slots.finish(version, is_committed=is_committed)
        (committed if is_committed else failed).append(version)
        go_on()

    for move, busy, step in moves:
        if move in {"publish", "break off"}:
            version = slots.newest + step
            slot = slots.fill(version, frozenset(busy))
            assert slot not in [index for index, _ in committing]
            is_broken_off = move == "break off"  # the newest; whoever published it was told
            if move == "publish":
                published.append(version)
                slots.filled(version)
            else:
                slots.finish(version, is_committed=False)
            go_on()
        elif committing:
            finish(move == "commit")
    while committing:
        finish(True)
    assert committed == sorted(committed)
    assert {*committed, *failed} <= {*published}
    assert not published or is_broken_off or published[-1] in {*committed, *failed}
    assert {*slots._phases} <= {"free", "committed"}


NAMES = [f"g{number}" for number in range(6)]


@settings(max_examples=200)
@given(
    st.integers(0, 3),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["ask", "whole", "lose", "leave", "wait"]), st.floats(0.0, 4.0)),
        max_size=60,
    ),
)
def test_who_feeds_whom_keeps_its_rule_and_everybody_is_fed_in_the_end(fanout, moves):
    feeders, now = Feeders(fanout), 0.0
    requests = {name: FeederRequest(1, "f", name, f"tcp://10.0.0.1:{number}") for number, name in enumerate(NAMES)}
    fed_by = dict[str, str]()
    for name, move, pause_s in moves:
        now += pause_s
        request = requests[name]
        if move == "leave":
            feeders.forget(name)
            requests[name] = FeederRequest(1, "f", name, request.address)
            fed_by.pop(name, None)
        elif move != "wait":
            if move == "lose" and fed_by.get(name):
                request = msgspec.structs.replace(request, lost=fed_by[name])
            requests[name] = request = msgspec.structs.replace(request, is_whole=request.is_whole or move == "whole")
            reply = feeders.find(request, now)
            if not request.is_whole and not reply.wait:
                assert not reply.feeder or reply.feeder != request.lost
                assert reply.feeder == LEARNER or requests[reply.feeder].is_whole or reply.feeder in fed_by
                assert reply.feeder != name
                fed_by[name] = reply.feeder
        feeders.check_invariants()
    unfed = [name for name in NAMES if not requests[name].is_whole]
    for _ in range(len(NAMES) + 2):  # those that were fed are whole, and those that stay silent or slow are not counted
        now += SILENT_AFTER_S + 0.1
        for name in list(unfed):
            if not feeders.find(requests[name], now).wait:
                unfed.remove(name)
                requests[name] = msgspec.structs.replace(requests[name], is_whole=True)
                feeders.find(requests[name], now)
            feeders.check_invariants()
    assert not unfed
