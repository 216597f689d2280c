"""Joining generators: whom a run lets in, and how a generator gets in, with which config."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.load import dump_config, parse_config
from asyncrl.config.places import why_weights_do_not_reach
from asyncrl.config.run import SupervisionConfig
from asyncrl.control.join import JoinRequest, Membership, joined, own_config
from asyncrl.control.lifecycle.events import ProcessPlan
from asyncrl.errors import ConfigError, ConnectionClosed
from asyncrl.schema.control import PROTOCOL, Hello, JoinTerms
from asyncrl.schema.samples import SampleFailure
from asyncrl.schema.status import ApiEndpoint
from asyncrl.transport.protocol import Lane, Listener
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


async def _run_of(config, folder: Path, most_joined: int = 1) -> Listener:
    listener = await open_listener(config.transport, folder, judge=Membership(most_joined=most_joined).refusal)
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


SERVERS = ["http://127.0.0.1:8000", "http://10.0.0.5:8000"]


@pytest.mark.parametrize(("url", "is_here", "refused"), [
    ("http://10.0.0.6:8000", False, ""), ("http://127.0.0.1:8000", False, ""), ("http://127.0.0.1:8000", True, "name another"),
    ("http://10.0.0.5:8000", False, "name another"),
])  # fmt: skip
def test_a_generator_joins_a_run_of_several_vllm_servers_with_one_that_is_not_the_run_s(url, is_here, refused):
    engine = {"kind": "vllm_server", "url": ",".join(SERVERS), "shared_folder": "/shared"}
    elastic = {"kind": "local", "elastic": {"min_generators": 2, "max_generators": 2}}
    config = parse_config({
        "model": {"kind": "pretrained", "path": "m"}, "generate": {"engine": engine, "num_workers": 2}, "launch": elastic,
        "broadcast": {"medium": {"kind": "files"}},
    })  # fmt: skip
    overrides = (f"generate.engine.url={url}",)
    if refused:
        with pytest.raises(ConfigError, match=refused):
            own_config(_terms(config), overrides, is_here=is_here)
    else:
        own = own_config(_terms(config), overrides, is_here=is_here)
        assert (own.generate.engine.urls, own.generate.num_workers, own.launch) == ((url,), 2, config.launch)


async def test_an_address_that_names_no_machine_is_refused_elsewhere_with_what_to_give(tmp_path):
    (tmp_path / "endpoint").write_text("tcp://0.0.0.0:4711")
    (tmp_path / "config.toml").write_text(dump_config(_config()))
    (tmp_path / "api.json").write_bytes(msgspec.json.encode(ApiEndpoint("http://127.0.0.1:1", "token", 1, "there")))
    said = r"every address of there, .*: --address tcp://HOST:4711, and --keys .*client\.key"
    with pytest.raises(ConfigError, match=said):
        await joined(JoinRequest(run_folder=str(tmp_path)), 7, "endpoint").__aenter__()


async def test_a_port_that_cannot_be_is_refused_at_once():
    with pytest.raises(ConfigError, match="with a port up to 65535; got 'tcp://b:99999'"):
        await joined(JoinRequest(address="tcp://b:99999"), 7, "endpoint").__aenter__()


async def test_two_processes_of_one_pid_and_host_name_join_under_different_names(tmp_path):
    listener, names = await _run_of(_config(), tmp_path, most_joined=2), set()

    async def come() -> None:
        async with joined(JoinRequest(run_folder=str(tmp_path)), 1, "endpoint") as here:
            assert here.name.endswith("-0"), "the number at the end chooses a server"
            await all_there.wait()

    async with asyncio.TaskGroup() as group, asyncio.timeout(30):
        all_there = asyncio.Event()
        for _ in range(2):
            group.create_task(come())
            near = await listener.accept()
            names.add(near.peer.name)
            await near.send(_terms(_medium(kind="files", folder="/shared")), Lane.CONTROL)
        all_there.set()
    assert len(names) == 2
    await listener.close()


def test_a_generator_that_finds_no_place_is_told_how_long_a_killed_one_holds_its_own():
    membership = Membership(most_joined=1, config=SupervisionConfig(heartbeat_timeout_s=7.0))
    first, second = (Hello(PROTOCOL, "generator", f"joined-b-{pid}-0", "a", pid) for pid in (7, 8))
    assert membership.refusal(first) == ""
    assert "one that was killed holds its place for 7 s" in membership.refusal(second)


def test_a_joining_generator_whose_link_broke_is_let_in_again_and_another_of_its_name_is_not():
    first, other = (Hello(PROTOCOL, "generator", "joined-b-7-0", incarnation, 7) for incarnation in "ab")
    membership = Membership([ProcessPlan("learner", "learner"), ProcessPlan("generator-0", "generator")], most_joined=1)
    assert [membership.refusal(first), membership.refusal(first), membership.num_came] == ["", "", 1]
    assert "another generator named" in membership.refusal(other)
