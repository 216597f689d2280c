"""Which requests share a forward pass, and where their tokens lie."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.inference.batching import num_tokens, pack, take_batch
from asyncrl.schema.samples import InferRequest, ids_from_bytes, ids_to_bytes

sequences = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=0, max_size=4), st.lists(st.integers(0, 9), min_size=1, max_size=6)),
    min_size=1,
    max_size=12,
)


def _requests(pairs):
    return [InferRequest(0, at, 0, ids_to_bytes(prompt), ids_to_bytes(answer)) for at, (prompt, answer) in enumerate(pairs)]


@given(sequences, st.integers(1, 30))
@settings(deadline=None)
def test_every_request_is_in_one_batch_in_order_and_batches_keep_the_budget(pairs, budget):
    requests = _requests(pairs)
    waiting, batches = deque(requests), []
    while waiting:
        batches.append(take_batch(waiting, budget))
    assert [request.index for batch in batches for request in batch] == list(range(len(requests)))
    for batch in batches:
        assert len(batch) == 1 or len(pack(batch).input_ids) <= budget


@given(sequences)
@settings(deadline=None)
def test_packed_sequences_are_the_requests_tokens_at_their_positions(pairs):
    requests = _requests(pairs)
    batch = pack(requests)
    for request, places in zip(requests, batch.sequences, strict=True):
        expected = ids_from_bytes(request.prompt_ids + request.token_ids).tolist()
        assert batch.input_ids[places].tolist() == expected
        assert batch.position_ids[places].tolist() == list(range(num_tokens(request)))
    assert batch.input_ids[batch.last_index].tolist() == [int(answer[-1]) for _, answer in pairs]


def test_a_common_prompt_is_laid_down_and_counted_once(kit):
    requests = [kit.request(range(2, 12), [at + 2], index=at) for at in range(4)]
    assert len(pack(requests).input_ids) == 10 + 4
    assert len(take_batch(deque(requests), 14)) == 4
    assert len(take_batch(deque(requests), 13)) == 3
