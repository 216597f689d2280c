"""How much a socket reads before the rest of the loop has its turn."""

import asyncio

import zmq

from asyncrl.transport.zmq_socket import READS_PER_TURN, LoopSocket


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
