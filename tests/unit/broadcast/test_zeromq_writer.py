import threading

import pytest
import torch
import zmq

from asyncrl.broadcast.chunks import ChunkRequest
from asyncrl.broadcast.zeromq_keys import CurveKeys
from asyncrl.broadcast.zeromq_server import PartServer
from asyncrl.broadcast.zeromq_shelf import Shelf
from asyncrl.broadcast.zeromq_writer import ZeroMQWriter
from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import make_manifest
from tests.descriptors import open_descriptors

MANIFEST = make_manifest({"w": torch.zeros(100)})
FIRST = ChunkRequest(1, "f", 0, 64)


@pytest.fixture
def writer():
    writer = ZeroMQWriter(ZeroMQMedium())
    writer.open(MANIFEST)
    yield writer
    writer.close()


def test_a_version_that_nobody_would_serve_is_an_error_and_not_a_silence(writer):
    assert writer.commit(0, 1, "f") == writer.location
    writer.close()
    with pytest.raises(BroadcastError, match="version 2 can be fetched by nobody"):
        writer.commit(1, 2, "g")


@pytest.mark.parametrize("key", [b"0" * 40, b"too short"])
def test_a_server_that_cannot_be_opened_leaves_no_descriptor(key):
    descriptors = open_descriptors()
    with pytest.raises((BroadcastError, zmq.ZMQError)):
        PartServer("tcp://nowhere", Shelf(), 1 << 20, CurveKeys(key, key, ()))
    assert open_descriptors() <= descriptors


def test_a_slot_is_busy_for_as_long_as_a_part_of_it_is_on_its_way(writer):
    writer.commit(1, 1, "f")
    arrived = [threading.Event() for _ in range(5)]
    for number, event in enumerate(arrived):
        writer._shelf.lent(FIRST, zmq.MessageTracker(event))
        if number % 2:
            event.set()
    assert writer.busy_slots() == {1}
    for event in arrived:
        event.set()
    assert writer.busy_slots() == frozenset()


def test_what_is_whole_is_lent_until_it_is_given_up(writer):
    writer.commit(0, 1, "f")
    lent = writer._shelf.lend(FIRST)
    writer._slots[0][0] = 7
    assert lent[0] == 7, "the very bytes"
    assert writer._shelf.lend(ChunkRequest(1, "f", 0, 1 << 20)) is None
    writer.overwrite(0, 2)
    assert writer._shelf.lend(FIRST) is None
