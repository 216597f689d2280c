"""Which requests share a forward pass, and where their tokens lie."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.inference.models import pack, take_batch
from asyncrl.schema.samples import InferRequest, ids_to_bytes

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
