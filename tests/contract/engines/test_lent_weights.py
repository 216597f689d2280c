"""A version lent over shared memory: damaged or overwritten, it is never sampled from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncrl.config.broadcast import BroadcastConfig
from asyncrl.errors import BroadcastError, GenerationError
from asyncrl.generate.engine import Engine
from asyncrl.schema.weights import WeightsAvailable
from asyncrl.weights.media.base import VersionUnavailableError
from asyncrl.weights.media.shared_memory import HEADER_BYTES
from asyncrl.weights.subscriber import Subscriber
from tests.contract.engine_cases import make_model, make_request, reference_score, transformers_engine
from tests.contract.media.learners import Learner

IDS = (5, 6, 7, 8, 9, 10)
CONFIG = BroadcastConfig(bucket_bytes=20_000, verify=True)


class Lending:
    """A learner, a generator's end and an engine."""

    def __init__(self, run_folder: Path, engine: Engine) -> None:
        self.learner, self.subscriber, self.engine = Learner(CONFIG, run_folder), Subscriber(CONFIG, run_folder), engine

    def publish(self, version: int) -> WeightsAvailable:
        return self.learner.publish(version, make_model(version).state_dict())

    async def load(self, available: WeightsAvailable) -> None:
        """Load it, and see that it is there."""
        tensors = await self.subscriber.fetch(available)
        await self.engine.load_weights(available.version, tensors, "keep")
        tensors.release()
        await self.expect(available.version)

    async def expect(self, version: int) -> None:
        assert self.engine.version == version
        assert await self.engine.score(IDS) == pytest.approx(reference_score(make_model(version), IDS), abs=1e-5)


@pytest.fixture
async def lending(tmp_path: Path, model_folder: Path) -> AsyncIterator[Lending]:
    async with transformers_engine(model_folder) as engine:
        lending = Lending(tmp_path, engine)
        yield lending
    lending.subscriber.close()
    lending.learner.close()


def flip_last_byte(available: WeightsAvailable) -> None:
    """Damage the last bucket of the second slot: by then all others are in the model."""
    last = available.manifest.entries[-1]
    with Path(available.location).open("r+b") as file:
        file.seek(HEADER_BYTES + (Path(available.location).stat().st_size - HEADER_BYTES) // 2 + last.offset + last.num_bytes - 1)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


async def test_nothing_is_sampled_from_damaged_weights_and_the_same_version_comes_once_it_is_right(lending):
    await lending.load(lending.publish(1))
    stream = lending.engine.submit(make_request("a", 7, IDS, max_new_tokens=240))
    await anext(stream)
    second = lending.publish(2)
    flip_last_byte(second)
    with pytest.raises(BroadcastError, match="arrived damaged"):
        await lending.load(second)
    await lending.expect(1)
    flip_last_byte(second)
    await lending.load(second)
    assert {version async for chunk in stream for version in chunk.versions} <= {1, 2}


async def test_a_slot_that_was_overwritten_before_the_engine_read_it_is_not_sampled_from_and_the_newest_goes_live(lending):
    await lending.load(lending.publish(1))
    second = lending.publish(2)
    tensors = await lending.subscriber.fetch(second)
    lending.learner.publisher._writer.overwrite(1, 3)
    with pytest.raises(VersionUnavailableError, match="overwritten while it was read"):
        await lending.engine.load_weights(2, tensors, "keep")
    with pytest.raises(GenerationError, match="no whole weights"):
        await lending.engine.score(IDS)
    with pytest.raises(VersionUnavailableError, match="version 2 has left shared memory"):
        await lending.subscriber.fetch(second)
    await lending.load(lending.publish(3))
