"""Members of a broadcast that stop, die, join late; a learner that goes. The path of `nccl`, over gloo, the CPU for a device.

What differs on a GPU is the name of the backend and where the buffers lie (tests/gpu/test_device_media.py).
"""

import signal
import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
import torch
import torch.distributed as dist
import zmq

from asyncrl.config.broadcast import GlooMedium
from asyncrl.models.layout import make_manifest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.base import ReceiverArguments
from asyncrl.weights.media.collective import Answer, CollectiveWriter, FromLearner, Noted, Ready
from asyncrl.weights.media.collective_group import Group, GroupBrokenError, open_store
from asyncrl.weights.media.collective_member import CollectiveReceiver
from asyncrl.weights.sockets import ask, decode, open_dealer
from tests.contract.line_process import LineProcess, LineProcesses
from tests.contract.media.learners import CPU, SlotLearner
from tests.contract.media.peers import Receive, Received

TIMEOUT_S = 6.0
CONFIG = GlooMedium(timeout_s=TIMEOUT_S, gather_s=0.5)
NUM_TENSORS = 12
BOUND_S = TIMEOUT_S + CONFIG.gather_s + 15
"""Loss noticed, the lost one given up, a new group, the version again; and a busy machine."""


@pytest.fixture(scope="module")
def crew() -> Iterator[LineProcesses]:
    with closing(LineProcesses("tests.contract.media.peers", "receive", str(TIMEOUT_S))) as crew:
        yield crew


@pytest.fixture
def members(crew: LineProcesses) -> list[LineProcess]:
    """Three processes that receive."""
    return crew.take(3)


MANIFEST = make_manifest({f"layer.{i}": torch.zeros(300_000) for i in range(NUM_TENSORS)}, bucket_bytes=2_000_000)


@pytest.fixture
def learner() -> Iterator[SlotLearner]:
    with closing(CollectiveWriter(CONFIG, through=lambda: CPU)) as writer:
        yield SlotLearner(writer, MANIFEST)


def receive(members: list[LineProcess], available: WeightsAvailable) -> None:
    """Have all of them receive it."""
    for member in members:
        member.tell(Receive(available))
    for member in members:
        expect(member, available.version)


def expect(member: LineProcess, version: int) -> Received:
    received = member.hear(Received)
    assert msgspec.structs.replace(received, took_s=0.0) == Received(version, NUM_TENSORS, [float(version)], 0.0)
    return received


@pytest.mark.parametrize("loss", [signal.SIGSTOP, signal.SIGKILL])
def test_who_is_lost_in_the_middle_is_dropped_and_the_rest_get_the_version_in_time(learner, crew, members, loss):
    receive(members, learner.publish(1))
    first, lost, last = members
    second = learner.publish(2)
    lost.tell(Receive(second, hold_after=3))
    first.tell(Receive(second))
    last.tell(Receive(second))
    assert lost.hear(Received).is_held
    lost.process.send_signal(loss)
    for member in (first, last):
        assert expect(member, 2).took_s < BOUND_S
    receive([first, last], learner.publish(3))

    if loss == signal.SIGKILL:
        members[1] = lost = crew.take(3)[1]
        lost.tell(Receive(learner.publish(4)))
        expect(lost, 4)
    else:
        lost.process.send_signal(signal.SIGCONT)
        lost.tell(None)
        assert lost.hear(Received).version == 2
    receive(members, learner.publish(5))


def test_a_late_joiner_gets_the_version_that_was_sent_already_and_the_next_one_with_the_others(learner, members):
    early, late = members[:2], members[2]
    first = learner.publish(1)
    receive(early, first)
    late.tell(Receive(first))
    expect(late, 1)
    receive(members, learner.publish(2))


def test_the_learner_takes_the_next_versions_while_a_member_stands_still(learner, members):
    held = learner.publish(1)
    members[0].tell(Receive(held, hold_after=1))
    assert members[0].hear(Received).is_held
    assert learner.writer.busy_slots() == {1}
    started_s = time.monotonic()
    newest = learner.publish(2)
    assert time.monotonic() - started_s < TIMEOUT_S
    members[0].tell(None)
    expect(members[0], 1)
    receive(members, newest)


def test_the_version_being_sent_keeps_its_slot_though_another_is_wanted_which_then_is_refused(learner, members):
    """Who is refused asks for the newest, and has it in the next attempt with the others."""
    sent, (slow, early) = learner.publish(1), members[:2]
    slow.tell(Receive(sent, hold_after=1))
    assert slow.hear(Received).is_held
    wanted, context = learner.publish(2), zmq.Context()
    with closing(open_dealer(context, f"tcp://{wanted.location}", None, name=b"member")) as dealer:
        ask(dealer, Ready(wanted.version, wanted.fingerprint))
        assert dealer.poll(BOUND_S * 1000)
        assert decode(dealer.recv_multipart(), FromLearner) == Noted()
        assert learner.writer.busy_slots() == {1}
        ask(dealer, Answer(failure="it left"))
    context.term()
    newest = learner.publish(4)
    early.tell(Receive(wanted))
    assert "version 2 can no longer be fetched" in early.hear(Received).error
    early.tell(Receive(newest))
    slow.tell(None)
    expect(slow, 1)
    slow.tell(Receive(newest))
    expect(early, 4)
    expect(slow, 4)


def test_a_learner_that_goes_in_the_middle_is_an_error_in_time(learner, members):
    available = learner.publish(1)
    members[0].tell(Receive(available, hold_after=1))
    assert members[0].hear(Received).is_held
    learner.writer.close()
    members[0].tell(None)
    received = members[0].hear(Received)
    assert "nothing from the learner" in received.error or "can no longer be fetched" in received.error
    assert received.took_s < 2 * BOUND_S


def test_a_receiver_left_in_the_middle_leaves_and_can_come_back(learner):
    available = learner.publish(1)
    receiver = CollectiveReceiver(msgspec.json.encode(ReceiverArguments("", CONFIG)))
    tensors = receiver.fetch(available, CPU)
    next(tensors)
    tensors.close()
    assert {float(tensor[0]) for _, tensor in receiver.fetch(available, CPU)} == {1.0}
    receiver.close()


def why_not_opened(size: int, device: str) -> str:
    """What becomes of rank 0's group where nobody else comes."""
    store, _ = open_store("127.0.0.1", TIMEOUT_S)
    group = Group("nccl", 0, size, "127.0.0.1", 0.2, store, torch.device(device))
    with pytest.raises(GroupBrokenError) as error:
        group.wait_open(lambda: None)
    group.leave()
    return str(error.value)


def test_nobody_begins_nccl_s_own_wait_before_all_have_come():
    assert "keys: /member 0, /member 1" in why_not_opened(2, "cuda:0")


def test_nccl_uses_the_current_gpu_where_the_engine_s_has_no_number(monkeypatch):
    class NCCL:
        def __init__(self, *_):
            raise RuntimeError("as far as NCCL")

        Options = type("Options", (), {})

    chosen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    assert "as far as NCCL" in why_not_opened(1, "cuda")
    assert chosen == [3]
