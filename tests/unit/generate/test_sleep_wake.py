"""An engine on a shared device; what it holds and when, in a run: tests/integration/placement/test_placement.py."""

import pytest
import torch

from asyncrl.clock import SystemClock
from asyncrl.config.generate import FakeEngineConfig
from asyncrl.config.run import PlacementConfig, RunConfig
from asyncrl.errors import BroadcastError
from asyncrl.generate.doubles.fake import FakeEngine
from asyncrl.generate.sleep_wake import SleepWake
from asyncrl.models.layout import make_manifest
from asyncrl.schema.control import SetPhase
from asyncrl.weights.tensors import SharedTensors


async def test_it_lacks_weights_until_it_takes_some_and_those_that_changed_meanwhile_are_an_error_at_the_end(tmp_path):
    def check() -> None:
        raise BroadcastError("the learner has made version 2")

    async def take_weights() -> None:
        manifest = make_manifest({"weight": torch.zeros(16)})
        cycle.took(SharedTensors(manifest, torch.zeros(64, dtype=torch.uint8), check=check))

    engine, clock = FakeEngine(FakeEngineConfig(), SystemClock()), SystemClock()
    cycle = SleepWake(RunConfig(placement=PlacementConfig(kind="colocated")), tmp_path, clock, "generator-0")
    await engine.start()
    await engine.load_weights(0, {}, "keep")
    await cycle.sleep(engine, SetPhase("train", 1))
    assert (cycle.is_asleep, cycle.lacks_weights) == (True, True)
    await cycle.wake(engine, SetPhase("rollout", 2), take_weights)
    assert (cycle.is_asleep, cycle.lacks_weights) == (False, False)
    with pytest.raises(BroadcastError, match="version 2"):
        await cycle.sleep(engine, SetPhase("train", 3))
    cycle.close()
    await engine.close()
