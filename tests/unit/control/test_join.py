"""Joining generators: whom a run lets in, and how a generator gets in, with which config."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.config.load import dump_config, parse_config
from asyncrl.config.places import why_weights_do_not_reach
from asyncrl.control.join import JoinRequest, Membership, joined
from asyncrl.control.lifecycle.events import ProcessPlan
from asyncrl.errors import ConfigError, ConnectionClosed
from asyncrl.schema.control import PROTOCOL, Hello, JoinTerms
from asyncrl.schema.samples import SampleFailure
from asyncrl.transport.protocol import Lane, Listener
from asyncrl.transport.security import CLIENT_FILE, KEYS_FOLDER, bring_client_keys, load_client_keys, make_keys
from asyncrl.transport.zmq_server import open_listener


def _config(**settings: object):
    return parse_config({"generate": {"engine": {"kind": "fake"}}, "placement": {"most_joining_generators": 1}, **settings})


def _terms(config, machine: str = "there") -> JoinTerms:
    return JoinTerms(dump_config(config), "/runs/far", machine)


def _medium(**medium: object):
    return _config(broadcast={"medium": medium})


@pytest.mark.parametrize(("medium", "shares_folder", "reason"), [
    ({"kind": "shared_memory"}, True, "the run's own machine only"),
    ({"kind": "files"}, False, "the run's folder, which is not here"), ({"kind": "files"}, True, ""),
    ({"kind": "files", "folder": "/shared"}, False, ""), ({"kind": "zeromq"}, True, "tcp://127.0.0.1:*, which only"),
    ({"kind": "zeromq", "bind": "tcp://10.0.0.5:*"}, False, ""), ({"kind": "gloo"}, True, "127.0.0.1, which only"),
    ({"kind": "gloo", "host": "10.0.0.5"}, False, ""),
])  # fmt: skip
def test_a_medium_that_does_not_reach_another_machine_says_so(medium, shares_folder, reason):
    why = why_weights_do_not_reach(_medium(**medium), shares_folder=shares_folder)
    assert reason in why
    assert bool(why) == bool(reason)


def test_keys_that_were_brought_are_private_and_nothing_else_is_taken_for_them(tmp_path):
    make_keys(tmp_path / "run")
    file, private = tmp_path / "run" / KEYS_FOLDER / CLIENT_FILE, tmp_path / "private"
    private.mkdir()
    bring_client_keys(file, private)
    assert load_client_keys(private) == load_client_keys(tmp_path / "run")
    wrong = tmp_path / "wrong"
    wrong.write_text("no keys")
    wrong.chmod(0o600)
    with pytest.raises(ConfigError, match="is no client key"):
        bring_client_keys(wrong, tmp_path)
    wrong.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        bring_client_keys(wrong, tmp_path)


async def _run_of(config, folder: Path) -> Listener:
    listener = await open_listener(config.transport, folder, judge=Membership(most_joined=1).refusal)
    (folder / "endpoint").write_text(listener.address)
    (folder / "api.json").write_text("{}")
    (folder / "config.toml").write_text(dump_config(config))
    return listener


async def test_a_joining_generator_that_is_cancelled_as_it_leaves_says_goodbye_all_the_same(tmp_path):
    """It waits for what nobody acknowledges; a second Ctrl-C does not wait."""
    listener, leaving = await _run_of(_config(), tmp_path), asyncio.Event()

    async def come_and_go() -> None:
        async with joined(JoinRequest(run_folder=str(tmp_path)), 7, "endpoint") as here:
            here.connection.try_send(SampleFailure(0, 0, 1, "generate", "unheard"))
            leaving.set()

    async with asyncio.TaskGroup() as group, asyncio.timeout(30):
        going = group.create_task(come_and_go())
        near = await listener.accept()
        await near.send(_terms(_medium(kind="files", folder="/shared")), Lane.CONTROL)
        await leaving.wait()
        await asyncio.sleep(0)
        going.cancel()
    async with asyncio.timeout(10):
        await near.receive()
        with pytest.raises(ConnectionClosed, match="closed by the peer"):
            await near.receive()
    await listener.close()


async def test_weights_that_do_not_reach_this_machine_are_refused_with_what_to_set(tmp_path):
    listener = await _run_of(_config(), tmp_path)

    async def welcome() -> None:
        await (await listener.accept()).send(_terms(_medium(kind="shared_memory")), Lane.CONTROL)

    async with asyncio.TaskGroup() as group:
        group.create_task(welcome())
        with pytest.raises(ConfigError, match=r"the run is on there, this is .*broadcast\.medium\.kind = 'zeromq'"):
            await joined(JoinRequest(run_folder=str(tmp_path)), 7, "endpoint").__aenter__()
    await listener.close()


def test_a_joining_generator_whose_link_broke_is_let_in_again_and_another_of_its_name_is_not():
    first, other = (Hello(PROTOCOL, "generator", "joined-b-7-0", incarnation, 7) for incarnation in "ab")
    membership = Membership([ProcessPlan("learner", "learner"), ProcessPlan("generator-0", "generator")], most_joined=1)
    assert [membership.refusal(first), membership.refusal(first), membership.num_came] == ["", "", 1]
    assert "another generator named" in membership.refusal(other)
