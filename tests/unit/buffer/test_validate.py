import msgspec
import numpy as np
import pytest

from asyncrl.buffer.validate import examine
from asyncrl.schema.samples import Samples, ids_to_bytes, logprobs_to_bytes
from tests.builders import make_sample

GOOD = make_sample(tokens=[3, 4, 5], logprobs=[-0.5, 0.0, -2.0], versions=[1, 1, 2])


def _examine(*samples, max_tokens=0):
    return examine(Samples.of(samples), newest_version=2, max_tokens=max_tokens)


@pytest.mark.parametrize(("change", "reason"), [
    ({"token_ids": b""}, "one token or more"), ({"token_ids": b"\1\0\0\0\1"}, "1 tokens, but 1.25, 3, 3"),
    ({"logprobs": logprobs_to_bytes([-0.5])}, "3 tokens, but 3, 1, 3 token ids"), ({"prompt_ids": b""}, "1 or more"),
    ({"versions": ids_to_bytes([1])}, "3 tokens, but 3, 3, 1 token ids"), ({"loss_mask": b"\1"}, "loss mask of 1"),
    ({"loss_mask": b"\0\0\0"}, "nothing to train"), ({"loss_mask": b"\1\2\0"}, "other than 0 and 1"),
    ({"token_ids": ids_to_bytes([3, -4, 5])}, "token id -4 is negative"),
    ({"prompt_ids": ids_to_bytes([-1])}, "token id -1 is negative"),
    ({"logprobs": logprobs_to_bytes([-0.5, 0.01, -1.0])}, "at most 0"),
    ({"logprobs": logprobs_to_bytes([-0.5, np.nan, -1.0])}, "must be finite"),
    ({"logprobs": logprobs_to_bytes([-0.5, -np.inf, -1.0])}, "must be finite"),
    ({"versions": ids_to_bytes([1, 1, 3])}, "only 0 to 2 were ever published"),
    ({"versions": ids_to_bytes([-1, -1, -1])}, "versions span -1 to -1"),
    ({"attempt": 2**63}, "the attempt is 9223372036854775808"), ({"attempt": -1}, "the attempt is -1"),
])  # fmt: skip
def test_a_sample_that_contradicts_itself_is_refused_with_the_reason(change, reason):
    (said,) = _examine(msgspec.structs.replace(GOOD, **change))
    assert reason in said


@pytest.mark.parametrize("changes", [
    [{}, {"versions": ids_to_bytes([2, 2, 2])}, {"loss_mask": bytes([1, 0, 1])}],
    [{"versions": ids_to_bytes([2, 2, 2])}, {"versions": ids_to_bytes([2, 2, 2])}],
    [{}, {"token_ids": ids_to_bytes([3, -4, 5])}, {}], [{}, {"logprobs": logprobs_to_bytes([0.0, float("nan"), 0.0])}, {}],
    [{}, {"versions": ids_to_bytes([1, 1, 3])}, {}],
])  # fmt: skip
def test_samples_looked_at_together_are_told_what_each_is_told_alone(changes):
    samples = [msgspec.structs.replace(GOOD, **change) for change in changes]
    assert _examine(*samples, max_tokens=5) == [_examine(sample, max_tokens=5)[0] for sample in samples]
    too_long = "5 tokens with its prompt; at most 4 fit into a row (packing.tokens_per_row)"
    assert _examine(*samples, max_tokens=4) == [too_long] * len(samples)


def test_arrays_that_do_not_add_up_are_refused_whole():
    made = Samples.of([GOOD, GOOD])
    for change in ({"lengths": (3, 4)}, {"lengths": (6, 0)}, {"texts": ("x",)}, {"lengths": (3,)}, {"finish_reasons": ()}):
        said = examine(msgspec.structs.replace(made, **change), newest_version=2)
        assert len(said) == 2
        assert all(isinstance(each, str) for each in said)
