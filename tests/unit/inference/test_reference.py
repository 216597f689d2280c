"""The reference on a worker gives the numbers that the learner's own forward gives."""

import numpy as np
import pytest
import torch

from asyncrl.config.algorithm import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.inference.batching import pack
from asyncrl.inference.models import ReferenceModel
from asyncrl.learner.model.policy import open_model, run_row
from asyncrl.learner.step.microbatch import prepare
from asyncrl.packing.tensors import pack_step
from asyncrl.schema.samples import (
    Prompt,
    Sample,
    ScoredGroup,
    ScoredSample,
    ids_from_bytes,
    ids_to_bytes,
    logprobs_to_bytes,
)


def _lengths(requests):
    return [len(request.token_ids) // 4 for request in requests]


@pytest.fixture
def reference(kit, tmp_path):
    kit.save_policy(tmp_path)
    return ReferenceModel.open(tmp_path, dtype="float32", device="cpu")


def test_packed_logprobs_are_those_of_one_sequence_at_a_time_in_float64(kit, tmp_path, reference):
    requests = kit.random_requests()
    temperatures = [0.7 if at % 3 else 1.0 for at in range(len(requests))]
    given = reference.logprobs(pack(requests), _lengths(requests), temperatures)
    slow = kit.save_policy(tmp_path).double()
    for request, temperature, logprobs in zip(requests, temperatures, given, strict=True):
        token_ids = torch.from_numpy(ids_from_bytes(request.prompt_ids + request.token_ids).astype(np.int64))
        with torch.no_grad():
            table = (slow(token_ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        expected = table.gather(-1, token_ids[1:, None]).squeeze(-1)[-len(logprobs) :]
        assert logprobs.dtype == np.float32
        assert len(logprobs) == len(request.token_ids) // 4
        assert logprobs == pytest.approx(expected.numpy(), abs=1e-5)


def test_they_are_the_learners_own_forward_over_packed_rows(kit, tmp_path, reference):
    requests = kit.random_requests(count=9)
    groups = []
    for group_id in range(3):
        members = []
        for request in requests[3 * group_id : 3 * group_id + 3]:
            count = len(request.token_ids) // 4
            zeros = logprobs_to_bytes(np.zeros(count, dtype=np.float32))
            sample = Sample(
                group_id, request.index, 0, request.prompt_ids, request.token_ids, zeros, ids_to_bytes([0] * count),
                "stop", "", "g", 0.0, 1.0,
            )  # fmt: skip
            members.append(ScoredSample(sample, 0.0))
        groups.append(ScoredGroup(group_id, Prompt(f"p{group_id}"), tuple(members)))
    batch = pack_step(0, groups, tokens_per_row=64, temperature=0.8)
    learners = open_model_without_tokenizer(tmp_path)
    ours = reference.logprobs(pack(requests), _lengths(requests), [0.8] * len(requests))
    for row in prepare(batch).rows:
        logprobs = run_row(learners, row, temperature=0.8, chunk_tokens=7).logprobs
        for local, index in enumerate(row.sample_index):
            theirs = logprobs[row.sequence_ids == local].detach().numpy()
            assert ours[index] == pytest.approx(theirs, abs=1e-5)


def open_model_without_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    return open_model(folder, LearnerConfig())


def test_nothing_is_computed_of_a_sequence_that_wants_no_reference(kit, reference):
    requests = kit.random_requests(count=3)
    lengths = _lengths(requests)
    all_of_them = reference.logprobs(pack(requests), lengths, [1.0] * 3)
    some = reference.logprobs(pack(requests), [lengths[0], 0, lengths[2]], [1.0] * 3)
    assert len(some[1]) == 0
    assert some[0] == pytest.approx(all_of_them[0], abs=1e-6)
    assert some[2] == pytest.approx(all_of_them[2], abs=1e-6)


def test_the_float32_head_of_a_bfloat16_reference_is_nearer_to_the_truth(kit, tmp_path):
    model = kit.save_policy(tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    requests = kit.random_requests()
    batch, lengths, ones = pack(requests), _lengths(requests), [1.0] * len(requests)
    truth = np.concatenate(ReferenceModel.open(tmp_path, dtype="float32", device="cpu").logprobs(batch, lengths, ones))
    errors = []
    for fp32_head in (False, True):
        low = ReferenceModel.open(tmp_path, dtype="bfloat16", device="cpu", fp32_head=fp32_head)
        errors.append(np.abs(np.concatenate(low.logprobs(batch, lengths, ones)) - truth).mean())
    assert errors[1] < errors[0]


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm\.reference\.path: .* has no config\.json"):
        ReferenceModel.open(tmp_path, dtype="float32", device="cpu")
