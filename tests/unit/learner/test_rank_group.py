"""Ranks that come late, wait long, hang or die: processes of two ranks, without any model."""

import subprocess
import sys

import pytest

from asyncrl.learner.rank_group import host_store

pytestmark = pytest.mark.timeout(300)

TIMEOUT_S = 3.0
BEGIN = f"""
import os, sys, time, torch
from asyncrl.learner.rank_group import guest_store, joined_ranks
rank, address = int(sys.argv[1]), sys.argv[2]
store = guest_store(address, 2, {TIMEOUT_S})
"""
PATIENT = """
if rank == 0:
    time.sleep(5)
with joined_ranks(rank, 2, store, "cpu", 3.0) as ranks:
    if rank == 0:
        time.sleep(5)
        ranks.tell(b"order")
    else:
        print(ranks.hear().decode())
"""
FAILING = """
with joined_ranks(rank, 2, store, "cpu", 3.0) as ranks:
    ranks.sum(torch.ones(1))
    if rank == 1:
        MISBEHAVE
    started_s = time.monotonic()
    try:
        ranks.sum(torch.ones(1))
    except RuntimeError:
        print(f"failed after {time.monotonic() - started_s:.1f}", flush=True)
        os._exit(0)
"""


def _run_both(code):
    """Return what each rank printed."""
    _store, address = host_store(2, TIMEOUT_S)
    peers = [
        subprocess.Popen([sys.executable, "-c", BEGIN + code, str(rank), address], stdout=subprocess.PIPE) for rank in (0, 1)
    ]
    return [peer.communicate(timeout=250)[0].decode() for peer in peers]


def test_the_others_wait_for_rank_0_longer_than_any_collective_may_take():
    assert _run_both(PATIENT) == ["", "order\n"]


def test_a_dead_rank_fails_its_peers_at_once():
    said = _run_both(FAILING.replace("MISBEHAVE", "os._exit(1)"))
    assert float(said[0].removeprefix("failed after ")) < 1.5


def test_a_hanging_rank_fails_its_peers_after_the_timeout():
    said = _run_both(FAILING.replace("MISBEHAVE", "time.sleep(8); os._exit(1)"))
    assert 2.5 < float(said[0].removeprefix("failed after ")) < 6.0
