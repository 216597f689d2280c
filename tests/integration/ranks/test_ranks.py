"""A run whose learner has two ranks: real processes, real collectives, and ranks that are killed."""

import os
import signal

import psutil
import pytest
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.control.lifecycle.supervisor import read_pids
from asyncrl.observe.steps import read_memory, read_steps
from tests.integration.conftest import NO_EVALUATION, trained_groups


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
    learner = read_pids(run.run_folder)["learner"].pid
    ranks = [learner, *(child.pid for child in psutil.Process(learner).children())]
    await run.resume()
    return ranks


def _weights(folder):
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


async def test_ranks_take_turns_with_generation_and_one_that_is_killed_ends_the_others_and_the_run_goes_on(two_ranks):
    """That the ranks' shards come back to the last bit is shown in tests/integration/ranks/test_rank_cases.py."""
    placement = {"placement": {"kind": "colocated", "offload_to": "disk"}, "buffer__max_staleness": 1}
    victims, before, again_at = {2: 1, 6: 0}, [], 0
    async with asyncrl.Run(two_ranks(num_steps=1000, **placement)) as run:
        async for report in run.steps():
            if (rank := victims.pop(report.version, None)) is not None:
                ranks = await _ranks(run)
                os.kill(ranks[rank], signal.SIGKILL)
                before += ranks
                again_at = len(read_steps(run.run_folder)) + 4
            elif not victims and report.version >= again_at:
                break
        status = await run.drain()
    assert len(before) == 4
    assert not any(map(psutil.pid_exists, before))
    assert status.phase == "stopped", status.reason
    assert {process.name: process.deaths for process in status.processes}["learner"] == 2
    assert len(trained_groups(run.run_folder)) == status.version * 4
    trained, started = _weights(status.checkpoint), _weights(run.run_folder / "model")
    assert trained.keys() == started.keys()
    assert any((trained[name] != started[name]).any() for name in trained)
    lines = read_memory(run.run_folder)
    assert {line.process for line in lines} == {"learner", "learner-1", "generator-0"}
    for line in lines:
        if line.process.startswith("learner"):
            assert set(line.resident) == ({"policy", "policy optimizer"} if line.phase == "train" else set()), line
