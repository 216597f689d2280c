"""Which requests share a forward pass; reward models of every sort: packed where that is the same, else their own forward."""

from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, BertConfig, Gemma2Config, LlamaForCausalLM, Qwen3Config

from asyncrl.config.run import RewardModel
from asyncrl.errors import ConfigError
from asyncrl.inference.models import RewardScorer, pack, take_batch
from asyncrl.schema.samples import InferRequest, ids_from_bytes, ids_to_bytes


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


texts = st.tuples(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 9), min_size=1, max_size=6))
sequences = st.lists(texts, min_size=1, max_size=12)


@given(sequences, st.integers(1, 30))
@settings(deadline=None)
def test_every_request_is_in_one_batch_in_order_and_batches_keep_the_budget(pairs, budget):
    requests = [InferRequest(0, at, 0, *map(ids_to_bytes, of_one)) for at, of_one in enumerate(pairs)]
    waiting, batches = deque(requests), []
    while waiting:
        batches.append(take_batch(waiting, budget))
    assert [request.index for batch in batches for request in batch] == list(range(len(requests)))
    for batch in batches:
        assert len(batch) == 1 or len(pack(batch).input_ids) <= budget


def test_a_common_prompt_is_laid_down_and_counted_once(kit):
    requests = [kit.request(range(2, 12), [at + 2], index=at) for at in range(4)]
    assert len(pack(requests).input_ids) == 10 + 4
    assert len(take_batch(deque(requests), 14)) == 4
    assert len(take_batch(deque(requests), 13)) == 3
