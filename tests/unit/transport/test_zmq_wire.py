"""Packets that are none; how much a socket reads before the rest of the loop has its turn."""

import asyncio

import pytest
import zmq

from asyncrl.errors import CodecError
from asyncrl.transport.zmq_wire import READS_PER_TURN, LoopSocket, ParcelHead, parse_parcel


@pytest.mark.parametrize(("shape", "body"), [
    ([0, 0, 4], [b"123"]), ([0, 0, 4], [b"12345"]), ([0, 0, 4], [b"1234", b"more"]), ([0, 0], [b"1234"]), ([2, 0, 4], [b"1234"]),
    ([0, -1, 4], [b"1234"]), ([0, 0, -4, 0, 1, 8], [b"1234"]), ([0, 0, 4], []), ([], [b"1234"]), ([0, 0, 1 << 70], [b"1234"]),
])  # fmt: skip
def test_a_shape_that_does_not_fit_its_frames_is_refused(shape, body):
    with pytest.raises(CodecError):
        parse_parcel(ParcelHead("session", [], [], shape), body)


async def test_after_drains_and_sends_a_backlog_is_still_read_a_few_messages_a_turn():
    context, taken = zmq.Context(), list[object]()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.rcvhwm = far.sndhwm = 0
    near.bind("inproc://backlog")
    far.connect("inproc://backlog")
    for _ in range(20_000):
        far.send(b"")
    reader = LoopSocket(near, taken.append)
    for _ in range(2):
        reader.drain()
        reader.send([b""])
    for _ in range(10):
        before = len(taken)
        await asyncio.sleep(0)
        assert 0 < len(taken) - before <= 2 * READS_PER_TURN, "one reading each of the descriptor and of the loop's callback"
    reader.close(0)
    far.close(0)
    context.term()
