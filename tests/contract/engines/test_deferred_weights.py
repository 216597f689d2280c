"""A version that ends in the process that holds the model: the path of `nccl` into the transformers engine, gloo on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.broadcast import GlooMedium
from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.engine import Engine
from asyncrl.models.layout import bucket_ends, make_manifest
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.base import ReceiverArguments
from asyncrl.weights.media.collective import CollectiveWriter
from asyncrl.weights.tensors import DeferredTensors
from tests.contract.engine_cases import assert_holds, make_model, make_request, transformers_engine
from tests.contract.media.learners import CPU, SlotLearner

IDS = (5, 6, 7, 8, 9, 10)
RECEIVER = "asyncrl.weights.media.collective_member:CollectiveReceiver"


class Learner:
    """Offers one version after the other."""

    def __init__(self, run_folder: Path) -> None:
        medium = GlooMedium(timeout_s=20.0, gather_s=0.05)
        manifest = make_manifest(make_model(0).state_dict(), bucket_bytes=20_000)
        assert len(bucket_ends(manifest)) > 2
        self.slots = SlotLearner(CollectiveWriter(medium, through=lambda: CPU), manifest)
        self._arguments = msgspec.json.encode(ReceiverArguments(str(run_folder), medium))

    def publish(self, version: int) -> DeferredTensors:
        return self.deferred(self.slots.publish(version, make_model(version).state_dict()))

    def deferred(self, available: WeightsAvailable) -> DeferredTensors:
        return DeferredTensors(available, RECEIVER, self._arguments)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(tmp_path)
    yield learner
    learner.slots.writer.close()


@pytest.fixture
async def engine(model_folder: Path):
    async with transformers_engine(model_folder) as engine:
        yield engine


def damaged(deferred: DeferredTensors, learner: Learner) -> DeferredTensors:
    """Announced with a wrong fingerprint of the second bucket."""
    right = deferred.available.bucket_fingerprints
    return learner.deferred(msgspec.structs.replace(deferred.available, bucket_fingerprints=right[:8] + bytes(8) + right[16:]))


async def load(engine: Engine, learner: Learner, version: int) -> None:
    """Load the version of this number, and see that it is there."""
    await engine.load_weights(version, learner.publish(version), "keep")
    assert engine.version == version
    await assert_holds(engine, make_model(version))


async def test_half_a_version_is_never_sampled_from_and_the_next_whole_one_goes_live(engine, learner):
    await load(engine, learner, 1)
    stream = engine.submit(make_request("a", 7, IDS, max_new_tokens=240))
    await anext(stream)
    with pytest.raises(BroadcastError, match="could not be sent"):
        await engine.load_weights(2, damaged(learner.publish(2), learner), "keep")
    assert engine.version == 1
    with pytest.raises(GenerationError):
        await engine.score(IDS)
    await load(engine, learner, 3)
    versions = [version async for chunk in stream for version in chunk.versions]
    assert set(versions) <= {1, 3}


async def test_a_layout_that_does_not_fit_is_refused_before_anything_is_touched(engine, learner):
    await load(engine, learner, 1)
    deferred = learner.publish(2)
    manifest = deferred.available.manifest
    renamed = [msgspec.structs.replace(entry, name=f"other.{entry.name}") for entry in manifest.entries]
    other = msgspec.structs.replace(manifest, entries=tuple(renamed))
    with pytest.raises(GenerationError, match="does not have"):
        await engine.load_weights(2, learner.deferred(msgspec.structs.replace(deferred.available, manifest=other)), "keep")
    await assert_holds(engine, make_model(1))
    await load(engine, learner, 3)


async def test_a_version_that_is_gone_leaves_the_old_one_serving(engine, learner):
    first = learner.publish(1)
    learner.publish(2)
    await load(engine, learner, 3)
    with pytest.raises(BroadcastError, match="fetch the newest"):
        await engine.load_weights(4, first, "keep")
    await assert_holds(engine, make_model(3))
