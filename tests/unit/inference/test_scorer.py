"""Every request gets one answer, and a bad sample fails alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from asyncrl.config.load import parse_config
from asyncrl.config.run import RewardModel
from asyncrl.errors import ConfigError
from asyncrl.inference.scorer import RunningMoments, ScoreNormaliser, Scorer
from asyncrl.schema.samples import logprobs_from_bytes


def _config(folder, reference=True, **reward_model):
    raw = {"inference": {"reward_models": [{"name": "judge", "path": str(folder / "judge"), **reward_model}]}}
    if reference:
        raw["algorithm"] = {"kl": {}, "reference": {"where": "worker"}}
    return parse_config(raw)


@pytest.fixture
def folder(kit, tmp_path):
    kit.save_policy(tmp_path / "model")
    kit.save_reward_model(tmp_path / "judge")
    return tmp_path


def test_an_answer_has_the_references_logprobs_and_every_models_reward(kit, folder):
    scorer = Scorer(_config(folder), folder / "model")
    assert scorer.names == ("reference", "judge")
    assert scorer.num_bytes > 0
    requests = kit.random_requests(count=5)
    for request, answer in zip(requests, scorer.score(requests), strict=True):
        assert answer.error == ""
        assert len(answer.reference_logprobs) == len(request.token_ids)
        assert (logprobs_from_bytes(answer.reference_logprobs) < 0).all()
        assert list(answer.rewards) == ["judge"]


def test_answers_do_not_depend_on_what_shares_the_batch(kit, folder):
    scorer = Scorer(_config(folder), folder / "model")
    requests = kit.random_requests(count=6)
    together = scorer.score(requests)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = scorer.score([request])
        assert alone.rewards["judge"] == pytest.approx(answer.rewards["judge"], abs=1e-5)
        ours, theirs = logprobs_from_bytes(alone.reference_logprobs), logprobs_from_bytes(answer.reference_logprobs)
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_evaluation_samples_get_rewards_alone_and_leave_the_running_figures(kit, folder):
    scorer = Scorer(_config(folder, normalise="running"), folder / "model")
    scorer.score(kit.random_requests(count=4))
    (answer,) = scorer.score([kit.request([3], [4, 5], purpose="eval")])
    assert answer.reference_logprobs == b""
    assert "judge" in answer.rewards
    assert scorer._normalisers["judge"].moments.count == 4


@pytest.mark.parametrize(
    ("prompt", "response", "reason"),
    [
        ([], [3], "no prompt"),
        ([], [], "no tokens at all"),
        ([3], [29], "outside the reference's vocabulary of 29"),
        ([3], [-1], "token id -1 is negative"),
        ([3] * 10, [4] * 60, "takes at most 64 tokens, the sample has 70"),
    ],
)
def test_a_sample_that_cannot_be_scored_fails_alone_with_the_reason(kit, folder, prompt, response, reason):
    scorer = Scorer(_config(folder), folder / "model")
    good = kit.request([3], [4, 5])
    answers = scorer.score([good, kit.request(prompt, response, index=1), good])
    assert reason in answers[1].error
    assert answers[0].error == answers[2].error == ""
    assert answers[0].rewards == answers[2].rewards


def test_a_score_that_is_no_number_fails_its_sample_and_is_not_remembered(kit, folder):
    weights = load_file(folder / "judge" / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = math.nan
    save_file(weights, folder / "judge" / "model.safetensors", metadata={"format": "pt"})
    scorer = Scorer(_config(folder, normalise="running"), folder / "model")
    sick, well = scorer.score([kit.request([3], [7]), kit.request([4], [5])])
    assert sick.error == "reward model judge gave nan"
    assert well.error == ""
    assert math.isfinite(well.rewards["judge"])
    assert scorer._normalisers["judge"].moments.count == 1


def test_a_reference_named_by_path_is_opened_in_place_of_the_runs_own_model(kit, folder):
    kit.save_policy(folder / "other", seed=5)
    raw = {"algorithm": {"kl": {}, "reference": {"where": "worker", "path": str(folder / "other")}}}
    scorer = Scorer(parse_config(raw), folder / "model")
    held = scorer.reference.model
    torch.testing.assert_close(held.lm_head.weight, kit.save_policy(folder / "again", seed=5).lm_head.weight)


def test_names_that_could_be_mixed_up_are_refused(folder):
    model = {"name": "judge", "path": "x"}
    for models, functions, message in (
        ([model, model], [], "given 2 times"),
        ([{**model, "name": "reference"}], [], "that of the reference model"),
        ([{**model, "name": "answer_match"}], [{"kind": "answer_match"}], "that of one of reward.functions"),
        ([{**model, "name": ""}], [], "needs a name"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config({"inference": {"reward_models": models}, "reward": {"functions": functions}})


scores_lists = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40)


def _normaliser(**settings):
    return ScoreNormaliser(RewardModel(name="judge", path="", **settings))


@given(scores_lists)
def test_running_moments_are_those_of_all_values_at_once(values):
    moments = RunningMoments()
    for value in values:
        moments.add(value)
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(np.mean(values), abs=1e-9, rel=1e-9)
    assert moments.std == pytest.approx(np.std(values, ddof=1), abs=1e-7, rel=1e-7)


def test_running_moments_keep_their_digits_far_from_zero():
    moments = RunningMoments()
    for value in (1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16):
        moments.add(value)
    assert moments.std**2 == pytest.approx(30.0)


def test_fixed_figures_shift_scale_and_clip():
    normaliser = _normaliser(mean=2.0, std=4.0, clip=1.5)
    assert normaliser.normalise([2.0, 4.0, 10.0, -10.0], [True] * 4) == [0.0, 0.5, 1.5, -1.5]
    assert normaliser.moments.count == 0


@given(scores_lists, scores_lists)
def test_running_scores_come_after_the_fixed_figures_and_before_the_clip(first, second):
    normaliser = _normaliser(normalise="running", mean=1.0, std=2.0, clip=0.7)
    normaliser.normalise(first, [True] * len(first))
    rewards = normaliser.normalise(second, [True] * len(second))
    seen = (np.array(first + second) - 1.0) / 2.0
    spread = np.std(seen, ddof=1)
    expected = np.clip(((np.array(second) - 1.0) / 2.0 - seen.mean()) / (spread if spread > 0 else 1.0), -0.7, 0.7)
    if spread > 1e-6:
        assert rewards == pytest.approx(expected.tolist(), abs=1e-6)


def test_equal_scores_give_equal_rewards_within_a_batch_and_a_first_score_gives_0():
    normaliser = _normaliser(normalise="running")
    assert normaliser.normalise([3.0], [True]) == [0.0]
    rewards = normaliser.normalise([5.0, 1.0, 5.0], [True] * 3)
    assert rewards[0] == rewards[2] > rewards[1]


def test_what_does_not_count_is_normalised_and_not_remembered():
    normaliser = _normaliser(normalise="running")
    normaliser.normalise([0.0, 2.0], [True, True])
    assert normaliser.normalise([1.0, 101.0], [False, False]) == pytest.approx([0.0, 100 / 2**0.5])
    assert normaliser.moments.count == 2
