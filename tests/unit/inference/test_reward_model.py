"""Reward models of every sort: packed where that is the same, their own forward where it is not."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, Gemma2Config, LlamaForCausalLM, Qwen3Config

from asyncrl.config.run import RewardModel
from asyncrl.errors import ConfigError
from asyncrl.inference.models import RewardScorer, pack
from asyncrl.schema.samples import ids_from_bytes


def _open(folder, **settings):
    return RewardScorer(RewardModel(name="judge", path=str(folder), **settings), "cpu")


def _sequence(request):
    return torch.from_numpy(ids_from_bytes(request.prompt_ids + request.token_ids).astype(np.int64))


@pytest.mark.parametrize(("make_config", "is_packed"), [
    (partial(Qwen3Config, head_dim=8), True),
    (partial(Gemma2Config, head_dim=8, query_pre_attn_scalar=8, sliding_window=4), False),
    (BertConfig, False),
])  # fmt: skip
def test_scores_are_those_of_the_model_s_own_forward_read_at_the_last_token(kit, tmp_path, caplog, make_config, is_packed):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(make_config(**kit.tiny))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.eval().save_pretrained(tmp_path)
    model.config.pad_token_id = None  # some sequences end in the id that is both padding and end
    scorer = _open(tmp_path)
    assert scorer.is_packed == is_packed
    assert ("one sequence at a time" in caplog.text) != is_packed
    requests = kit.random_requests(count=6)
    for request, score in zip(requests, scorer.scores(pack(requests)), strict=True):
        with torch.no_grad():
            assert score == pytest.approx(model(_sequence(request)[None]).logits.item(), abs=1e-5)


@pytest.mark.parametrize(("kind", "expected"), [
    ("two outputs", r"'judge': .* has 2 outputs; a reward model has 1"),
    ("a policy", r"no weights for score\.weight \(1 in all\): it holds no whole model for AutoModelForSequenceClassification"),
    ("nothing", r"has no config\.json, no \*\.safetensors"),
])  # fmt: skip
def test_what_is_no_reward_model_is_refused(kit, tmp_path, kind, expected):
    if kind != "nothing":
        kit.save_model(tmp_path, **({"num_labels": 2} if kind == "two outputs" else {"made": LlamaForCausalLM}))
    with pytest.raises(ConfigError, match=expected):
        _open(tmp_path)
