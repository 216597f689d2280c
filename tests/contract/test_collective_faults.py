"""Members of a broadcast that stop, die, join late; a learner that goes. The path of `nccl`, over gloo, the CPU for a device.

What differs on a GPU is the name of the backend and where the buffers lie (tests/gpu/test_device_media.py).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from asyncrl.broadcast.collective_membership import ANSWER_S
from asyncrl.broadcast.collective_reader import CollectiveReceiver
from asyncrl.broadcast.collective_writer import CollectiveWriter
from asyncrl.broadcast.device import device_fingerprints
from asyncrl.broadcast.fingerprint import version_fingerprint
from asyncrl.config.broadcast import GlooMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import bucket_ends, make_manifest, view_tensors
from asyncrl.schema.weights import WeightsAvailable

MEMBER = Path(__file__).with_name("collective_member.py")
CPU = torch.device("cpu")
TIMEOUT_S = 3.0
STARTING_S = 60
CONFIG = GlooMedium(timeout_s=TIMEOUT_S, gather_s=0.5)
NUM_TENSORS = 12
BOUND_S = TIMEOUT_S + ANSWER_S + CONFIG.gather_s + 15
"""Loss noticed, the lost one given up, a new group, the version again; and a busy machine."""


class Receive(msgspec.Struct):
    available: WeightsAvailable
    hold_after: int = -1


class Received(msgspec.Struct):
    version: int
    num_tensors: int
    values: list[float]
    took_s: float
    is_held: bool = False
    error: str = ""


class Member:
    """A process that receives."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), str(TIMEOUT_S)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)

    def order(self, available: WeightsAvailable, hold_after: int = -1) -> None:
        self.process.stdin.write(msgspec.json.encode(Receive(available, hold_after)) + b"\n")
        self.process.stdin.flush()

    def go_on(self) -> None:
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def hear(self) -> Received:
        return msgspec.json.decode(self._lines.get(timeout=STARTING_S), type=Received)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=STARTING_S)
        self._listener.join(timeout=STARTING_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def members() -> Iterator[list[Member]]:
    members = [Member() for _ in range(3)]
    yield members
    for member in members:
        member.close()


class Learner:
    """A writer and the slots that a publisher would fill."""

    def __init__(self) -> None:
        self.writer = CollectiveWriter(CONFIG, through=lambda: CPU, backend="gloo")
        self._manifest = make_manifest({f"layer.{i}": torch.zeros(300_000) for i in range(NUM_TENSORS)}, bucket_bytes=2_000_000)
        self._slots = self.writer.open(self._manifest)
        self._num_published = 0

    def publish(self, version: int) -> WeightsAvailable:
        index = self._num_published % 2
        self._num_published += 1
        slot, ends = self._slots[index], bucket_ends(self._manifest)
        self.writer.overwrite(index, version)
        for tensor in view_tensors(slot, self._manifest).values():
            tensor.fill_(version)
        fingerprints = device_fingerprints(slot, ends, CPU)
        name = version_fingerprint(fingerprints)
        location = self.writer.commit(index, version, name)
        return WeightsAvailable(version, "nccl", location, self._manifest, name, 0.0, bucket_fingerprints=fingerprints)


@pytest.fixture
def learner() -> Iterator[Learner]:
    learner = Learner()
    yield learner
    learner.writer.close()


def receive(members: list[Member], available: WeightsAvailable) -> None:
    """Have all of them receive it."""
    for member in members:
        member.order(available)
    for member in members:
        expect(member, available.version)


def expect(member: Member, version: int) -> Received:
    received = member.hear()
    assert (received.version, received.num_tensors, received.values, received.error) == (
        version,
        NUM_TENSORS,
        [float(version)],
        "",
    )
    return received


@pytest.mark.parametrize("loss", [signal.SIGSTOP, signal.SIGKILL])
def test_who_is_lost_in_the_middle_is_dropped_and_the_rest_get_the_version_in_time(learner, members, loss):
    receive(members, learner.publish(1))
    first, lost, last = members
    second = learner.publish(2)
    lost.order(second, hold_after=3)
    first.order(second)
    last.order(second)
    assert lost.hear().is_held
    lost.process.send_signal(loss)
    for member in (first, last):
        assert expect(member, 2).took_s < BOUND_S
    receive([first, last], learner.publish(3))

    if loss == signal.SIGKILL:
        lost.close()
        members[1] = lost = Member()
        lost.order(learner.publish(4))
        expect(lost, 4)
    else:
        lost.process.send_signal(signal.SIGCONT)
        lost.go_on()
        assert lost.hear().version == 2
    receive(members, learner.publish(5))


def test_a_late_joiner_gets_the_version_that_was_sent_already_and_the_next_one_with_the_others(learner, members):
    early, late = members[:2], members[2]
    first = learner.publish(1)
    receive(early, first)
    late.order(first)
    expect(late, 1)
    receive(members, learner.publish(2))


def test_the_learner_takes_the_next_versions_while_a_member_stands_still(learner, members):
    held = learner.publish(1)
    members[0].order(held, hold_after=1)
    assert members[0].hear().is_held
    assert learner.writer.busy_slots() == {0}
    started_s = time.monotonic()
    learner._num_published = 1
    newest = learner.publish(2)
    assert time.monotonic() - started_s < TIMEOUT_S
    members[0].go_on()
    expect(members[0], 1)
    receive(members, newest)


def test_a_learner_that_goes_in_the_middle_is_an_error_in_time(members):
    learner = Learner()
    available = learner.publish(1)
    members[0].order(available, hold_after=1)
    assert members[0].hear().is_held
    learner.writer.close()
    members[0].go_on()
    received = members[0].hear()
    assert "nothing from the learner" in received.error or "can no longer be fetched" in received.error
    assert received.took_s < 2 * BOUND_S


def test_a_receiver_left_in_the_middle_leaves_and_can_come_back(learner):
    available = learner.publish(1)
    receiver = CollectiveReceiver("gloo", TIMEOUT_S)
    tensors = receiver.fetch(available, CPU)
    next(tensors)
    tensors.close()
    assert {float(tensor[0]) for _, tensor in receiver.fetch(available, CPU)} == {1.0}
    receiver.close()


def test_damaged_buckets_are_never_handed_on(learner):
    available = learner.publish(1)
    wrong = b"\x00" * 8
    fingerprints = available.bucket_fingerprints[:8] + wrong + available.bucket_fingerprints[16:]
    receiver = CollectiveReceiver("gloo", TIMEOUT_S)
    tensors = receiver.fetch(msgspec.structs.replace(available, bucket_fingerprints=fingerprints), CPU)
    assert [next(tensors)[0], next(tensors)[0]] == ["layer.0", "layer.1"]
    with pytest.raises(BroadcastError, match="could not be sent in 4 attempts"):
        next(tensors)
    receiver.close()
