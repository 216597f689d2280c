"""A session over a wire that loses any suffix of what is in flight."""

import asyncio
from unittest.mock import AsyncMock

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.schema.control import PROTOCOL, AbortGroup, Hello
from asyncrl.transport.packets import Parcel
from asyncrl.transport.protocol import Connection, Lane, Refused

HELLO = Hello(PROTOCOL, "generator", "generator-0", "incarnation", 7)
ACTIONS = st.lists(st.tuples(st.sampled_from(["send", "ack", "cut", "mend", "forget"]), st.integers(0, 20)), max_size=200)


@given(st.integers(1, 8), ACTIONS)
def test_every_message_is_taken_once_in_order_whatever_is_lost(window, actions):
    asyncio.run(lossy_story(window, actions))


async def lossy_story(window: int, actions) -> None:
    near, far = (Connection(HELLO, window, 1 << 20, AsyncMock(), Refused()) for _ in range(2))
    taken, waiting, num_sent, is_whole = [], [], 0, True

    def wire_to(other: Connection):
        def carry(parcel: Parcel) -> bool:
            if is_whole:
                other.deliver(parcel)
            return True

        return carry

    near.wire, far.wire = wire_to(far), wire_to(near)

    async def receive_all() -> None:
        while far._in[Lane.DATA].inbox:
            delivery = await far.receive()
            taken.append(delivery.message.group_id)
            waiting.append(delivery)

    for action, number in actions:
        match action:
            case "send":
                num_sent += near.try_send(AbortGroup(num_sent))
            case "ack" if waiting:
                delivery = waiting.pop(number % len(waiting))
                delivery.ack()
                delivery.ack()
            case "cut":
                near.pump()
                is_whole = False
            case "mend":
                is_whole = True
                near.resend_all()
                far.resend_all()
        await asyncio.sleep(0)
        await receive_all()
        assert near.unacknowledged() <= window
    is_whole = True
    near.resend_all()
    await receive_all()
    assert taken == list(range(num_sent))
    for delivery in waiting:
        delivery.ack()
    near.resend_all()
    assert await near.flush(1.0)
