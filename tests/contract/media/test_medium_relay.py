"""Generators that feed each other over `zeromq`: real processes, real sockets; relays that die, stand still or crawl."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import pytest
import torch
import zmq

from asyncrl.config.broadcast import BroadcastConfig, ZeroMQMedium
from asyncrl.models.layout import make_manifest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.zeromq import FeederRequest, PartReply, PartRequest, ZeroMQWriter
from asyncrl.weights.media.zeromq_reader import ZeroMQReader
from asyncrl.weights.sockets import SEND_QUEUE, WINDOW, ask, open_dealer
from tests.contract.line_process import LineProcesses
from tests.contract.media.learners import SlotLearner
from tests.contract.media.peers import Fetched, Order
from tests.contract.tcp_proxy import TcpProxy, tcp_proxy

TIMEOUT_S = 300
CHUNK_BYTES = 64 << 10
MODEL_BYTES = 8 << 20
MEDIUM = ZeroMQMedium(chunk_bytes=CHUNK_BYTES, fanout=1)
MANIFEST = make_manifest({"layer.0": torch.zeros(MODEL_BYTES // 4)})
WINDOW_BYTES = WINDOW * CHUNK_BYTES


@pytest.fixture
def learner() -> Iterator[SlotLearner]:
    with contextlib.closing(ZeroMQWriter(MEDIUM, None)) as writer:
        yield SlotLearner(writer, MANIFEST)


@pytest.fixture(scope="module")
def generators() -> Iterator[LineProcesses]:
    with contextlib.closing(LineProcesses("tests.contract.media.peers", "subscribe")) as generators:
        yield generators


class Asker:
    """A bare DEALER that asks one address for parts."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.socket = open_dealer(self._context, address, None)

    def ask(self, available: WeightsAvailable, offset: int = 0) -> tuple[PartReply, bytes]:
        """Return the answer and its bytes."""
        ask(self.socket, PartRequest(available.version, available.fingerprint, offset, CHUNK_BYTES))
        assert self.socket.poll(TIMEOUT_S * 1000), "no answer"
        header, *parts = self.socket.recv_multipart()
        return msgspec.msgpack.decode(header, type=PartReply), b"".join(parts)

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()


class Fetch:
    """A fetch on a thread of this process."""

    def __init__(self, reader: ZeroMQReader, available: WeightsAvailable) -> None:
        self._available, self._into = available, np.zeros(MODEL_BYTES, np.uint8)
        self._found = ThreadPoolExecutor(1).submit(reader.fetch, available, self._into.data, threading.Event())

    def join(self) -> set[float]:
        """Return the distinct values that arrived."""
        assert self._found.result(TIMEOUT_S) == self._available.bucket_fingerprints
        return set(np.unique(self._into.view(np.float32)).tolist())


@pytest.fixture
def relay() -> Iterator[ZeroMQReader]:
    """A generator's end, which feeds others."""
    with contextlib.closing(ZeroMQReader(MEDIUM)) as reader:
        yield reader


@pytest.fixture
def asker(relay) -> Iterator[Asker]:
    """Who asks the relay."""
    with contextlib.closing(Asker(relay.server.location)) as asker:
        yield asker


def order_of(run_folder: Path, available: WeightsAvailable) -> Order:
    return Order(BroadcastConfig(medium=MEDIUM), str(run_folder), available)


def through(proxy: TcpProxy, available: WeightsAvailable) -> WeightsAvailable:
    return msgspec.structs.replace(available, location=proxy.address)


def test_three_generators_get_everything_while_the_learner_sends_it_about_once(learner, generators, tmp_path):
    three = generators.take(3)
    shares = []
    for version in range(1, 6):
        before = learner.writer.server.served_bytes
        available = learner.publish(version)
        for generator in three:
            generator.tell(order_of(tmp_path, available))
        assert [generator.hear(Fetched) for generator in three] == [Fetched(version, [float(version)])] * 3
        shares.append(learner.writer.server.served_bytes - before)
    assert min(shares) >= MODEL_BYTES
    assert median(shares) < 2 * MODEL_BYTES  # where the first of them stands still, the others ask the learner


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_relay_that_dies_or_stands_still_costs_the_next_no_part_twice(learner, generators, relay, asker, tmp_path, how):
    (lost,) = generators.take(1)
    available = learner.publish(1)
    with tcp_proxy(available.location, stop_after_bytes=MODEL_BYTES // 2) as link:
        lost.tell(order_of(tmp_path, through(link, available)))
        wait_until_served(learner, MODEL_BYTES // 2)
        fetch = Fetch(relay, available)
        while (answer := asker.ask(available, offset=MODEL_BYTES // 4))[0].gone:
            pass  # it has not begun yet
        # It passes on what it has while the rest is still to come.
        assert set(np.frombuffer(answer[1], np.float32).tolist()) == {1.0}
        lost.process.send_signal(how)
        assert fetch.join() == {1.0}
        lost.kill()
    sent_to_lost = MODEL_BYTES // 2 + 2 * WINDOW_BYTES
    assert learner.writer.server.served_bytes <= sent_to_lost + MODEL_BYTES * 3 // 4 + 2 * WINDOW_BYTES


def wait_until_served(learner: SlotLearner, num_bytes: int) -> None:
    """Look at the learner's count until it is there."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while learner.writer.server.served_bytes < num_bytes:
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)


def test_a_slow_generator_does_not_hold_the_others(learner, generators, tmp_path):
    (relay,) = generators.take(1)
    available = learner.publish(1)
    children = [ZeroMQReader(MEDIUM) for _ in range(2)]
    with tcp_proxy(available.location, bytes_per_s=200_000) as link:
        relay.tell(order_of(tmp_path, through(link, available)))
        wait_until_served(learner, CHUNK_BYTES)
        fetches = [Fetch(child, available) for child in children]
        assert [fetch.join() for fetch in fetches] == [{1.0}, {1.0}]
        relay.kill()
    for child in children:
        child.close()


def test_a_relay_that_moves_on_never_sends_a_mixture(learner, relay, asker):
    into = np.zeros(MODEL_BYTES, np.uint8)
    available = learner.publish(1)
    num_parts = 0

    def move_on() -> None:
        """Until it was met in the middle, too: who asks may be slow to begin."""
        nonlocal available
        version = 2
        while version < (12 if num_parts else 1000):
            relay.fetch(available, into.data, threading.Event())
            available = learner.publish(version)
            version += 1

    thread = threading.Thread(target=move_on)
    thread.start()
    while thread.is_alive():
        asked = available
        for offset in range(0, MODEL_BYTES, MODEL_BYTES // 8):
            reply, part = asker.ask(asked, offset)
            if not reply.gone:
                assert set(np.frombuffer(part, np.float32).tolist()) == {float(asked.version)}
                num_parts += 1
    assert num_parts


def test_damage_on_a_relay_is_not_passed_on_twice(learner, relay, asker):
    """Who got damaged bytes fetches them again, from somebody else, and does not serve them meanwhile."""
    available = learner.publish(1)
    feeder_into, relay_into = np.zeros(MODEL_BYTES, np.uint8), np.zeros(MODEL_BYTES, np.uint8)
    with contextlib.closing(ZeroMQReader(MEDIUM)) as feeder:
        feeder.fetch(available, feeder_into.data, threading.Event())
        feeder_into[1000] ^= 1
        assert relay.fetch(available, relay_into.data, threading.Event()) != available.bucket_fingerprints
        assert asker.ask(available)[0].gone
        assert relay.fetch(available, relay_into.data, threading.Event()) == available.bucket_fingerprints


def test_the_learner_may_ask_what_is_being_fetched_while_another_thread_commits(learner):
    writer, done = learner.writer, threading.Event()

    def commit_over_and_over() -> None:
        while not done.is_set():
            for slot in range(2):
                writer.overwrite(slot)
                writer.commit(slot, slot, "made up")

    with ThreadPoolExecutor(1) as pool:
        committing, until_s = pool.submit(commit_over_and_over), time.monotonic() + 1.0
        try:
            while time.monotonic() < until_s:
                assert not writer.busy_slots()
        finally:
            done.set()
        committing.result()


def test_malformed_requests_to_a_relay_are_counted_and_not_answered(learner, relay, asker):
    available = learner.publish(1)
    assert Fetch(relay, available).join() == {1.0}
    place = FeederRequest(1, available.fingerprint, "me")
    too_far = PartRequest(1, available.fingerprint, MODEL_BYTES, 8)
    too_large = PartRequest(1, available.fingerprint, 0, CHUNK_BYTES + 1)
    nested = b"\x82\xa1a" + b"\x91" * 1015 + b"\x01"
    for bad in (b"", b"\xff" * 40, nested, *map(msgspec.msgpack.encode, (place, too_far, too_large))):
        asker.socket.send(bad)
    asker.socket.send_multipart([b"two", b"frames"])
    assert asker.ask(available)[0].num_bytes == CHUNK_BYTES
    assert relay.server.refused == 7


def test_who_asks_and_never_reads_costs_a_queue_of_parts_and_holds_nobody_up(learner):
    """What was sent lies in its queue and in the system's socket buffers, both bounded; the rest is lost."""
    available = learner.publish(1)
    num_requests = 2400
    context = zmq.Context()
    greedy = context.socket(zmq.DEALER)
    greedy.rcvhwm, greedy.rcvbuf = 1, 1 << 16
    greedy.connect(available.location)
    for _ in range(num_requests):
        greedy.send(msgspec.msgpack.encode(PartRequest(1, available.fingerprint, 0, CHUNK_BYTES)))
    modest = Asker(available.location)
    for _ in range(300):  # by turns with the other: who gets the last answer knows that all are dealt with
        assert modest.ask(available)[0].num_bytes == CHUNK_BYTES
    queued_bytes = learner.writer.server.served_bytes - 300 * CHUNK_BYTES
    assert queued_bytes < SEND_QUEUE * CHUNK_BYTES + (16 << 20) < num_requests * CHUNK_BYTES // 4
    greedy.close(linger=0)
    context.term()
    modest.close()


def test_a_break_costs_what_was_under_way_and_nothing_else(learner, relay):
    available = learner.publish(1)
    with tcp_proxy(available.location, stop_after_bytes=MODEL_BYTES // 2) as link:
        fetch = Fetch(relay, through(link, available))
        wait_until_served(learner, MODEL_BYTES // 2)
        link.break_off()
        assert fetch.join() == {1.0}
    assert learner.writer.server.served_bytes <= MODEL_BYTES + 4 * WINDOW_BYTES


def test_a_link_that_takes_long_for_one_part_brings_the_version_in_smaller_ones():
    medium = ZeroMQMedium(chunk_bytes=MODEL_BYTES, fanout=1)
    with contextlib.closing(ZeroMQWriter(medium)) as writer, contextlib.closing(ZeroMQReader(medium)) as reader:
        available = SlotLearner(writer, MANIFEST).publish(1)
        with tcp_proxy(available.location, bytes_per_s=2_000_000) as link:
            assert Fetch(reader, through(link, available)).join() == {1.0}
