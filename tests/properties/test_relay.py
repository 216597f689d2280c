"""Random events against who feeds whom; invariants after each."""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.broadcast.relay_child import AskFrom, AskPlace, GiveUp, Gone, Heard, Lost, Placed, RelayChild
from asyncrl.broadcast.relay_tree import LEARNER, SILENT_AFTER_S, Left, PlaceAsked, RelayTree
from asyncrl.broadcast.state import Tick

NAMES = [f"s{number}" for number in range(8)]
MODEL_BYTES = 1 << 30


def address_of(name: str) -> str:
    return f"tcp://10.0.0.{name[1:]}:5000"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "whole", "left", "tick"]),
            st.sampled_from(NAMES),
            st.frozensets(st.sampled_from(NAMES), max_size=2),
            st.booleans(),
            st.floats(0, 4),
        ),
        max_size=60,
    ),
)
def test_nobody_is_fed_in_a_circle_by_too_busy_or_by_lost_ones_whatever_happens(fanout, moves):
    tree, now, have = RelayTree(fanout), 0.0, dict.fromkeys(NAMES, 0)
    for move, name, lost, serves, wait_s in moves:
        now += wait_s
        match move:
            case "ask":
                have[name] += int(wait_s * 1e6)
                address = address_of(name) if serves else ""
                lost_others = tuple(lost - {name})
                (place,) = tree.handle(PlaceAsked(name, address, "host", lost_others, have[name]), now)
                assert place.parent not in {name, *lost_others}
                assert place.parent == LEARNER or place.address == address_of(place.parent)
                assert fanout or place.parent == LEARNER
            case "whole":
                assert tree.handle(PlaceAsked(name, address_of(name), "host", is_whole=True), now) == []
            case "left":
                tree.handle(Left(name), now)
            case _:
                tree.handle(Tick(), now)
        tree.check_invariants()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.permutations(NAMES), st.randoms(use_true_random=False))
def test_where_nobody_is_lost_the_learner_feeds_no_more_than_fanout_and_everybody_is_fed(fanout, names, random):
    tree, asked = RelayTree(fanout), []
    for number, name in enumerate(names):
        (place,) = tree.handle(PlaceAsked(name, address_of(name)), number * 0.01)
        assert place.parent in {LEARNER, *asked}
        asked.append(name)
        again = random.choice(asked)
        assert len(tree.handle(PlaceAsked(again, address_of(again)), number * 0.01)) == 1
        tree.check_invariants()
        assert tree.num_fed_by_learner <= fanout


class World:
    """Subscribers, some of which die or stand still, and a learner; parts take one round of time each."""

    def __init__(self, fanout: int, num_parts: int, names: list[str]) -> None:
        self.tree = RelayTree(fanout)
        self.num_parts = num_parts
        self.children = {name: RelayChild(0.0, 20.0) for name in names}
        self.have = dict.fromkeys(names, 0)
        self.dead: set[str] = set()
        self.gave_up: set[str] = set()
        self.sent_by_learner = 0
        self.now = 0.0

    def step(self) -> None:
        """Let a tenth of a second pass."""
        self.now += 0.1
        self.tree.handle(Tick(), self.now)
        for name, child in self.children.items():
            if name not in self.dead and self.have[name] < self.num_parts:
                self.carry_out(name, child.handle(Tick(), self.now))
                self.feed(name, child)
                child.check_invariants()
        self.tree.check_invariants()

    def carry_out(self, name: str, instructions: list[object]) -> None:
        child = self.children[name]
        for instruction in instructions:
            match instruction:
                case AskPlace(lost):
                    have = self.have[name] * (1 << 20)
                    (place,) = self.tree.handle(PlaceAsked(name, address_of(name), "", lost, have), self.now)
                    self.carry_out(name, child.handle(Placed(place.parent, place.address), self.now))
                case AskFrom(parent, _):
                    assert child.parent == parent
                case GiveUp():
                    self.gave_up.add(name)

    def feed(self, name: str, child: RelayChild) -> None:
        """Move one part to `name` if whoever feeds it has one more."""
        parent = child.parent
        if parent is None or parent in self.dead:
            return
        if parent != LEARNER and self.have[parent] <= self.have[name]:
            child.handle(Heard(parent, is_part=False), self.now)
            return
        self.sent_by_learner += parent == LEARNER
        self.have[name] += 1
        child.handle(Heard(parent, is_part=True), self.now)
        if self.have[name] == self.num_parts:
            self.tree.handle(PlaceAsked(name, address_of(name), is_whole=True), self.now)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2), st.sets(st.tuples(st.integers(0, 60), st.sampled_from(NAMES)), max_size=5))
def test_everyone_who_lives_gets_everything_and_the_learner_pays_for_fanout_and_the_dead(fanout, deaths):
    world = World(fanout, num_parts=40, names=NAMES)
    deaths = {name: step for step, name in deaths}
    for step in range(600):
        world.dead |= {name for name, at in deaths.items() if at == step}
        world.step()
    alive = set(NAMES) - world.dead
    assert not world.gave_up
    assert {name for name in alive if world.have[name] == 40} == alive
    # Those that the dead fed may all come to the learner, nobody twice; slow ones (they wait for the dead) cost a place more.
    assert world.sent_by_learner <= (fanout + (1 + fanout) * len(deaths)) * 40


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["placed", "gone", "lost", "part", "waiting", "tick"]),
            st.sampled_from([LEARNER, *NAMES]),
            st.floats(0, 3),
        ),
        max_size=80,
    )
)
def test_a_child_never_waits_for_a_silent_feeder_and_never_returns_to_a_lost_one(moves):
    child, now, lost, heard_s = RelayChild(0.0, 20.0), 0.0, set(), 0.0
    for move, name, wait_s in moves:
        now += wait_s
        event = {
            "placed": Placed(name, "somewhere"),
            "gone": Gone(name, "why"),
            "lost": Lost(name),
            "part": Heard(name, is_part=True),
            "waiting": Heard(name, is_part=False),
            "tick": Tick(),
        }[move]
        before = child.parent
        instructions = child.handle(event, now)
        child.check_invariants()
        if any(isinstance(instruction, GiveUp) for instruction in instructions):
            return
        if name == child.parent and move in {"placed", "part", "waiting"} and not (move == "placed" and before == name):
            heard_s = now
        if before and child.parent is None:
            lost.add(before)
            assert instructions == [AskPlace(child.lost)]
            assert before in child.lost
        for instruction in instructions:
            if isinstance(instruction, AskFrom):
                assert instruction.parent not in lost
        if move == "tick" and child.parent:
            assert now - heard_s <= SILENT_AFTER_S
