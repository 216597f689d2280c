"""Two ranks against one: the same gradients, weights, figures and checkpoints, whatever shares a row or a rank.

At the end ranks that come late, wait long or hang, without any model. One that dies in a run is in test_ranks.py.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.clock import SystemClock
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.ranks.group import LOOPBACK, RankLauncher, Ranks
from asyncrl.learner.worker import LearnerWorker
from asyncrl.weights.media.collective_group import open_store
from tests.builders import cancelled_after
from tests.integration.ranks import rank_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two ranks have left what they found; they run all cases once."""
    folder = tmp_path_factory.mktemp("ranks")
    _store, address = open_store(LOOPBACK, rank_cases.TIMEOUT_S)
    env, command = os.environ | {"OMP_NUM_THREADS": "1"}, [sys.executable, "-m", "tests.integration.ranks.rank_cases"]
    peers = [
        subprocess.Popen([*command, str(rank), "2", address, str(folder)], env=env, stderr=subprocess.PIPE) for rank in (0, 1)
    ]
    said = [peer.communicate(timeout=700)[1].decode() for peer in peers]
    assert [peer.returncode for peer in peers] == [0, 0], "\n".join(said)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return load_file(folder / "found.safetensors")


def _part(found, prefix):
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


def _assert_agree(got, expected, tolerance=rank_cases.TOLERANCE):
    """Within a share of each tensor's largest element."""
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        scale = float(value.abs().max()) or 1.0
        assert float((got[key] - value).abs().max()) <= tolerance * scale, key


@pytest.mark.parametrize("name", rank_cases.CASES)
def test_two_ranks_have_the_gradients_and_weights_of_one(found, name):
    got = _part(found, f"{name}/")
    assert any(key.startswith("weight/policy") for key in got)
    _assert_agree(got, rank_cases.run_case(name, Ranks()), rank_cases.CASES[name].get("tolerance", rank_cases.TOLERANCE))


def test_going_on_from_a_checkpoint_of_two_ranks_is_not_stopping_bit_for_bit(found):
    went_on, resumed = _part(found, "checkpoint/went_on/"), _part(found, "checkpoint/resumed/")
    assert went_on.keys() == resumed.keys()
    assert all(torch.equal(went_on[key], resumed[key]) for key in went_on)


def test_one_rank_goes_on_from_a_checkpoint_of_two(found, folder):
    config = rank_cases.kit.run_config(rank_cases.DECOUPLED, rank_cases.LEARNER)
    saved = folder / "checkpoints" / "step-000001"
    resumed = dict(rank_cases.resumed(saved, config, Ranks(), rank_cases.CASES["tied"]["rows"]))
    _assert_agree(resumed, _part(found, "checkpoint/resumed/"))
    assert load_file(saved / "model.safetensors")["kept"].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("name", rank_cases.MOVED)
def test_shards_that_leave_the_device_between_steps_leave_no_memory_and_train_the_same_bit_for_bit(found, name):
    stayed, read = _part(found, f"{name}/weight/policy/"), _part(found, f"moved/{name}/read/")
    assert stayed.keys() == read.keys() != set()
    assert all(torch.equal(stayed[key], read[key]) for key in stayed)
    for counted, held, resident, still in found[f"moved/{name}/left"].tolist():
        assert held > 0
        assert (counted, resident, still) == (0, 0, 0)


def test_a_rank_that_cannot_move_fails_the_switch_of_all_and_nothing_is_lost(found):
    said = bytes(found["refused/said"].tolist()).decode()
    assert "rank 0: phase 'rollout' was not reached by 1 of the learner's other ranks" in said
    assert "rank 1: phase 'rollout' was not reached: cannot write" in said
    stayed = _part(found, "tied/weight/policy/")
    assert all(torch.equal(found[f"refused/{key}"], value) for key, value in stayed.items())


@pytest.mark.parametrize("name", rank_cases.PUBLISHED)
def test_what_two_ranks_publish_has_the_names_and_bytes_of_one_and_a_few_tensors_are_held_at_once(found, name):
    published, expected = _part(found, f"published/{name}/"), rank_cases.run_publish(Ranks(), **rank_cases.PUBLISHED[name])
    assert torch.equal(published["names"], expected["names"])
    assert torch.equal(published["flat"], expected["flat"])
    # Gathering makes a buffer and the tensor, and the collective lets go of the one before a moment later.
    sizes = [parameter.nbytes for parameter in rank_cases.publishing_model(tied=name == "tied").parameters()]
    peaks = found[f"published/{name}/peak"].tolist()
    assert max(peaks) <= 4 * max(sizes) < sum(sizes) / 10
    assert min(peaks) >= max(sizes)


THREE_RANKS = RunConfig(learner=LearnerConfig(ranks=3))
LOST_RANK = """
import os, subprocess, sys
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.ranks import group
from asyncrl.learner.ranks.group import joined_ranks
from asyncrl.weights.media.collective_group import join_store

if len(sys.argv) > 1:
    with joined_ranks(1, 2, join_store(sys.argv[1], 60.0), "cpu", 60.0):
        os._exit(0)

def start(rank, address):
    started.append(subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE))
    return started[-1]

started, group.LAST_ERROR_S = [], 600.0  # else the process ends so long after the rank's death, whether or not it has closed
launcher = group.RankLauncher(RunConfig(learner=LearnerConfig(ranks=2)), start)
launcher.join()
started[0].wait()
launcher.close(all_well=True)
assert started[0].stdin.closed
print("closed", flush=True)
os._exit(0)
"""


class Idlers:
    """Starts processes that do nothing until their input ends; the one of rank `fails_at` cannot be started."""

    def __init__(self, fails_at: int = 0) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self._fails_at = fails_at

    def start(self, rank: int, address: str) -> subprocess.Popen[bytes]:
        del address
        if rank == self._fails_at:
            raise OSError("no process")
        self.started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        return self.started[-1]


def test_where_a_rank_cannot_be_started_those_that_were_are_ended():
    idlers = Idlers(fails_at=2)
    with pytest.raises(OSError, match="no process"):
        RankLauncher(THREE_RANKS, idlers.start)
    assert [process.returncode for process in idlers.started] == [-9]


def test_a_rank_that_was_lost_is_no_hindrance_to_the_end(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(LOST_RANK)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=400)
    assert ended.stdout == "closed\n", ended.stderr


async def test_a_learner_that_is_cancelled_as_it_closes_ends_its_other_ranks(tmp_path):
    for loop_turns in range(1, 6):
        idlers = Idlers()
        worker = LearnerWorker(THREE_RANKS, tmp_path, None, SystemClock(), None, RankLauncher(THREE_RANKS, idlers.start))
        await cancelled_after(loop_turns, partial(worker.close, all_well=False))
        assert [process.wait(30) for process in idlers.started] == [-9, -9]


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


@pytest.mark.timed
def test_the_others_wait_for_rank_0_longer_than_any_collective_may_take():
    _store, peers = _both(PATIENT)
    assert [_said(peer) for peer in peers] == ["", "order\n"]


@pytest.mark.timed
def test_a_hanging_rank_fails_its_peers_by_the_time_out_while_it_still_hangs():
    _store, peers = _both(HANGING)
    try:
        assert "Timed out" in _said(peers[0])
        assert peers[1].poll() is None
    finally:
        peers[1].kill()
        _said(peers[1])
