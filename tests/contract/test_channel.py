"""The channel contract, held by every implementation: in-process, ipc in plain text, tcp with CURVE."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from asyncrl.config.run import TransportConfig
from asyncrl.errors import ConnectionClosed, TransportError
from asyncrl.schema.control import PROTOCOL, Heartbeat, Hello
from asyncrl.schema.samples import Prompt, SampleFailure, ScoredGroup
from asyncrl.transport.protocol import GOODBYE, Connection, Lane, LinkLimits, Listener, new_hello
from asyncrl.transport.zmq_client import open_connection
from asyncrl.transport.zmq_server import open_listener
from tests.in_process import InProcessListener

WINDOW = 4
LIMITS = LinkLimits(
    window=WINDOW, max_message_bytes=1 << 20, ping_s=0.05, reconnect_after_s=30.0, silence_timeout_s=60.0, give_up_s=60.0
)
"""No link breaks here: however long the machine stands still, nobody is given up, or closed without a goodbye."""
WAIT_S = 30.0

KINDS = ["inprocess", "ipc-plain", "tcp-curve"]


@dataclasses.dataclass
class Channel:
    listener: Listener
    connect: Callable[[Hello], Awaitable[Connection]]


@contextlib.asynccontextmanager
async def open_channel(kind: str, run_folder, limits: LinkLimits = LIMITS) -> AsyncIterator[Channel]:
    if kind == "inprocess":
        inner = InProcessListener(new_hello("controller", "controller"), limits.window, limits.max_message_bytes)
        listener, connect = inner, inner.connect
    else:
        wire, encryption = kind.split("-")
        config = TransportConfig(kind=wire, encryption=encryption)
        listener = await open_listener(config, run_folder, limits=limits)

        async def connect(hello: Hello) -> Connection:
            connection = await open_connection(listener.address, hello, config, run_folder, WAIT_S, limits)
            opened.append(connection)
            return connection

    opened: list[Connection] = []
    try:
        yield Channel(listener, connect)
    finally:
        for connection in opened:
            await connection.close()
        await listener.close()


@pytest.fixture(params=KINDS)
async def channel(request, tmp_path):
    async with open_channel(request.param, tmp_path) as opened:
        yield opened


async def open_pair(channel: Channel, name: str = "generator-0") -> tuple[Connection, Connection]:
    far = await channel.connect(new_hello("generator", name))
    near = await asyncio.wait_for(channel.listener.accept(), WAIT_S)
    return far, near


def failure(number: int, reason: str = "") -> SampleFailure:
    return SampleFailure(group_id=number, index=0, attempt=1, stage="generate", reason=reason)


async def take(connection: Connection, lane: Lane = Lane.DATA, ack: bool = True):
    delivery = await asyncio.wait_for(connection.receive(lane), WAIT_S)
    if ack:
        delivery.ack()
    return delivery.message


async def test_all_that_has_arrived_is_received_at_once_and_in_order(channel):
    far, near = await open_pair(channel)
    for number in range(WINDOW):
        await far.send(failure(number))
    received, arrivals = [], []
    while len(received) < WINDOW:
        arrivals.append(await asyncio.wait_for(near.receive_all(), WAIT_S))
        assert arrivals[-1].messages
        received += [message.group_id for message in arrivals[-1].messages]
    assert received == list(range(WINDOW))
    for arrival in arrivals:
        arrival.ack()
    assert await far.flush(WAIT_S)


@pytest.mark.parametrize("reason", ["", "all 1 places are taken"])
async def test_an_end_that_closes_says_why(channel, reason):
    for closing, other in (await open_pair(channel), (await open_pair(channel, "generator-1"))[::-1]):
        await closing.close(reason)
        with pytest.raises(ConnectionClosed, match=reason or GOODBYE):
            await take(other)
        assert other.closed_reason == (reason or GOODBYE)


async def test_large_and_small_messages_keep_their_order_and_content(channel):
    far, near = await open_pair(channel)
    large = os.urandom(200_000)
    sent = [failure(number, "x" * size) for number, size in enumerate([1, 300_000, 5, 70_000])]
    for message in sent:
        await far.send(message)
    assert [await take(near) for _ in sent] == sent
    group = ScoredGroup(7, Prompt("p", token_ids=large), ())
    await near.send(group)
    assert await take(far) == group


async def test_send_waits_when_the_window_is_full_goes_on_after_an_acknowledgement_and_holds_up_no_control(channel):
    far, near = await open_pair(channel)
    for number in range(WINDOW):
        await far.send(failure(number))
    assert far.try_send(failure(99)) is False
    assert far.unacknowledged() == WINDOW
    await asyncio.wait_for(far.send(Heartbeat("generator-0", 1.0), Lane.CONTROL), WAIT_S)
    assert (await take(near, Lane.CONTROL)).name == "generator-0"
    async with asyncio.TaskGroup() as tasks:
        blocked = tasks.create_task(far.send(failure(WINDOW)))
        deliveries = [await asyncio.wait_for(near.receive(), WAIT_S) for _ in range(WINDOW)]
        assert not blocked.done()
        deliveries[2].ack()
        deliveries[2].ack()
        await asyncio.wait_for(blocked, WAIT_S)
    assert far.unacknowledged() == WINDOW
    assert (await take(near)).group_id == WINDOW


async def test_blocked_senders_go_in_the_order_they_came(channel):
    far, near = await open_pair(channel)
    async with asyncio.TaskGroup() as tasks:
        for number in range(3 * WINDOW):
            tasks.create_task(far.send(failure(number)))
        numbers = [(await take(near)).group_id for _ in range(3 * WINDOW)]
    assert numbers == list(range(3 * WINDOW))


async def test_what_was_sent_before_a_close_is_received_and_then_the_connection_is_closed_and_closing_repeats(channel):
    far, near = await open_pair(channel)
    for number in range(3):
        await far.send(failure(number))
    await far.close()
    await far.close()
    assert [(await take(near)).group_id for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConnectionClosed, match="generator-0"):
        await asyncio.wait_for(near.receive(), WAIT_S)
    with pytest.raises(ConnectionClosed):
        await near.send(failure(1))
    with pytest.raises(ConnectionClosed):
        await far.receive()
    with pytest.raises(ConnectionClosed):
        far.try_send(failure(1))
    for end in (near, channel.listener, channel.listener):
        await end.close()
    with pytest.raises(ConnectionClosed):
        await channel.listener.accept()


async def test_close_wakes_whoever_waits_on_either_side(channel):
    far, near = await open_pair(channel)
    for number in range(WINDOW):
        await far.send(failure(number))
    waiting = [far.receive(), far.send(failure(99)), near.receive(Lane.CONTROL)]
    results = []

    async def wait(call) -> None:
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(call, WAIT_S)
        results.append(True)

    async with asyncio.TaskGroup() as tasks:
        for call in waiting:
            tasks.create_task(wait(call))
        await asyncio.sleep(0)
        await near.close()
    assert len(results) == len(waiting)
    assert not await far.flush(0.1)


async def test_a_new_incarnation_closes_the_connection_of_the_old(channel):
    far, near = await open_pair(channel)
    await far.send(failure(1))
    assert (await take(near, ack=False)).group_id == 1
    far_again, near_again = await open_pair(channel)
    with pytest.raises(ConnectionClosed, match=near_again.peer.incarnation):
        await asyncio.wait_for(near.receive(), WAIT_S)
    with pytest.raises(ConnectionClosed):  # and is told, so that it does not come back
        await asyncio.wait_for(far.receive(), WAIT_S)
    await far_again.send(failure(2))
    assert (await take(near_again)).group_id == 2


async def test_a_peer_of_another_protocol_is_told_so_and_counted(channel):
    stranger = Hello(PROTOCOL + 1, "generator", "generator-0", "i", 1)
    with pytest.raises(TransportError, match=f"protocol {PROTOCOL}, .* {PROTOCOL + 1}"):
        await channel.connect(stranger)
    assert channel.listener.refused["wrong protocol"] == 1
    await open_pair(channel)


async def test_a_receive_that_is_cancelled_loses_nothing(channel):
    far, near = await open_pair(channel)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(near.receive(), 0.01)
    await far.send(failure(1))
    assert (await take(near)).group_id == 1
