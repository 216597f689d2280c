"""Every request gets one answer, and a bad sample fails alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from asyncrl.config.load import parse_config
from asyncrl.config.run import RewardModel
from asyncrl.control.scoring import ScoreDispatcher
from asyncrl.inference.worker import ScoreNormaliser, Scorer


def opened(folder, *more, **reward_model):
    models = {"reward_models": [{"name": "judge", "path": str(folder / "judge"), **reward_model}, *more]}
    config = parse_config({"inference": models, "algorithm": {"kl": {}, "reference": {"where": "worker"}}})
    return Scorer(config, folder / "model")


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
