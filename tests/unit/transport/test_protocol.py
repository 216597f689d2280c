"""A session over a wire that loses any suffix of what is in flight."""

import asyncio
from unittest.mock import AsyncMock

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.schema.control import PROTOCOL, AbortGroup, Hello
from asyncrl.schema.samples import GroupWork, Prompt, SamplingParams
from asyncrl.transport.protocol import Connection, Lane, Parcel, Refused

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


async def test_a_message_that_cannot_be_decoded_is_left_out_with_a_warning_that_says_why(caplog):
    near, far = (Connection(HELLO, 4, 1 << 20, AsyncMock(), Refused()) for _ in range(2))
    near.wire, far.wire = far.deliver, near.deliver
    near.try_send(GroupWork(0, 1, Prompt("p", answer=46), (0,), SamplingParams(max_new_tokens=1), 0))
    near.try_send(AbortGroup(1))
    assert (await far.receive()).message == AbortGroup(1)
    assert far.refused == {"malformed": 1}
    (warning,) = caplog.messages
    assert warning.startswith("a message from generator-0 is left out, and later ones in silence: not a message")
    assert warning.endswith("Expected `str`, got `int` - at `$.prompt.answer`")
