"""Who is told what, and when, on a device that phases share."""

from __future__ import annotations

from asyncrl.control.placement.state import EnterPhase, Joined, LeavePhase, Left, Phases, Reached, Tell, Wanted
from asyncrl.schema.control import SetPhase


def tell(name: str, phase: str, number: int) -> Tell:
    return Tell(name, SetPhase(phase, number))  # type: ignore[arg-type]


def in_rollout() -> Phases:
    """A learner and two generators, in the first rollout."""
    phases = Phases()
    for event in (
        Joined("learner", "learner"), Joined("generator-0", "generator"), Joined("generator-1", "generator"),
        Reached("learner", 0), Wanted("rollout"), Reached("learner", 1), Reached("generator-0", 1), Reached("generator-1", 1),
    ):  # fmt: skip
        phases.handle(event)
        phases.check_invariants()
    assert phases.now == "rollout"
    return phases


def test_a_learner_that_dies_in_a_rollout_has_the_device_again_before_it_is_back():
    phases = in_rollout()
    assert phases.handle(Left("learner"))[0] == LeavePhase("rollout")
    phases.handle(Reached("generator-0", 2))
    assert phases.handle(Reached("generator-1", 2)) == []
    assert phases.waiting_for == "a learner to be ready"
    assert phases.handle(Joined("learner", "learner")) == [tell("learner", "train", 2)]
    assert phases.handle(Reached("learner", 2)) == [EnterPhase("train")]


def test_inference_workers_take_the_device_between_generators_and_learner():
    phases = in_rollout()
    assert phases.handle(Joined("inference-0", "inference")) == []
    assert phases.has_newcomer("inference")
    assert phases.handle(Wanted("inference")) == [
        LeavePhase("rollout"), tell("generator-0", "inference", 2), tell("generator-1", "inference", 2)
    ]  # fmt: skip
    phases.handle(Reached("generator-0", 2))
    assert phases.handle(Reached("generator-1", 2)) == [tell("inference-0", "inference", 2)]
    assert phases.waiting_for == "inference-0 to take the device for phase inference"
    assert phases.handle(Reached("inference-0", 2)) == [EnterPhase("inference")]
    assert not phases.has_newcomer("inference")
    assert phases.handle(Wanted("train")) == [LeavePhase("inference"), tell("inference-0", "train", 3)]
    assert phases.handle(Reached("inference-0", 3)) == [tell("learner", "train", 3)]
