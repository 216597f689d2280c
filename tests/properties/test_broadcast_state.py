"""Random events against the hand-off of versions; invariants after each."""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.broadcast.board import ChunkAsked, FetchOver, SubscriberBoard
from asyncrl.broadcast.chunks import ChunkRequest, Download, parts_of
from asyncrl.broadcast.state import (
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


@settings(max_examples=200, deadline=None)
@given(
    st.booleans(),
    st.integers(2, 4),
    st.lists(st.tuples(st.sampled_from(["publish", "commit", "fail"]), st.sets(st.integers(0, 3)), st.integers(1, 3))),
)
def test_every_published_version_ends_announced_or_dropped_and_the_newest_is_never_superseded(keeps_slots, num_slots, moves):
    state = PublisherState(num_slots, keeps_slots)
    published, announced, dropped, committing = [], [], [], []

    def carry_out(instructions):
        state.check_invariants()
        for instruction in instructions:
            match instruction:
                case Stage(slot, version):
                    assert slot not in [commit.slot for commit in committing]
                    assert version == published[-1]
                case Commit():
                    committing.append(instruction)
                case Announce(version):
                    announced.append(version)
                case Drop(version):
                    dropped.append(version)

    def finish(event_of):
        version = committing.pop(0).version
        carry_out(state.handle(event_of(version), 0.0))

    for move, busy, step in moves:
        if move == "publish":
            published.append((published[-1] if published else 0) + step)
            carry_out(state.handle(PublishRequested(published[-1], frozenset(busy)), 0.0))
        elif committing:
            finish(Committed if move == "commit" else lambda version: CommitFailed(version, "disk"))
        assert len(committing) <= 1
    while committing:
        finish(Committed)
    assert announced == sorted(announced)
    assert sorted(announced + dropped) == published
    assert state.num_unfinished == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["announce", "announce lower", "done", "failed", "gone", "live", "tick", "wait"]),
            st.integers(1, 3),
        ),
        max_size=60,
    )
)
def test_a_generator_only_moves_forward_and_always_reaches_what_is_announced_last(moves):  # noqa: PLR0912 - a branch an event
    state, now, latest, live = SubscriberState(), 0.0, 0, [-1]

    def handle(event):
        instructions = state.handle(event, now)
        state.check_invariants()
        for instruction in instructions:
            if isinstance(instruction, Fetch | GiveUp):
                assert instruction.version > state.live
            if isinstance(instruction, RetryAt):
                assert instruction.at_s > now
        return instructions

    for move, step in moves:
        match move:
            case "announce":
                latest += step
                handle(Announced(latest))
            case "announce lower":
                handle(Announced(max(0, latest - step)))
            case "done" if state.fetching is not None:
                handle(FetchDone(state.fetching))
            case "failed" | "gone" if (on_its_way := state.fetching or state.staged) is not None:
                handle(FetchFailed(on_its_way, "why", is_final=move == "gone"))
            case "live" if state.staged is not None:
                handle(WentLive(state.staged))
            case "wait":
                now += step
            case _:
                handle(Tick())
        live.append(state.live)
    assert live == sorted(live)

    target = max(latest + 1, state.live + 1)
    handle(Announced(target))
    for _ in range(6):
        now += 10.0
        handle(Tick())
        if state.fetching is not None:
            handle(FetchDone(state.fetching))
        if state.staged is not None:
            handle(WentLive(state.staged))
    assert state.live == target
    assert handle(Tick()) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ask", "over", "tick"]), st.integers(0, 5), st.integers(1, 4), st.floats(0, 40))))
def test_the_board_never_spares_a_version_nobody_asked_for(moves):
    board, now, asked = SubscriberBoard(), 0.0, set()
    for move, subscriber, version, wait_s in moves:
        now += wait_s
        name = bytes([subscriber])
        if move == "ask":
            asked.add(version)
            board.handle(ChunkAsked(name, version), now)
        else:
            board.handle(FetchOver(name) if move == "over" else Tick(), now)
        board.check_invariants()
        assert board.versions_in_use(now) <= asked


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_download_takes_every_byte_once_whatever_is_lost_repeated_or_reordered(total_bytes, chunk_bytes, window, random):
    download = Download(total_bytes, chunk_bytes, window, resend_s=1.0)
    under_way, taken, now = [], [], 0.0
    while not download.is_done:
        asked = [ChunkRequest(0, "", offset, num_bytes) for offset, num_bytes in download.to_ask(now)]
        under_way += [(part.offset, part.num_bytes) for request in asked for part in parts_of(request, chunk_bytes)]
        download.check_invariants()
        random.shuffle(under_way)
        if under_way and random.random() < 0.7:
            part = under_way[-1] if random.random() < 0.2 else under_way.pop()
            if download.take(*part):
                taken.append(part)
        elif under_way and random.random() < 0.3:
            under_way.pop()
        else:
            now += 1.0
        download.check_invariants()
    assert sum(size for _, size in taken) == total_bytes
    assert sorted(offset for offset, _ in taken) == list(range(0, total_bytes, chunk_bytes))
