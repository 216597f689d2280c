"""The reference on a worker gives the numbers that the learner's own forward gives."""

import numpy as np
import pytest
import torch

from asyncrl.inference.batching import pack
from asyncrl.inference.models import ReferenceModel
from asyncrl.schema.samples import (
    ids_from_bytes,
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
