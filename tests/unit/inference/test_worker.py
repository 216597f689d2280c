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


async def test_requests_are_answered_in_batches_and_acknowledged(kit, folder):
    async with worker(folder, tokens_per_batch=24) as controller:
        for _ in range(2):  # told again it opens nothing
            await controller.order(LoadModel(str(folder / "model")))
        ready, again = [await controller.report(ModelsReady) for _ in range(2)]
        assert ready.models == ("reference", "judge")
        assert again == ready
        requests = kit.random_requests(count=30)
        for request in requests:
            await controller.connection.send(request)
        results = await controller.answers(30)
        assert [(item.group_id, item.index) for item in results] == [(item.group_id, item.index) for item in requests]
        assert all(item.error == "" and item.worker == "inference-0" and "judge" in item.rewards for item in results)
        assert [len(item.reference_logprobs) for item in results] == [len(item.token_ids) for item in requests]
        assert 1 < len({item.started_s for item in results}) < 30
        assert await controller.connection.flush(30)
        beat = await controller.report(Heartbeat, lambda beat: beat.gauges["process/samples_scored"] == 30)
        tokens = sum(len(item.prompt_ids + item.token_ids) // 4 for item in requests)
        assert beat.gauges["process/tokens_judged"] == tokens
        assert beat.gauges["process/judged_tokens_per_sec"] > 0
        assert beat.gauges["process/models_loaded"] == 2
        assert beat.gauges["process/model_bytes"] == ready.num_bytes


async def test_a_model_that_cannot_be_opened_ends_the_worker_with_the_reason(folder):
    (folder / "judge" / "model.safetensors").unlink()
    async with worker(folder) as controller:
        await controller.order(LoadModel(str(folder / "model")))
        error = await asyncio.wait_for(controller.task, 30)
        assert isinstance(error, ConfigError)
        assert "safetensors" in str(error)
