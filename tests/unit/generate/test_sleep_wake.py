"""An engine on a shared device: asleep while the learner trains, awake with weights, and what is told about it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.generate import FakeEngineConfig
from asyncrl.config.run import PlacementConfig, RunConfig
from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.doubles.fake import FakeEngine
from asyncrl.generate.sleep_wake import SleepWake
from asyncrl.models.layout import make_manifest
from asyncrl.observe.memory import read_memory
from asyncrl.schema.control import SetPhase
from asyncrl.weights.tensors import SharedTensors


class SizedEngine(FakeEngine):
    """A fake engine that holds so much."""

    @property
    def resident(self) -> Mapping[str, int]:
        """Nothing asleep."""
        asleep = "sleep" in self._holds
        return {"engine weights": 0 if asleep else 300, "KV cache": 0 if asleep else 100}


@pytest.fixture
async def engine() -> AsyncIterator[SizedEngine]:
    made = SizedEngine(FakeEngineConfig(), SystemClock())
    await made.start()
    await made.load_weights(0, {}, "keep")
    yield made
    await made.close()


@pytest.fixture
def cycle(tmp_path: Path):
    made = SleepWake(RunConfig(placement=PlacementConfig(kind="colocated")), tmp_path, SystemClock(), "generator-0")
    yield made
    made.close()


async def test_asleep_it_holds_nothing_and_lacks_weights_until_it_takes_some(engine, cycle, tmp_path):
    reached = await cycle.sleep(engine, SetPhase("train", 4))
    assert (reached.phase, reached.number, reached.resident) == ("train", 4, {})
    assert {(move.component, move.before, move.after, move.num_bytes) for move in reached.moves} == {
        ("engine weights", "device", "absent", 300), ("KV cache", "device", "absent", 100)
    }  # fmt: skip
    assert reached.peak_bytes == 400
    assert cycle.is_asleep
    assert cycle.lacks_weights
    with pytest.raises(GenerationError, match="asleep"):
        await engine.score([1, 2])

    async def take_weights() -> None:
        cycle.took({})

    woken = await cycle.wake(engine, SetPhase("rollout", 5), take_weights)
    assert woken.resident == {"engine weights": 300, "KV cache": 100}
    assert not cycle.is_asleep
    assert not cycle.lacks_weights
    assert [(line.phase, line.ended_phase, line.number) for line in read_memory(tmp_path)] == [
        ("train", "rollout", 4), ("rollout", "train", 5)
    ]  # fmt: skip


async def test_weights_that_changed_while_they_were_sampled_with_are_an_error_at_the_end_of_the_rollout(engine, cycle):
    def check() -> None:
        raise BroadcastError("the learner has made version 2")

    flat = torch.zeros(64, dtype=torch.uint8)
    cycle.took(SharedTensors(make_manifest({"weight": torch.zeros(16)}), flat, check=check))
    with pytest.raises(BroadcastError, match="version 2"):
        await cycle.sleep(engine, SetPhase("train", 1))
