"""Peers that hold the key of a guest: what they can do to a run's sockets, and what becomes of a run whose guests do nothing."""

import asyncio
import re

import pytest
import zmq

from asyncrl.config.run import TransportConfig
from asyncrl.control.join import Membership
from asyncrl.control.lifecycle.events import ProcessPlan
from asyncrl.errors import CodecError, TransportError
from asyncrl.schema.control import PROTOCOL, Fault, Hello
from asyncrl.schema.samples import GroupWork, ids_to_bytes
from asyncrl.schema.weights import VersionLive
from asyncrl.transport import zmq_wire as wire
from asyncrl.transport.protocol import Lane, new_hello
from asyncrl.transport.security import bring_client_keys
from asyncrl.transport.zmq_client import open_connection
from asyncrl.transport.zmq_server import open_listener
from asyncrl.transport.zmq_wire import MOST_DRAINED, LoopSocket
from tests.adversarial.test_controller_edge import GUEST, running
from tests.builders import answer_to, receive, until


async def test_a_guest_s_key_lets_nobody_in_as_a_process_of_the_run(tmp_path):
    membership = Membership([ProcessPlan("learner", "learner")], most_joined=1)
    config = TransportConfig(kind="tcp")
    listener = await open_listener(config, tmp_path, membership.refusal)
    away = tmp_path / "elsewhere"
    away.mkdir()
    bring_client_keys(tmp_path / "keys" / "client.key", away)
    try:
        own = await open_connection(listener.address, new_hello("learner", "learner"), config, tmp_path)
        with pytest.raises(TransportError, match="'learner' is a process of the run, and client"):
            await open_connection(listener.address, new_hello("learner", "learner"), config, away)
        guest = await open_connection(listener.address, new_hello("generator", GUEST), config, away)
        assert not own.closed_reason
        for connection in (guest, own):
            await connection.close()
    finally:
        await listener.close()


@pytest.mark.parametrize("name", ["joined-\x1b[2J", "joined-a\nb", "joined-" + "a" * 10**6, ""])
def test_a_name_that_cannot_be_shown_is_no_hello(name):
    with pytest.raises(CodecError):
        wire.parse_hello(wire.parse(wire.build_greeting(Hello(PROTOCOL, "generator", name, "i", 1), "t", "")))


async def test_what_one_sender_never_stops_sending_is_taken_in_bit_by_bit():
    """Before, 20 seconds of pings stopped the controller for more than a minute."""
    context, taken = zmq.Context(), list[object]()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.rcvhwm = push.sndhwm = 0
    pull.bind("inproc://flood")
    push.connect("inproc://flood")
    for _ in range(3 * MOST_DRAINED):
        push.send(b"")
    reader = LoopSocket(pull, taken.append)
    reader.drain()
    assert len(taken) == MOST_DRAINED
    reader.close(0)
    push.close(0)
    context.term()


async def test_a_prompt_that_a_guest_made_up_costs_its_group_and_no_generator_of_the_run(world, caplog):
    _, _, generator = await world.start(version_is_live=False)
    guest = await world.let_in()
    own = await receive(guest, GroupWork, Lane.DATA)
    await guest.send(answer_to(own, 0, GUEST, prompt_ids=ids_to_bytes([9, 9, 9])))
    await guest.flush(30.0)
    await guest.close()
    await generator.send(VersionLive(0, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
    while (work := await receive(generator, GroupWork, Lane.DATA)).group_id != own.group_id:
        pass
    await generator.send(answer_to(work, 1))
    await until(lambda: own.group_id not in world.buffer.state.groups)
    assert world.buffer.counts().dropped == {"its generators say different prompts": 1}
    assert not world.controller.edge.refused
    assert "is dropped: its generators say different prompts" in caplog.text


async def test_a_guest_that_holds_groups_and_does_nothing_is_sent_away_before_the_run_ends(tmp_path):
    async with running(tmp_path, supervision={"backoff_s": 0.01, "stall_timeout_s": 5.0}) as world:
        _, _, generator = await world.start(version_is_live=False)
        guest = await world.let_in()
        work = await receive(guest, GroupWork, Lane.DATA)
        await generator.send(VersionLive(0, "generator-0", 0.0, 0.0, 0.0), Lane.CONTROL)
        async with asyncio.timeout(120):
            while not guest.closed_reason:
                await guest.send(VersionLive(0, GUEST, 0.0, 0.0, 0.0), Lane.CONTROL)  # is no progress
                await asyncio.sleep(0.05)
        assert guest.closed_reason == "it holds groups, and nothing in the run moved for too long"
        assert world.controller.lifecycle.phase == "running"
        while (await receive(generator, GroupWork, Lane.DATA)).group_id != work.group_id:
            pass


async def test_a_guest_s_fault_ends_its_connection_with_one_line_that_can_be_shown(world, caplog):
    await world.start(version_is_live=False)
    guest = await world.let_in()
    for _ in range(10):
        await guest.send(Fault(GUEST, "\x1b[2Jno such kernel", fatal=True), Lane.CONTROL)
    await until(lambda: not world.controller.membership.joined)
    lines = [record.message for record in caplog.records if re.search("no such kernel", record.message)]
    assert lines == [f"the connection of {GUEST} is ended: it cannot go on: ?[2Jno such kernel"] or (
        len(lines) == 2 and "has left" in lines[1]
    )
    assert world.controller.lifecycle.phase == "running"
