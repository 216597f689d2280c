"""Random events against the membership of the collective media; invariants after each."""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.broadcast.collective_membership import (
    ANSWER_S,
    MAX_ATTEMPTS,
    Answered,
    Asked,
    Dropped,
    Left,
    Membership,
    Offered,
    Progress,
    Refuse,
    Sent,
    Start,
    Stop,
    Tick,
    Withdrawn,
)

TIMEOUT_S, GATHER_S = 10.0, 1.0
MEMBERS = "abcd"
MOVES = ["ask", "ask old", "done", "fail", "leave", "sent", "send fails", "offer", "withdraw", "progress", "wait", "wait long"]


class World:
    """Keeps the books that the learner's side effects would keep, and checks what it is told."""

    def __init__(self) -> None:
        self.state = Membership(TIMEOUT_S, GATHER_S)
        self.now = 0.0
        self.newest = 0
        self.epoch, self.group, self.attempt = 0, (), None
        self.open_requests: dict[str, int] = {}

    def tell(self, event) -> None:
        instructions = self.state.handle(event, self.now)
        self.state.check_invariants()
        for instruction in instructions:
            match instruction:
                case Start(epoch, version, members, is_new):
                    assert version in self.state.offered
                    assert members
                    assert is_new == (epoch == self.epoch + 1)
                    assert is_new or members == self.group
                    assert all(self.open_requests.pop(member) == version for member in members)
                    self.epoch, self.group, self.attempt = epoch, members, instruction
                case Stop(epoch, members):
                    assert (epoch, members) == (self.epoch, self.group)
                    self.group = ()
                case Refuse(member):
                    self.open_requests.pop(member, None)
                case Dropped():
                    pass

    def move(self, move: str, member: str) -> None:
        version = max(0, self.newest - (move == "ask old"))
        match move:
            case "ask" | "ask old":
                attempt = self.state._attempt
                if attempt is None or member not in attempt.silent:
                    self.open_requests[member] = version
                self.tell(Asked(member, version))
            case "done" | "fail":
                self.tell(Answered(member, self.epoch, "" if move == "done" else "broke"))
            case "leave":
                self.open_requests.pop(member, None)
                self.tell(Left(member))
            case "sent" | "send fails":
                self.tell(Sent(self.epoch, "" if move == "sent" else "broke"))
            case "offer":
                self.newest += 1
                self.tell(Offered(self.newest))
            case "withdraw":
                if self.state.offered:
                    self.tell(Withdrawn(min(self.state.offered)))
            case "progress":
                self.tell(Progress(self.epoch))
            case "wait" | "wait long":
                self.now += 0.3 if move == "wait" else TIMEOUT_S
                self.tell(Tick())


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.sampled_from(MEMBERS)), max_size=80))
def test_whoever_asks_is_begun_with_or_refused_in_bounded_time_whatever_happened_before(moves):
    world = World()
    for move, member in moves:
        world.move(move, member)
    for _ in range(3 + 3 * MAX_ATTEMPTS):
        world.now += TIMEOUT_S + ANSWER_S
        world.tell(Tick())
    assert world.open_requests == {}
    assert world.state._attempt is None
