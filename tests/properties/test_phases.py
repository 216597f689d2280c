"""Whatever dies, joins and is wished for, in whatever order: the device has one holder, and nobody waits for ever."""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.control.placement import state as placement
from asyncrl.schema.control import Phase, SetPhase

ROLES = {"learner": "learner", "generator-0": "generator", "generator-1": "generator", "inference-0": "inference"}
PHASES = sorted(placement.HOLDER)


class World:
    """Processes that do as they are told, when their turn comes; each order takes as long as it takes."""

    def __init__(self) -> None:
        self.phases = placement.Phases()
        self.inbox: dict[str, list[SetPhase]] = {}
        self.holds: set[str] = set()
        self.fresh_learner = False
        self.open: Phase | None = None

    def tell(self, event: placement.PhaseEvent) -> None:
        for item in self.phases.handle(event, 0.0):
            match item:
                case placement.Tell(name, order):
                    assert name in self.inbox, f"{name} is not there and was told"
                    self.inbox[name].append(order)
                    assert len(self.inbox[name]) == 1, f"{name} was told again before it answered"
                case placement.LeavePhase(phase):
                    assert self.open in (None, phase)
                    self.open = None
                case placement.EnterPhase(phase):
                    assert self.open is None
                    self.open = phase
        self.phases.check_invariants()
        self.check()

    def check(self) -> None:
        roles = {ROLES[name] for name in self.holds if name != "learner" or not self.fresh_learner}
        assert len(roles) <= 1, f"on the device at once: {self.holds}"
        assert self.open is None or roles <= {placement.HOLDER[self.open]}, f"on the device in {self.open}: {self.holds}"

    def start(self, name: str) -> None:
        if name in self.inbox:
            return
        self.inbox[name] = []
        if name == "learner":  # it loads its model before anybody can tell it anything
            self.holds.add(name)
            self.fresh_learner = True
        self.tell(placement.Joined(name, ROLES[name]))  # type: ignore[arg-type]

    def die(self, name: str) -> None:
        if name not in self.inbox:
            return
        del self.inbox[name]
        self.holds.discard(name)
        self.tell(placement.Left(name))

    def act(self, name: str) -> None:
        """Carry out the oldest order and answer."""
        if not self.inbox.get(name):
            return
        order = self.inbox[name].pop(0)
        is_turn = placement.HOLDER[order.phase] == ROLES[name]
        (self.holds.add if is_turn else self.holds.discard)(name)
        if name == "learner":
            self.fresh_learner = False
        self.check()
        self.tell(placement.Reached(name, order.number))

    def do(self, what: str, who: str) -> None:
        match what:
            case "act":
                self.act(who)
            case "start":
                self.start(who)
            case "die":
                self.die(who)
            case "want":
                self.tell(placement.Wanted(who))  # type: ignore[arg-type]
            case "old answer":
                self.tell(placement.Reached(who, -1))

    def let_all_act(self) -> None:
        for _ in range(6):
            for name in ROLES:
                self.act(name)


NAMES = st.sampled_from(sorted(ROLES))
MOVES = st.one_of(
    st.tuples(st.just("act"), NAMES), st.tuples(st.just("act"), NAMES), st.tuples(st.just("start"), NAMES),
    st.tuples(st.just("die"), NAMES), st.tuples(st.just("want"), st.sampled_from(PHASES)),
    st.tuples(st.just("old answer"), NAMES),
)  # fmt: skip


@settings(max_examples=400)
@given(st.lists(MOVES, max_size=80), st.sampled_from(PHASES))
def test_one_holder_at_a_time_and_the_wanted_phase_in_the_end(moves: list[tuple[str, str]], last: str) -> None:
    world = World()
    for what, who in moves:
        world.do(what, who)
    for name in ROLES:
        world.start(name)
    world.let_all_act()
    world.tell(placement.Wanted(last))  # type: ignore[arg-type]
    world.let_all_act()
    assert world.phases.now == world.open == last
    assert world.phases.waiting_for == ""
