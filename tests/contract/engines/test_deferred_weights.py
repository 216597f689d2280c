"""A version that ends in the process that holds the model: the path of `nccl` into the transformers engine, gloo on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from asyncrl.config.broadcast import GlooMedium
from asyncrl.config.generate import TransformersEngineConfig
from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.models.layout import bucket_ends, make_manifest, view_tensors
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.base import ReceiverArguments
from asyncrl.weights.media.collective import CollectiveWriter
from asyncrl.weights.media.device import device_fingerprints
from asyncrl.weights.tensors import DeferredTensors
from tests.contract.engine_cases import make_model, make_request, reference_logprobs

CPU = torch.device("cpu")
IDS = (5, 6, 7, 8, 9, 10)
RECEIVER = "asyncrl.weights.media.collective_member:open_receiver"


class Learner:
    """Offers one version after the other in the first slot."""

    def __init__(self, run_folder: Path) -> None:
        medium = GlooMedium(timeout_s=5.0, gather_s=0.05)
        self.writer = CollectiveWriter(medium, through=lambda: CPU)
        self._manifest = make_manifest(make_model(0).state_dict(), bucket_bytes=20_000)
        self._slots = self.writer.open(self._manifest)
        self._arguments = msgspec.json.encode(ReceiverArguments(str(run_folder), medium))

    def publish(self, version: int, model: LlamaForCausalLM) -> DeferredTensors:
        self.writer.overwrite(0, version)
        state = model.state_dict()
        for name, view in view_tensors(self._slots[0], self._manifest).items():
            view.copy_(state[name])
        ends = bucket_ends(self._manifest)
        assert len(ends) > 2
        fingerprints = device_fingerprints(self._slots[0], ends, CPU)
        location = self.writer.commit(0, version, f"{version}")
        available = WeightsAvailable(
            version, "nccl", location, self._manifest, f"{version}", 0.0, bucket_fingerprints=fingerprints
        )
        return self.deferred(available)

    def deferred(self, available: WeightsAvailable) -> DeferredTensors:
        return DeferredTensors(available, RECEIVER, self._arguments)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(tmp_path)
    yield learner
    learner.writer.close()


@pytest_asyncio.fixture
async def engine(tmp_path: Path):
    make_model(0).save_pretrained(tmp_path / "model")
    engine = TransformersEngine(TransformersEngineConfig(num_slots=2, max_sequence_tokens=250), tmp_path / "model")
    await engine.start()
    yield engine
    await engine.close()


def damaged(deferred: DeferredTensors, learner: Learner) -> DeferredTensors:
    """Announced with a wrong fingerprint of the second bucket."""
    right = deferred.available.bucket_fingerprints
    return learner.deferred(msgspec.structs.replace(deferred.available, bucket_fingerprints=right[:8] + bytes(8) + right[16:]))


def expected(model: LlamaForCausalLM) -> list[float]:
    return reference_logprobs(model, IDS[:1], list(IDS[1:]))


async def test_version_after_version_arrives_in_the_model_itself(engine, learner):
    for version in (1, 2, 3):
        model = make_model(version)
        await engine.load_weights(version, learner.publish(version, model), "keep")
        assert engine.version == version
        assert await engine.score(IDS) == pytest.approx(expected(model), abs=1e-5)


async def test_half_a_version_is_never_sampled_from_and_the_next_whole_one_goes_live(engine, learner):
    await engine.load_weights(1, learner.publish(1, make_model(1)), "keep")
    stream = engine.submit(make_request("a", 7, IDS, max_new_tokens=240))
    await anext(stream)
    with pytest.raises(BroadcastError, match="could not be sent"):
        await engine.load_weights(2, damaged(learner.publish(2, make_model(2)), learner), "keep")
    assert engine.version == 1
    with pytest.raises(GenerationError):
        await engine.score(IDS)
    await engine.load_weights(3, learner.publish(3, make_model(3)), "keep")
    assert await engine.score(IDS) == pytest.approx(expected(make_model(3)), abs=1e-5)
    versions = [version async for chunk in stream for version in chunk.versions]
    assert set(versions) <= {1, 3}


async def test_a_layout_that_does_not_fit_is_refused_before_anything_is_touched(engine, learner):
    await engine.load_weights(1, learner.publish(1, make_model(1)), "keep")
    deferred = learner.publish(2, make_model(2))
    manifest = deferred.available.manifest
    renamed = [msgspec.structs.replace(entry, name=f"other.{entry.name}") for entry in manifest.entries]
    other = msgspec.structs.replace(manifest, entries=tuple(renamed))
    with pytest.raises(GenerationError, match="does not have"):
        await engine.load_weights(2, learner.deferred(msgspec.structs.replace(deferred.available, manifest=other)), "keep")
    assert await engine.score(IDS) == pytest.approx(expected(make_model(1)), abs=1e-5)
    await engine.load_weights(3, learner.publish(3, make_model(3)), "keep")
    assert await engine.score(IDS) == pytest.approx(expected(make_model(3)), abs=1e-5)


async def test_a_version_that_is_gone_leaves_the_old_one_serving(engine, learner):
    first = learner.publish(1, make_model(1))
    await engine.load_weights(2, learner.publish(2, make_model(2)), "keep")
    with pytest.raises(BroadcastError, match="fetch the newest"):
        await engine.load_weights(3, first, "keep")
    assert await engine.score(IDS) == pytest.approx(expected(make_model(2)), abs=1e-5)
