import pytest

from asyncrl.errors import GenerationError
from asyncrl.generate.engine import EngineRequest
from asyncrl.generate.request_rules import RequestRules
from asyncrl.generate.vllm_requests import check_request, sampling_arguments
from asyncrl.schema.samples import SamplingParams

RULES = RequestRules(64, 100, frozenset({1, 2}))


def request(seed: int = 0, **sampling) -> EngineRequest:
    return EngineRequest("a", (5, 6), SamplingParams(**{"max_new_tokens": 4, **sampling}), seed)


def test_end_tokens_and_stop_tokens_are_both_stops_of_ours() -> None:
    arguments = sampling_arguments(request(stop_token_ids=(7,)), RULES)
    assert arguments["stop_token_ids"] == [1, 2, 7]
    assert arguments["ignore_eos"], "vLLM's own rule needs a tokenizer"


def test_max_tokens_is_always_set_and_seeds_fit_torchs_generator() -> None:
    arguments = sampling_arguments(request(seed=(1 << 64) - 1), RULES)
    assert arguments["max_tokens"] == 4
    assert 0 <= arguments["seed"] < 1 << 63


def test_a_greedy_request_has_a_seed_where_one_without_costs_the_others_theirs() -> None:
    greedy = request(temperature=0.0, seed=3)
    assert sampling_arguments(greedy, RULES)["temperature"] == 0.0
    seeded = sampling_arguments(greedy, RULES, seeds_greedy=True)
    assert (seeded["temperature"], seeded["seed"]) == (1.0, 3)
    assert 0 < seeded["top_p"] < 1e-6, "only the likeliest token is left"
    warm = request(temperature=0.5)
    assert sampling_arguments(warm, RULES, seeds_greedy=True) == sampling_arguments(warm, RULES)


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    with pytest.raises(GenerationError, match=r"0\.001 is not 0 .* below 0\.01"):
        check_request(request(temperature=0.001), RULES, ())
    check_request(request(temperature=0.0), RULES, ())
    with pytest.raises(GenerationError, match="running already"):
        check_request(request(), RULES, ("a",))
