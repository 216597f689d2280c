"""Ranks that come late, wait long or hang: processes of two ranks, without any model. One that dies is in test_ranks.py."""

import subprocess
import sys

import pytest

from asyncrl.learner.ranks.group import LOOPBACK
from asyncrl.weights.media.collective_group import open_store

pytestmark = [pytest.mark.timed]

TIMEOUT_S = 5.0
PATIENT_S = 1.2 * TIMEOUT_S
LONG_S = 240.0
"""Far longer than the test lasts."""
BEGIN = """
import os, sys, time, torch
from asyncrl.learner.ranks.group import joined_ranks
from asyncrl.weights.media.collective_group import join_store
rank, address, timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
store = join_store(address, 60.0)
store.set(f"here {rank}", "now")
store.wait([f"here {1 - rank}"])
"""
PATIENT = f"""
if rank == 0:
    time.sleep({PATIENT_S})
with joined_ranks(rank, 2, store, "cpu", timeout_s) as ranks:
    if rank == 0:
        time.sleep({PATIENT_S})
        ranks.tell(b"order")
    else:
        print(ranks.hear().decode())
"""
HANGING = f"""
with joined_ranks(rank, 2, store, "cpu", timeout_s) as ranks:
    ranks.sum(torch.ones(1))
    if rank == 1:
        time.sleep({LONG_S})
    try:
        ranks.sum(torch.ones(1))
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0)
"""


def _both(code):
    """Start both ranks."""
    store, address = open_store(LOOPBACK, 60.0)
    command = [sys.executable, "-c", BEGIN + code]
    peers = [subprocess.Popen([*command, str(rank), address, str(TIMEOUT_S)], stdout=subprocess.PIPE) for rank in (0, 1)]
    return store, peers


def _said(peer):
    return peer.communicate(timeout=120)[0].decode()


def test_the_others_wait_for_rank_0_longer_than_any_collective_may_take():
    _store, peers = _both(PATIENT)
    assert [_said(peer) for peer in peers] == ["", "order\n"]


def test_a_hanging_rank_fails_its_peers_by_the_time_out_while_it_still_hangs():
    _store, peers = _both(HANGING)
    try:
        assert "Timed out" in _said(peers[0])
        assert peers[1].poll() is None
    finally:
        peers[1].kill()
        _said(peers[1])
