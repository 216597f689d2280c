import pytest

from asyncrl.generate.vllm_orders import LoadReply, fault_of

DONE = LoadReply()
GONE = LoadReply("broadcast", "gone", is_touched=False)
HALF = LoadReply("generation", "half")


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([DONE, DONE], None),
        ([GONE, GONE], GONE),
        ([GONE, DONE], LoadReply("broadcast", "gone")),
        ([DONE, GONE], LoadReply("broadcast", "gone")),
        ([GONE, HALF], LoadReply("broadcast", "gone")),
        ([HALF, DONE], HALF),
    ],
)
def test_the_model_is_untouched_only_where_no_rank_loaded_anything(replies, expected) -> None:
    assert fault_of(replies) == expected
