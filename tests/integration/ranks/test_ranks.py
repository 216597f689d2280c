"""Runs whose learner has two ranks: real processes, real collectives, and a rank that is killed."""

import os
import signal

import psutil
import pytest
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.control.lifecycle.pid_file import read_pids
from asyncrl.observe.memory import read_memory
from tests.integration.conftest import NO_EVALUATION, NO_MODEL, trained_groups

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def two_ranks(tiny, mixed_rewards):
    """Make configs of two ranks."""

    def make(**overrides):
        return tiny(learner__ranks=2, reward__functions=mixed_rewards, **NO_EVALUATION, **overrides)

    return make


async def _ranks(run):
    """Pids of the learner's ranks, of a run that is held meanwhile: a learner that has come to its end has none.

    Rank 0 is recorded as the learner, the others are its children.
    """
    await run.pause()
    learner = read_pids(run.run_folder).processes["learner"].pid
    ranks = [learner, *(child.pid for child in psutil.Process(learner).children())]
    await run.resume()
    return ranks


def _weights(folder):
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


async def test_two_ranks_that_take_turns_with_generation_train_publish_and_checkpoint(two_ranks):
    """That their shards come back to the last bit is shown in tests/integration/ranks/test_rank_cases.py."""
    placement = {"placement": {"kind": "colocated", "offload_to": "disk"}, "buffer__max_staleness": 1}
    async with asyncrl.Run(two_ranks(num_steps=8, **placement)) as run:
        followers = set()
        async for report in run.steps():
            if report.version == 1:
                followers = set((await _ranks(run))[1:])
        status = await run.status()
    assert (status.phase, status.version) == ("stopped", 8), status.reason
    assert len(followers) == 1
    assert not any(map(psutil.pid_exists, followers))
    trained, started = _weights(status.checkpoint), _weights(run.run_folder / "model")
    assert trained.keys() == started.keys()
    assert any((trained[name] != started[name]).any() for name in trained)
    lines = read_memory(run.run_folder)
    assert {line.process for line in lines} == {"learner", "learner-1", "generator-0"}
    for line in lines:
        if line.process.startswith("learner"):
            assert set(line.resident) == ({"policy", "policy optimizer"} if line.phase == "train" else set()), line


async def test_a_killed_rank_takes_the_others_down_and_the_run_goes_on_from_its_checkpoint(two_ranks):
    victims, before = {3: 1, 12: 0}, []
    async with asyncrl.Run(two_ranks(num_steps=24, generate__engine=NO_MODEL)) as run:
        async for report in run.steps():
            if (rank := victims.pop(report.version, None)) is not None:
                ranks = await _ranks(run)
                os.kill(ranks[rank], signal.SIGKILL)
                before += ranks
        status = await run.status()
    assert len(before) == 4
    assert not any(map(psutil.pid_exists, before))
    assert (status.phase, status.version) == ("stopped", 24), status.reason
    assert {process.name: process.deaths for process in status.processes}["learner"] == 2
    assert len(trained_groups(run.run_folder)) == 24 * 4
