"""Every request gets one answer, and a bad sample fails alone."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError
from asyncrl.inference.judge import REFERENCE, Judge
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
    judge = Judge(_config(folder), folder / "model")
    judge.load_all()
    assert judge.loaded == (REFERENCE, "judge")
    requests = kit.random_requests(count=5)
    for request, answer in zip(requests, judge.judge(requests), strict=True):
        assert answer.error == ""
        assert len(answer.reference_logprobs) == len(request.token_ids)
        assert (logprobs_from_bytes(answer.reference_logprobs) < 0).all()
        assert list(answer.rewards) == ["judge"]


def test_answers_do_not_depend_on_who_is_judged_beside(kit, folder):
    judge = Judge(_config(folder), folder / "model")
    requests = kit.random_requests(count=6)
    together = judge.judge(requests)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = judge.judge([request])
        assert alone.rewards["judge"] == pytest.approx(answer.rewards["judge"], abs=1e-5)
        ours, theirs = logprobs_from_bytes(alone.reference_logprobs), logprobs_from_bytes(answer.reference_logprobs)
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_models_opened_beforehand_answer_as_those_opened_when_they_are_first_wanted(kit, folder):
    lazy, ready = (Judge(_config(folder, normalise="running"), folder / "model") for _ in range(2))
    assert (lazy.loaded, lazy.num_bytes) == ((), 0)
    ready.load_all()
    requests = kit.random_requests(count=3)
    assert lazy.judge(requests) == ready.judge(requests)
    assert lazy.loaded == ready.loaded == ("reference", "judge")
    assert lazy.num_bytes == ready.num_bytes > 0
    assert ready._normalisers["judge"].moments.count == 3


def test_evaluation_samples_get_rewards_alone_and_leave_the_running_figures(kit, folder):
    judge = Judge(_config(folder, normalise="running"), folder / "model")
    judge.judge(kit.random_requests(count=4))
    (answer,) = judge.judge([kit.request([3], [4, 5], purpose="eval")])
    assert answer.reference_logprobs == b""
    assert "judge" in answer.rewards
    assert judge._normalisers["judge"].moments.count == 4


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
def test_a_sample_that_cannot_be_judged_fails_alone_with_the_reason(kit, folder, prompt, response, reason):
    judge = Judge(_config(folder), folder / "model")
    good = kit.request([3], [4, 5])
    answers = judge.judge([good, kit.request(prompt, response, index=1), good])
    assert reason in answers[1].error
    assert answers[0].error == answers[2].error == ""
    assert answers[0].rewards == answers[2].rewards


def test_a_score_that_is_no_number_fails_its_sample_and_is_not_remembered(kit, folder):
    weights = load_file(folder / "judge" / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = math.nan
    save_file(weights, folder / "judge" / "model.safetensors", metadata={"format": "pt"})
    judge = Judge(_config(folder, normalise="running"), folder / "model")
    sick, well = judge.judge([kit.request([3], [7]), kit.request([4], [5])])
    assert sick.error == "reward model judge gave nan"
    assert well.error == ""
    assert math.isfinite(well.rewards["judge"])
    assert judge._normalisers["judge"].moments.count == 1


def test_a_reference_named_by_path_is_opened_in_place_of_the_runs_own_model(kit, folder):
    kit.save_policy(folder / "other", seed=5)
    raw = {"algorithm": {"kl": {}, "reference": {"where": "worker", "path": str(folder / "other")}}}
    judge = Judge(parse_config(raw), folder / "model")
    judge.load_all()
    held = judge.references.load(REFERENCE).model
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
