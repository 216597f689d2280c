"""The inference worker over an in-process channel: what the controller sees."""

import asyncio

from asyncrl.clock import SystemClock
from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError
from asyncrl.inference.worker import InferenceWorker
from asyncrl.schema.control import Heartbeat, LoadModel, ModelsReady
from tests.builders import working


def worker(folder, **inference):
    config = parse_config({
        "algorithm": {"kl": {}, "reference": {"where": "worker"}},
        "inference": {"reward_models": [{"name": "judge", "path": str(folder / "judge")}], **inference},
        "supervision": {"heartbeat_s": 0.02},
    })

    def infer(near, _):
        return InferenceWorker(config, folder, near, SystemClock(), "inference-0").run()

    return working("inference", "inference-0", infer)


async def test_requests_are_answered_in_batches_acknowledged_and_counted(kit, folder):
    async with worker(folder, tokens_per_batch=24) as controller:
        await controller.order(LoadModel(str(folder / "model")))
        ready, requests = await controller.report(ModelsReady), kit.random_requests(count=30)
        for request in requests:
            await controller.connection.send(request)
        results = await controller.answers(30)
        assert [(item.group_id, item.index, item.error) for item in results] == [(r.group_id, r.index, "") for r in requests]
        assert 1 < len({item.started_s for item in results}) < 30
        assert await controller.connection.flush(30)
        beat = await controller.report(Heartbeat, lambda beat: beat.gauges["process/samples_scored"] == 30)
        told = [beat.gauges[f"process/{name}"] for name in ("tokens_judged", "models_loaded", "model_bytes")]
        assert told == [sum(len(r.prompt_ids + r.token_ids) // 4 for r in requests), 2, ready.num_bytes]


async def test_a_model_that_cannot_be_opened_ends_the_worker_with_the_reason(folder):
    (folder / "judge" / "model.safetensors").unlink()
    async with worker(folder) as controller:
        await controller.order(LoadModel(str(folder / "model")))
        error = await asyncio.wait_for(controller.task, 30)
        assert isinstance(error, ConfigError)
        assert "safetensors" in str(error)
