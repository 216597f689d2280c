import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.request_rules import RequestRules
from asyncrl.schema.samples import SamplingParams

RULES = RequestRules(64, 10, frozenset({1, 2}))


def request(num_prompt: int = 2, max_new_tokens: int = 4, **sampling) -> EngineRequest:
    return EngineRequest("a", (5,) * num_prompt, SamplingParams(max_new_tokens=max_new_tokens, **sampling), 0)


def test_the_last_id_of_the_vocabulary_is_in_it_and_the_next_is_not() -> None:
    RULES.check_ids((0, 63), "score")
    with pytest.raises(GenerationError, match="score: token id 64 is outside the vocabulary: allowed are 0 to 63"):
        RULES.check_ids((0, 64), "score")


def test_a_request_may_fill_the_limit_and_not_exceed_it() -> None:
    RULES.check(request(6, 4), running=())
    with pytest.raises(GenerationError, match=r"6 tokens plus max_new_tokens 5 is 11, over .*max_sequence_tokens \(10\)"):
        RULES.check(request(6, 5), running=())


def test_what_is_scored_may_fill_the_limit_that_the_engine_gives() -> None:
    assert RULES.scorable([3] * 10) == (3,) * 10
    assert RULES.scorable([3] * 9, limit=9) == (3,) * 9
    with pytest.raises(GenerationError, match="cannot score 11 tokens: 10 is the most"):
        RULES.scorable([3] * 11)
    with pytest.raises(GenerationError, match="cannot score 10 tokens: 9 is the most"):
        RULES.scorable([3] * 10, limit=9)


def test_a_request_ends_at_the_models_tokens_and_its_own_unless_it_ignores_all() -> None:
    assert RULES.stop_ids(request(stop_token_ids=(7,))) == {1, 2, 7}
    assert RULES.stop_ids(request(stop_token_ids=(7,), ignore_eos=True)) == set()
