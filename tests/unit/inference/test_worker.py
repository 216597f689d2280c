"""Every request gets one answer, a bad sample fails alone; and what the controller sees over an in-process channel."""

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from asyncrl.clock import SystemClock
from asyncrl.config.load import parse_config
from asyncrl.config.run import RewardModel
from asyncrl.control.scoring import ScoreDispatcher
from asyncrl.errors import ConfigError
from asyncrl.inference.worker import InferenceWorker, ScoreNormaliser, Scorer
from asyncrl.schema.control import Heartbeat, LoadModel, ModelsReady
from tests.builders import working


def config_of(folder, *more, inference=None, **reward_model):
    models = [{"name": "judge", "path": str(folder / "judge"), **reward_model}, *more]
    return parse_config({
        "algorithm": {"kl": {}, "reference": {"where": "worker"}},
        "inference": {"reward_models": models, **(inference or {})},
        "supervision": {"heartbeat_s": 0.02},
    })


def opened(folder, *more, **reward_model):
    return Scorer(config_of(folder, *more, **reward_model), folder / "model")


def test_evaluation_samples_get_rewards_alone_and_leave_the_running_figures(kit, folder):
    scorer = opened(folder, normalise="running")
    scorer.score(kit.random_requests(count=4))
    (answer,) = scorer.score([kit.request([3], [4, 5], purpose="eval")])
    assert answer.reference_logprobs == b""
    assert "judge" in answer.rewards
    assert scorer._normalisers["judge"].count == 4


@pytest.mark.parametrize(("prompt", "response", "reason"), [
    ([], [3], "no prompt"), ([], [], "no tokens at all"), ([3], [29], "outside the reference's vocabulary of 29"),
    ([3], [-1], "token id -1 is negative"), ([3] * 10, [4] * 60, "takes at most 64 tokens, the sample has 70"),
])  # fmt: skip
def test_a_sample_that_cannot_be_scored_fails_alone_with_the_reason(kit, folder, prompt, response, reason):
    scorer = opened(folder)
    good = kit.request([3], [4, 5])
    answers = scorer.score([good, kit.request(prompt, response, index=1), good])
    assert reason in answers[1].error
    assert answers[0].error == answers[2].error == ""
    assert answers[0].rewards == pytest.approx(answers[2].rewards, abs=1e-6)


def test_a_score_that_is_no_number_fails_its_sample_and_is_not_remembered(kit, folder):
    kit.save_model(folder / "other")
    weights = load_file(folder / "judge" / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = math.nan
    save_file(weights, folder / "judge" / "model.safetensors", metadata={"format": "pt"})
    scorer = opened(folder, {"name": "other", "path": str(folder / "other")}, normalise="running")
    requests = [kit.request([3], [7], index=0), kit.request([4], [5], index=1)]
    dispatcher = ScoreDispatcher({"judge": 1.0, "other": 1.0})
    dispatcher.ask(*requests, now=0.0)
    sick, well = answers = scorer.score(requests)
    assert [dispatcher.refusal(answer, worker="") for answer in answers] == ["", ""]
    assert sick.error == "reward model judge gave nan"
    assert well.error == ""
    assert math.isfinite(well.rewards["judge"])
    assert scorer._normalisers["judge"].count == 1


scores_lists = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40)


def _normaliser(**settings):
    return ScoreNormaliser(RewardModel(name="judge", path="", **settings))


def test_running_figures_keep_their_digits_far_from_zero():
    rewards = _normaliser(normalise="running").normalise([1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16], [True] * 4)
    assert rewards == pytest.approx([number / 30**0.5 for number in (-6, -3, 3, 6)])


@given(scores_lists, scores_lists)
def test_running_scores_come_after_the_fixed_figures_and_before_the_clip(first, second):
    fixed = _normaliser(mean=1.0, std=2.0, clip=0.7)
    assert fixed.normalise(first, [True] * len(first)) == pytest.approx(np.clip((np.array(first) - 1) / 2, -0.7, 0.7).tolist())
    assert fixed.count == 0
    normaliser = _normaliser(normalise="running", mean=1.0, std=2.0, clip=0.7)
    normaliser.normalise(first, [True] * len(first))
    rewards = normaliser.normalise(second, [True] * len(second))
    seen = (np.array(first + second) - 1.0) / 2.0
    spread = np.std(seen, ddof=1)
    expected = np.clip(((np.array(second) - 1.0) / 2.0 - seen.mean()) / (spread if spread > 0 else 1.0), -0.7, 0.7)
    if spread > 1e-6:
        assert rewards == pytest.approx(expected.tolist(), abs=1e-6)


def worker(folder, **inference):
    def infer(near, _):
        return InferenceWorker(config_of(folder, inference=inference), folder, near, SystemClock(), "inference-0").run()

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
