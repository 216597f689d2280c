"""A group of our own: beside torch's default one, opened and left without holding anybody up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from asyncrl.errors import BroadcastError, ConfigError
from asyncrl.weights.media.collective_group import Group, GroupBrokenError, Place, check_nccl, open_store, own_address, wait_done

HOST = "127.0.0.1"


def never() -> bool:
    return False


@pytest.fixture
def pair() -> Iterator[tuple[Group, Group]]:
    """Two of a group, both in this process."""
    store, address = open_store(HOST, 10.0)
    learner = Group("gloo", Place(1, 0, 2, address), HOST, 10.0, store)
    member = Group("gloo", Place(1, 1, 2, address), HOST, 10.0)
    for group in (learner, member):
        group.wait_open(never)
    yield learner, member
    learner.leave()
    member.leave()


def test_what_rank_0_sends_arrives(pair):
    learner, member = pair
    sent, arrived = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    works = [member.broadcast(arrived), learner.broadcast(sent)]
    for work in works:
        wait_done(work, never)
    assert torch.equal(sent, arrived)


def test_torchs_default_group_goes_on_beside_it(pair):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for group in pair:
            group.leave()
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_a_member_that_does_not_come_breaks_the_opening_within_the_timeout():
    store, address = open_store(HOST, 1.0)
    started_s = time.monotonic()
    group = Group("gloo", Place(1, 0, 2, address), HOST, 1.0, store)
    with pytest.raises(GroupBrokenError, match="was not opened"):
        group.wait_open(never)
    assert time.monotonic() - started_s < 20
    group.leave()


def test_opening_and_waiting_stop_when_told_to(pair):
    store, address = open_store(HOST, 2.0)
    lonely = Group("gloo", Place(2, 0, 2, address), HOST, 2.0, store)
    with pytest.raises(GroupBrokenError, match="told to stop"):
        lonely.wait_open(lambda: True)
    lonely.leave()
    _, member = pair
    work = member.broadcast(torch.zeros(1000))
    with pytest.raises(GroupBrokenError, match="told to stop"):
        wait_done(work, lambda: True)


def test_leaving_with_an_operation_under_way_returns_at_once_and_its_thread_ends_by_itself():
    store, address = open_store(HOST, 3.0)
    groups = [Group("gloo", Place(7, rank, 2, address), HOST, 3.0, store if rank == 0 else None) for rank in (0, 1)]
    for group in groups:
        group.wait_open(never)
    work = groups[1].broadcast(torch.zeros(1000))
    groups[1].leave()
    assert not work.is_completed(), "it was waited for"
    groups[0].leave()
    for thread in threading.enumerate():
        if thread.name == "asyncrl-group-7":
            thread.join(30)
            assert not thread.is_alive()


def test_hosts_that_are_not_here_or_not_reached_are_clear_errors():
    with pytest.raises(BroadcastError, match="must be an address of the learner's"):
        open_store("192.0.2.1", 1.0)
    with pytest.raises(BroadcastError, match="is not reached from here"):
        own_address("no-such-host.invalid:1")
    assert own_address("127.0.0.1:9") == "127.0.0.1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_without_a_gpu_says_what_to_use_instead():
    with pytest.raises(ConfigError, match="use 'gloo'"):
        check_nccl()
