"""The controller benchmark's cluster says what real processes would say, and marks the controller at the versions it should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from asyncrl.config.load import dump_config, parse_config
from asyncrl.packing.tensors import pack_step
from asyncrl.pipeline import ENDPOINT_FILE
from asyncrl.schema.batches import StepDone
from asyncrl.schema.codec import Message
from asyncrl.schema.control import Checkpoint, CheckpointDone, EngineReady, LearnerReady, LoadModel, Shutdown
from asyncrl.schema.samples import (
    GroupWork,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    ScoredGroup,
    ScoredSample,
    ScoreRequest,
    ids_from_bytes,
)
from asyncrl.schema.weights import VersionLive, WeightsAvailable, WeightsManifest
from asyncrl.transport.protocol import Connection, Lane
from asyncrl.transport.zmq_server import open_listener
from benchmarks.fake_cluster import MEASURED_FROM, MEASURED_TO, RESULT_FILE, Mark, live_all


async def _next(connection: Connection, kind: type[Message], lane: Lane, fits: Callable[..., bool] = lambda _: True) -> Message:
    while True:
        delivery = await connection.receive(lane)
        delivery.ack()
        if isinstance(delivery.message, kind) and fits(delivery.message):
            return delivery.message


async def test_a_fake_cluster_takes_a_run_to_its_end(tmp_path):
    config = parse_config({
        "num_steps": MEASURED_TO, "algorithm": {"groups_per_step": 1, "group_size": 2},
        "generate": {"num_workers": 1, "engine": {"kind": "fake", "num_slots": 7}, "sampling": {"max_new_tokens": 4}},
    })  # fmt: skip
    (tmp_path / "config.toml").write_text(dump_config(config))
    listener = await open_listener(config.transport, tmp_path)
    (tmp_path / ENDPOINT_FILE).write_text(listener.address)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        cluster = group.create_task(live_all(tmp_path))
        accepted = [await listener.accept() for _ in range(3)]
        peers = {connection.peer.kind: connection for connection in accepted}
        generator, reward, learner = peers["generator"], peers["reward"], peers["learner"]

        assert (await _next(learner, WeightsAvailable, Lane.CONTROL)).version == 0
        assert (await _next(learner, LearnerReady, Lane.CONTROL)).version == 0
        await generator.send(LoadModel("model"), Lane.CONTROL)
        assert (await _next(generator, EngineReady, Lane.CONTROL)).num_slots == 7
        await generator.send(WeightsAvailable(3, "none", "", WeightsManifest((), 0), "", 0.0), Lane.CONTROL)
        assert (await _next(generator, VersionLive, Lane.CONTROL)).version == 3

        await generator.send(GroupWork(5, 1, Prompt("p"), (0, 1), SamplingParams(max_new_tokens=1), 0))
        samples = [await _next(generator, Sample, Lane.DATA) for _ in range(2)]
        assert [(sample.group_id, sample.index, sample.attempt) for sample in samples] == [(5, 0, 1), (5, 1, 1)]
        assert set(ids_from_bytes(samples[0].versions)) == {3}
        assert samples[0].num_tokens == 4

        scores = []
        for sample in samples:
            await reward.send(ScoreRequest(5, sample.index, 1, Prompt("p"), sample.text, sample.finish_reason, 4))
            scores.append(await _next(reward, Score, Lane.DATA))
        assert [(score.group_id, score.index, score.reward) for score in scores] == [(5, 0, 0.0), (5, 1, 1.0)]

        members = tuple(ScoredSample(sample, score.reward) for sample, score in zip(samples, scores, strict=True))
        scored = ScoredGroup(5, Prompt("p"), members)
        for step in range(MEASURED_TO):
            await learner.send(pack_step(step, [scored], tokens_per_row=1024, temperature=1.0))
            version = step + 1
            assert (await _next(learner, WeightsAvailable, Lane.CONTROL)).version == version
            done = await _next(learner, StepDone, Lane.CONTROL)
            assert (done.step, done.version, done.metrics["data/samples"]) == (step, version, 2.0)
        await learner.send(Checkpoint(MEASURED_TO), Lane.CONTROL)
        assert (await _next(learner, CheckpointDone, Lane.CONTROL)).version == MEASURED_TO
        for connection in accepted:
            await connection.send(Shutdown(), Lane.CONTROL)
        await cluster
    await listener.close()
    marks = msgspec.json.decode((tmp_path / RESULT_FILE).read_bytes(), type=list[Mark])
    assert [mark.step for mark in marks] == [MEASURED_FROM, MEASURED_TO]
    assert marks[0].wall_s < marks[1].wall_s
    assert marks[0].cpu_s <= marks[1].cpu_s
