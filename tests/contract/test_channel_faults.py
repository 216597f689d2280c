"""What the ZeroMQ channels do when the network, the peer or a stranger misbehaves."""

import asyncio
import contextlib
import dataclasses
import os
import random
import socket
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from asyncrl.config.run import TransportConfig
from asyncrl.errors import CodecError, ConfigError, ConnectionClosed, TransportError
from asyncrl.schema.codec import encode
from asyncrl.schema.control import Heartbeat
from asyncrl.schema.samples import SampleFailure
from asyncrl.transport.protocol import Connection, Item, Lane, LinkLimits, Parcel, new_hello
from asyncrl.transport.security import bring_client_keys, load_client_keys, make_keys
from asyncrl.transport.zmq_client import ZmqConnector, open_connection
from asyncrl.transport.zmq_server import ZmqListener, open_listener
from asyncrl.transport.zmq_wire import build_greeting, build_parcel
from tests.builders import cancelled_after, until
from tests.contract.tcp_proxy import tcp_proxy
from tests.descriptors import descriptors_left

LIMITS = LinkLimits(
    window=32, max_message_bytes=1 << 20, ping_s=0.05, reconnect_after_s=0.5, silence_timeout_s=5.0, give_up_s=20.0
)
PATIENT = dataclasses.replace(LIMITS, reconnect_after_s=20.0)
"""Where no link breaks: a machine that stands still is not taken for one."""
HARDLY_PINGS = dataclasses.replace(PATIENT, ping_s=20.0)
WAIT_S = 20.0


@contextlib.asynccontextmanager
async def closing(*things):
    try:
        yield
    finally:
        for thing in things:
            await thing.close()


def failure(number: int, reason: str = "") -> SampleFailure:
    return SampleFailure(group_id=number, index=0, attempt=1, stage="generate", reason=reason)


def make_listener(address: str = "tcp://127.0.0.1:*", keys=None, limits: LinkLimits = LIMITS) -> ZmqListener:
    return ZmqListener(address, new_hello("controller", "controller"), limits, keys)


async def connect(address: str, name: str = "generator-0", limits: LinkLimits = LIMITS) -> tuple[ZmqConnector, Connection]:
    connector = ZmqConnector(address, new_hello("generator", name), limits)
    return connector, await connector.connect(WAIT_S)


async def accept(listener: ZmqListener) -> Connection:
    return await asyncio.wait_for(listener.accept(), WAIT_S)


@contextlib.asynccontextmanager
async def linked(limits: LinkLimits = LIMITS, of_listener: LinkLimits = LIMITS):
    """Yield a listener, a connector, and the connection between them at the connector's and at the listener's end."""
    listener = make_listener(limits=of_listener)
    async with closing(listener):
        connector, far = await connect(listener.address, limits=limits)
        async with closing(connector):
            yield listener, connector, far, await accept(listener)


@contextlib.contextmanager
def bare_dealer(address: str):
    """Yield a socket that may send a listener anything."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = dealer.sndhwm = dealer.rcvhwm = 0
        dealer.connect(address)
        yield dealer


async def works(listener: ZmqListener, far: Connection) -> None:
    """See that a message goes from a connector to a listener that has not accepted it yet."""
    await far.send(failure(1))
    assert await consume(await accept(listener), 1) == [1]


async def produce(connection: Connection, count: int) -> None:
    for number in range(count):
        await connection.send(failure(number, "x" * (number % 700)))


async def consume(connection: Connection, count: int, after_each=lambda number: None) -> list[int]:
    numbers = []
    for _ in range(count):
        delivery = await asyncio.wait_for(connection.receive(), WAIT_S)
        numbers.append(delivery.message.group_id)
        delivery.ack()
        after_each(delivery.message.group_id)
    return numbers


async def test_the_listener_s_sizes_hold_at_both_ends():
    for of_connector in (LIMITS.max_message_bytes // 2, 2 * LIMITS.max_message_bytes):
        other = dataclasses.replace(LIMITS, window=1, max_message_bytes=of_connector)
        async with linked(other) as (_, _, far, near):
            for end in (far, near):
                with pytest.raises(CodecError, match=f"the limit is {LIMITS.max_message_bytes};"):
                    await end.send(failure(1, "x" * LIMITS.max_message_bytes))
            assert all(far.try_send(failure(number)) for number in range(LIMITS.window))
            assert not far.try_send(failure(LIMITS.window))
            assert await consume(near, LIMITS.window) == list(range(LIMITS.window))


async def test_a_connector_that_finds_no_descriptor_tries_until_there_is_one(caplog):
    async with linked() as (_, connector, far, near):
        with descriptors_left(0):
            connector._reopen()
            await far.send(failure(1))
            await until(lambda: caplog.text.count("Too many open files") >= 2)
        assert await consume(near, 1) == [1]


async def test_a_listener_that_is_cancelled_as_it_closes_leaves_no_folder(tmp_path, folders):
    for loop_turns in range(1, 5):
        listener = await open_listener(TransportConfig(kind="ipc", encryption="plain"), tmp_path)
        assert len(folders()) == 1
        await cancelled_after(loop_turns, listener.close)
        assert folders() == []


async def test_a_link_that_breaks_again_and_again_loses_and_repeats_nothing():
    count = 1500
    listener = make_listener()
    async with closing(listener):
        with tcp_proxy(listener.address) as proxy:
            connector, far = await connect(proxy.address)
            near = await accept(listener)

            def cut_at_times(number: int) -> None:
                if number % 300 == 150:
                    proxy.break_off()

            async with closing(connector), asyncio.TaskGroup() as tasks:
                tasks.create_task(produce(far, count))
                tasks.create_task(produce(near, count))
                outward = tasks.create_task(consume(near, count, cut_at_times))
                inward = tasks.create_task(consume(far, count))
                assert await outward == await inward == list(range(count))
                assert await far.flush(WAIT_S)
                assert await near.flush(WAIT_S)


async def test_a_restarted_listener_is_sent_what_was_not_acknowledged(tmp_path):
    address = f"ipc://{tmp_path}/s"
    first = make_listener(address)
    connector, far = await connect(address)
    async with closing(connector):
        near = await accept(first)
        for number in range(5):
            await far.send(failure(number))
        assert await consume(near, 2) == [0, 1]
        await until(lambda: far.unacknowledged() == 3)
        kill_without_goodbye(first)
        second = make_listener(address)
        async with closing(second):
            near = await accept(second)
            assert far.unacknowledged() == 3
            await far.send(failure(5))
            assert await consume(near, 4) == [2, 3, 4, 5]
            assert await far.flush(WAIT_S)
            assert far.peer.incarnation == second.hello.incarnation
            await near.send(failure(9))
            assert await consume(far, 1) == [9]
    first._context.term()


def kill_without_goodbye(listener: ZmqListener) -> None:
    """What the kernel does for a process that is killed: sockets gone, nothing said."""
    listener._timer.cancel()
    listener._watch.close()
    listener._socket.close(0)


async def test_a_silent_peer_is_given_up_and_may_come_back_as_a_new_connection():
    async with linked(HARDLY_PINGS, dataclasses.replace(LIMITS, silence_timeout_s=1.0)) as (listener, _, far, near):
        with pytest.raises(ConnectionClosed, match="silent"):
            await asyncio.wait_for(near.receive(), WAIT_S)
        await works(listener, far)


async def test_one_that_was_given_up_and_has_successors_does_not_come_back_and_replace_them():
    async with linked(HARDLY_PINGS) as (listener, connector, far, _), contextlib.AsyncExitStack() as leaving:
        for _ in range(2):
            listener._forget(listener._by_name["generator-0"], "silent")
            successor, newest = await connect(listener.address, limits=HARDLY_PINGS)
            await leaving.enter_async_context(closing(successor))
        connector._greet()
        with pytest.raises(ConnectionClosed, match="another process of this name has come since"):
            await asyncio.wait_for(far.receive(), WAIT_S)
        assert not newest.closed_reason


async def test_a_connector_gives_up_on_a_listener_that_stays_away(tmp_path):
    limits = dataclasses.replace(LIMITS, give_up_s=0.2)
    listener = make_listener(f"ipc://{tmp_path}/s", limits=limits)
    connector, far = await connect(listener.address, limits=limits)
    async with closing(connector):
        await accept(listener)
        kill_without_goodbye(listener)
        with pytest.raises(ConnectionClosed, match="no listener"):
            await asyncio.wait_for(far.receive(), WAIT_S)
    listener._context.term()


async def test_one_that_was_cut_off_when_the_listener_closed_its_connection_comes_back():
    """It would hear a goodbye only once its link is whole again, and end when it could go on."""
    async with linked(HARDLY_PINGS, dataclasses.replace(LIMITS, reconnect_after_s=0.1)) as (listener, _, far, near):
        await asyncio.sleep(0.3)  # nothing comes of it in this time: it hardly ever pings
        await near.close()
        await works(listener, far)


async def test_a_wrong_key_is_refused_and_counted(tmp_path):
    config = TransportConfig(kind="tcp", encryption="curve")
    listener = await open_listener(config, tmp_path / "ours", limits=LIMITS)
    async with closing(listener):
        make_keys(tmp_path / "theirs")
        right = load_client_keys(tmp_path / "ours")
        wrong_client = msgspec.structs.replace(load_client_keys(tmp_path / "theirs"), listener_public=right.listener_public)
        with pytest.raises(TransportError, match="key"):
            await ZmqConnector(listener.address, new_hello("client", "c"), LIMITS, wrong_client).connect(5.0)
        assert listener.refused["unauthenticated"] >= 1
        for keys in (load_client_keys(tmp_path / "theirs"), None):
            before = listener.refused["unauthenticated"]
            async with asyncio.timeout(WAIT_S):
                while listener.refused["unauthenticated"] == before:  # so short a time may be over before it has asked
                    with pytest.raises(TransportError, match="no welcome"):
                        await ZmqConnector(listener.address, new_hello("client", "c"), LIMITS, keys).connect(0.3)
        far = await open_connection(listener.address, new_hello("client", "c"), config, tmp_path / "ours", WAIT_S, LIMITS)
        async with closing(far):
            await works(listener, far)


def malformed_packets(rng: random.Random, session: str, count: int) -> list[list[bytes]]:
    """Random bytes, truncated, bit-flipped, mis-shaped and oversized packets, none of which is a parcel of a known session."""
    parcel = Parcel(([1, 2], []), [Item(Lane.DATA, seq, encode(failure(seq, "y" * 50))) for seq in range(3)])
    real = [bytes(frame) for frame in build_parcel(session, parcel)]
    packets: list[list[bytes]] = []
    for number in range(count):
        flipped = bytearray(real[0])
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        packets.append(
            [
                [rng.randbytes(rng.randrange(0, 200)) for _ in range(rng.randrange(1, 4))],
                [real[0][: rng.randrange(len(real[0]))], *real[1:]],
                [bytes(flipped), *real[1:]],
                [real[0], real[1][:-1] if rng.random() < 0.5 else real[1] + b"z"],
                [real[0]] if rng.random() < 0.5 else [*real, b"one too many"],
                [b""] if number % 120 != 5 else [real[0], bytes(LIMITS.max_packet_bytes + 1)],
            ][number % 6]
        )
    return packets


async def test_ten_thousand_malformed_packets_are_counted_and_a_good_peer_works_on():
    count = 10_000
    rng = random.Random(17)
    async with linked(PATIENT) as (listener, _, far, near):  # who greets anew over another socket is counted too
        packets = malformed_packets(rng, near_session(listener), count)
        with bare_dealer(listener.address) as dealer:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(produce(far, 500))
                received = tasks.create_task(consume(near, 500))
                for packet in packets:
                    await dealer.send_multipart(packet)
            assert received.result() == list(range(500))
            await until(lambda: listener.refused.total() >= count)
            assert listener.refused.total() == count
            assert listener.refused["malformed"] > count // 3
            assert listener.refused["oversized"] >= count // 120
            assert await far.flush(WAIT_S)


def near_session(listener: ZmqListener) -> str:
    (peer,) = listener._by_name.values()
    return peer.session_id


async def test_a_known_peer_that_sends_an_unreadable_message_stays_connected():
    listener = make_listener()
    async with closing(listener):
        with bare_dealer(listener.address) as dealer:
            await dealer.send(build_greeting(new_hello("client", "c"), "token", ""))
            near = await accept(listener)
            good = encode(failure(1))
            bodies = [b"\x81\xa4type\xa5nonsense", os.urandom(50), good[:-3], bytes(LIMITS.max_message_bytes + 1), good]
            for seq, body in enumerate(bodies):
                await dealer.send_multipart(build_parcel(near_session(listener), Parcel(([], []), [Item(Lane.DATA, seq, body)])))
            assert await consume(near, 1) == [1]
            assert (listener.refused["malformed"], listener.refused["oversized"]) == (3, 1)


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100])
async def test_bytes_that_are_not_zeromq_do_no_harm(opening):
    listener = make_listener()
    async with closing(listener):
        with socket.create_connection(("127.0.0.1", int(listener.address.rsplit(":", 1)[1]))) as stranger:
            stranger.sendall(opening)
            connector, far = await connect(listener.address)
            async with closing(connector):
                await works(listener, far)


CLOSINGS = """
import asyncio, socket, zmq
from asyncrl.transport.zmq_wire import SocketWatch

async def close_while_strangers_come():
    context = zmq.Context()
    for number, num_strangers in enumerate([4] * 3000 + [2000]):  # the last are more than ZeroMQ keeps events of by itself
        listening = context.socket(zmq.ROUTER)
        port = listening.bind_to_random_port("tcp://127.0.0.1")
        watch = SocketWatch(listening, zmq.EVENT_ALL, lambda event: None)
        strangers = []
        for _ in range(num_strangers):
            strangers = [*strangers[-3:], socket.create_connection(("127.0.0.1", port))]
        await asyncio.sleep(0.0005 * (number % 4))
        for stranger in strangers:
            stranger.close()
        watch.close()
        listening.close(0)

asyncio.run(close_while_strangers_come())
"""


def test_a_socket_that_is_closed_while_strangers_come_and_go_does_not_hang():
    # In a process of its own: what would hang holds the interpreter's lock.
    subprocess.run([sys.executable, "-c", CLOSINGS], check=True, timeout=300)


async def test_keys_and_sockets_are_private_and_gone_after_close(tmp_path):
    listener = await open_listener(TransportConfig(kind="ipc"), tmp_path)
    socket_folder = Path(listener.address.removeprefix("ipc://")).parent
    assert len(listener.address) <= 100
    assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "keys").iterdir()} == {0o600}
    without_keys = await open_connection(listener.address, new_hello("client", "c"), TransportConfig(), tmp_path / "elsewhere")
    await without_keys.close()  # whoever may enter the socket's folder may read the keys
    await listener.close()
    assert not socket_folder.exists()


async def test_a_resumed_run_keeps_its_keys_and_makes_their_files_private_again_and_nobody_else_takes_open_ones(tmp_path, caplog):
    keys = make_keys(tmp_path)
    for file in (tmp_path / "keys").iterdir():
        file.chmod(0o660)  # as Kubernetes does to a volume
    with pytest.raises(ConfigError, match=r"client.key has mode 660, others can read"):
        load_client_keys(tmp_path)
    assert make_keys(tmp_path) == keys
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "keys").iterdir()} == {0o600}
    assert "client.key had mode 660" in caplog.text
    with pytest.raises(ConfigError, match="made when the run starts"):
        load_client_keys(tmp_path / "elsewhere")


@pytest.mark.parametrize("content", ["", "{}", '{"public": "a", "secret": "b", "listener_public": "c", "client_public": "d"}'])
async def test_damaged_key_files_are_refused_in_words(tmp_path, content):
    make_keys(tmp_path)
    for name in ("client", "listener"):
        (tmp_path / "keys" / f"{name}.key").write_text(content)
    with pytest.raises(ConfigError, match=r"client\.key is no client key: bring"):
        bring_client_keys(tmp_path / "keys" / "client.key", tmp_path)
    with pytest.raises(ConfigError, match=r"listener\.key is no listener key: remove RUN/keys"):
        make_keys(tmp_path)


async def test_an_idle_connection_makes_few_turns_of_the_event_loop():
    limits = dataclasses.replace(LIMITS, ping_s=10.0)
    async with linked(limits, limits) as (_, _, far, near):
        await far.send(Heartbeat("generator-0", 1.0), Lane.CONTROL)
        (await asyncio.wait_for(near.receive(Lane.CONTROL), WAIT_S)).ack()
        assert await far.flush(WAIT_S)
        before_s = os.times()
        await asyncio.sleep(0.5)
        after_s = os.times()
        assert after_s.user + after_s.system - before_s.user - before_s.system < 0.1
