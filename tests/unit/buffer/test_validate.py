from __future__ import annotations

import msgspec
import numpy as np
import pytest

from asyncrl.buffer.validate import SampleRefusedError, examine, examine_all
from asyncrl.schema.samples import ids_to_bytes, logprobs_to_bytes
from tests.builders import make_sample

GOOD = make_sample(tokens=[3, 4, 5], logprobs=[-0.5, 0.0, -2.0], versions=[1, 1, 2])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": b""}, "1 or more"),
        ({"token_ids": b"\1\0\0\0\1"}, "1 or more"),
        ({"prompt_ids": b""}, "1 or more"),
        ({"logprobs": logprobs_to_bytes([-0.5])}, "3 tokens, but 1 logprobs and 3 versions"),
        ({"versions": ids_to_bytes([1])}, "3 tokens, but 3 logprobs and 1 versions"),
        ({"loss_mask": b"\1"}, "loss mask of 1"),
        ({"loss_mask": b"\0\0\0"}, "nothing to train"),
        ({"loss_mask": b"\1\2\0"}, "other than 0 and 1"),
        ({"token_ids": ids_to_bytes([3, -4, 5])}, "token id -4 is negative"),
        ({"prompt_ids": ids_to_bytes([-1])}, "token id -1 is negative"),
        ({"logprobs": logprobs_to_bytes([-0.5, 0.01, -1.0])}, "at most 0"),
        ({"logprobs": logprobs_to_bytes([-0.5, np.nan, -1.0])}, "must be finite"),
        ({"logprobs": logprobs_to_bytes([-0.5, -np.inf, -1.0])}, "must be finite"),
        ({"versions": ids_to_bytes([1, 1, 3])}, "only 0 to 2 were ever published"),
        ({"versions": ids_to_bytes([-1, -1, -1])}, "versions span -1 to -1"),
        ({"attempt": 2**63}, "its attempt is 9223372036854775808"),
        ({"attempt": -1}, "its attempt is -1"),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused_with_the_reason(change, reason):
    with pytest.raises(SampleRefusedError, match=reason):
        examine(msgspec.structs.replace(GOOD, **change), newest_version=2, max_tokens=0)


def test_a_sample_too_long_for_a_row_is_refused():
    with pytest.raises(SampleRefusedError, match=r"5 tokens with its prompt; at most 4"):
        examine(GOOD, newest_version=2, max_tokens=4)


@pytest.mark.parametrize(
    "changes",
    [
        [{}, {"versions": ids_to_bytes([2, 2, 2])}, {"loss_mask": bytes([1, 0, 1])}],
        [{}, {"token_ids": ids_to_bytes([3, -4, 5])}, {}],
        [{}, {"logprobs": logprobs_to_bytes([0.0, float("nan"), 0.0])}, {}],
        [{}, {"versions": ids_to_bytes([1, 1, 3])}, {}],
        # Bytes cut off of one that the next one has too many of: laid end to end all of them look right.
        [{"token_ids": b"\0" * 11}, {"token_ids": b"\1" + ids_to_bytes([3, 4, 5])}, {"token_ids": ids_to_bytes([3, 4, -5])}],
        [],
    ],
)
def test_samples_looked_at_together_are_told_what_each_is_told_alone(changes):
    samples = [msgspec.structs.replace(GOOD, **change) for change in changes]
    alone = []
    for sample in samples:
        try:
            alone.append(examine(sample, newest_version=2, max_tokens=5))
        except SampleRefusedError as error:
            alone.append(str(error))
    together = examine_all(samples, newest_version=2, max_tokens=5)
    assert [str(answer) if isinstance(answer, SampleRefusedError) else answer for answer in together] == alone
