import numpy as np
import pytest

from asyncrl.packing.tensors import pack_step
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample, ids_from_bytes, logprobs_from_bytes
from tests.builders import make_sample


def _scored(group_id, index, prompt, tokens, versions, reward=0.0, loss_mask=b""):
    logprobs = [-0.1 * (t + 1) for t in range(len(tokens))]
    return ScoredSample(make_sample(group_id, index, tokens, prompt, logprobs, versions, loss_mask=loss_mask), reward)


GROUPS = [
    ScoredGroup(4, Prompt("a"), (_scored(4, 0, [1, 2], [10, 11, 12], [3, 3, 4], 1.0), _scored(4, 1, [1, 2], [13, 14], [4, 4]))),
    ScoredGroup(7, Prompt("b"), (_scored(7, 2, [5], [20, 21], [2, 5], 0.5, bytes([0, 1])),)),
]


def test_rows_hold_whole_samples_with_everything_aligned_to_its_token():
    batch = pack_step(5, GROUPS, tokens_per_row=10, temperature=0.7)

    assert [(s.group_id, s.index, s.row, s.start, s.prompt_tokens, s.response_tokens) for s in batch.samples] == [
        (4, 0, 0, 0, 2, 3),
        (4, 1, 0, 5, 2, 2),
        (7, 2, 0, 9, 1, 2),
    ]
    row = batch.rows[0]
    assert ids_from_bytes(row.token_ids).tolist() == [1, 2, 10, 11, 12, 1, 2, 13, 14, 5, 20, 21]
    assert ids_from_bytes(row.versions).tolist() == [-1, -1, 3, 3, 4, -1, -1, 4, 4, -1, 2, 5]
    assert list(row.loss_mask) == [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    logprobs = [0, 0, -0.1, -0.2, -0.3, 0, 0, -0.1, -0.2, 0, -0.1, -0.2]
    np.testing.assert_allclose(logprobs_from_bytes(row.behaviour_logprobs), logprobs, rtol=1e-6)
    assert (batch.step, batch.temperature, batch.num_trained_tokens, batch.replay) == (5, 0.7, 6, False)
    assert [s.reward for s in batch.samples] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("mask_below", "oldest", "num_trained"), [({}, [3, 4, 5], 6), ({"mask_below": 5}, [-1, -1, 5], 1)], ids=["all", "masked"]
)
def test_oldest_version_is_that_of_trained_tokens_and_a_sample_too_old_to_train_stays(mask_below, oldest, num_trained):
    batch = pack_step(9, GROUPS, tokens_per_row=100, temperature=1.0, **mask_below)
    assert [s.oldest_version for s in batch.samples] == oldest
    assert (batch.num_trained_tokens, len(batch.rows)) == (num_trained, 1)
